"""Whether a task is still as it was handed out, where a bare NotImplementedError is raised.

One with a message is an ordinary error: torch raises it for a module whose `forward` is misspelt.
"""

from __future__ import annotations

import re

_BARE = re.compile(r"\bNotImplementedError:? *$", re.MULTILINE)


def is_not_started(error: BaseException | str) -> bool:
    """Also where a different process met it, and only the text of its error or its log is left."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return _BARE.search(text) is not None
