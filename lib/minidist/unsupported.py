"""What this package does not support, and what to use instead: each refusal is declared once.

A module declares what it refuses and raises it. The message and the page of the site are made of
the same words, so they cannot differ:

>>> sparse = Unsupported("BucketedDDP", "sparse gradients", instead="use sparse=False")
>>> str(sparse.error("got torch.sparse_coo"))
'BucketedDDP: got torch.sparse_coo (sparse gradients are not supported); use sparse=False'
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from typing import TypeVar

Error = TypeVar("Error", bound=Exception)

_all: list[Unsupported] = []


class Unsupported:
    """One thing that cannot be done here.

    Args:
        where: the class or function, as users call it.
        what: a plural, such as "sparse gradients".
        instead: what to do, such as "use sparse=False in the embedding".
    """

    def __init__(self, where: str, what: str, *, instead: str) -> None:
        self.where, self.what, self.instead = where, what, instead
        _all.append(self)

    def error(
        self,
        detail: str,
        kind: type[Error] = ValueError,
        *,
        where: str | None = None,
    ) -> Error:
        """The error to raise.

        Args:
            detail: what was met, on which rank.
            where: the class or function of this case, if `where` of the declaration names several.
        """
        return kind(
            f"{where or self.where}: {detail} ({self.what} are not supported); {self.instead}"
        )


def every_refusal() -> list[Unsupported]:
    """What the whole package refuses, by where; imports all of its modules."""
    import minidist

    for module in pkgutil.walk_packages(minidist.__path__, "minidist."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # an optional framework is not installed
                importlib.import_module(module.name)
    declared = [each for each in _all if each.where]
    return sorted(declared, key=lambda each: (each.where.lower(), each.what))


def page() -> str:
    """The site's page, in Markdown."""
    rows = "\n".join(
        f"| {' | '.join(_cell(text) for text in (each.where, each.what, each.instead))} |"
        for each in every_refusal()
    )
    return (
        "# What is not supported, and what to use instead\n\n"
        "Each line is an error that the library raises, on every rank that gets there, before "
        "anything is computed wrongly.\n\n"
        f"| Where | What is not supported | Instead |\n|---|---|---|\n{rows}\n"
    )


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("_", r"\_").replace("*", r"\*")
