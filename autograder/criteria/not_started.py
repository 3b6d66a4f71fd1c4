"""Whether a task is still as it was handed out, where a bare NotImplementedError is raised.

One with a message is an ordinary error: torch raises it for a module whose `forward` is misspelt.
"""

from __future__ import annotations

import re

_BARE = re.compile(r"\bNotImplementedError:? *$", re.MULTILINE)


def is_not_started(error: BaseException | str) -> bool:
    """Whether `error`, or the text of an error or log of a different process, says so."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return _BARE.search(text) is not None
