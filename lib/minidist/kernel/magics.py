"""The magics that the front itself obeys, on a cell's first line.

`%%rank 0,2`, `%ranks`, `%restart_ranks [N] [--rerun]`, and `%debug` alone on its line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_RANK = re.compile(r"%%ranks?(?:[ \t]+(?P<ranks>[^\n]*))?$")
_RESTART = re.compile(r"%restart_ranks(?:[ \t]+(?P<words>[^\n]*))?$")
_SHOW = re.compile(r"%ranks$")
_DEBUG = re.compile(r"%debug$")
# Not str.isdigit, which also accepts superscripts, which int() refuses, and numbers of any length.
_NUMBER = re.compile(r"[0-9]{1,6}\Z")


class MagicError(ValueError):
    """One of the front's magics was written wrongly; the message says how to write it."""


@dataclass(frozen=True)
class Plan:
    """What a cell asks for.

    Attributes:
        code: what the ranks run.
        ranks: the ranks that run it; None for all.
        restart: whether fresh ranks are to be started first.
        count: how many fresh ranks; None for as many as before.
        rerun: whether they run the cells above first.
        show: whether to show the table of ranks.
        debug: whether to run the code on the lowest rank that failed last.
    """

    code: str
    ranks: tuple[int, ...] | None = None
    restart: bool = False
    count: int | None = None
    rerun: bool = False
    show: bool = False
    debug: bool = False


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in re.split(r"[,\s]+", text.strip()):
        first, dash, last = part.partition("-")
        if not _NUMBER.match(first) or (dash and not _NUMBER.match(last)):
            raise MagicError(
                f"%%rank: expected ranks such as 0 or 0,2 or 1-3, got {text.strip()!r}"
            )
        found += range(int(first), int(last or first) + 1)
    return sorted(set(found))


def read(code: str, count: int, least: int = 1, *, fixed: bool = False) -> Plan:
    """The plan of a cell for `count` ranks; `%restart_ranks` must ask for `least` ranks or more.

    If the ranks are `fixed`, because the program that started the kernel decides on them,
    `%restart_ranks` is ignored and the rest of the cell is run.

    Raises:
        MagicError: a `%%rank` or `%restart_ranks` line cannot be understood.
    """
    body = code.lstrip("\n")
    first, _, rest = body.partition("\n")
    line = first.rstrip()
    if match := _RESTART.match(line):
        words = (match["words"] or "").split()
        rerun = "--rerun" in words
        numbers = [word for word in words if word != "--rerun"]
        wrong = [w for w in numbers if not _NUMBER.match(w) or not 1 <= int(w) <= 1024]
        if wrong or len(numbers) > 1:
            text = " ".join(words)
            raise MagicError(
                f"%restart_ranks: expected a number of ranks and perhaps --rerun, got {text!r}"
            )
        new_count = int(numbers[0]) if numbers else None
        if new_count is not None and new_count < least:
            raise MagicError(
                f"%restart_ranks: expected {least} ranks or more, one on each node, got {new_count}"
            )
        if fixed:
            return read(rest, count, least, fixed=True)
        plan = read(rest, new_count or count, least)
        return replace(plan, restart=True, count=new_count, rerun=rerun)
    if _SHOW.match(line):
        return replace(read(rest, count, least, fixed=fixed), show=True)
    if _DEBUG.match(line) and not rest.strip():
        return Plan(code=line, debug=True)
    if not (match := _RANK.match(line)):
        return Plan(code=code)
    ranks = _numbers(match["ranks"] or "")
    if not ranks or ranks[-1] >= count:
        raise MagicError(f"%%rank: expected ranks from 0 to {count - 1}, got {match['ranks']!r}")
    # A comment in place of `%%rank` keeps line numbers right. It is left out if a cell magic
    # follows, which must be on the first line.
    if not rest.lstrip("\n").startswith("%%"):
        rest = f"# {first}\n{rest}"
    return Plan(code=rest, ranks=tuple(ranks))


def without_restart(code: str) -> str:
    """The code of a cell without its first line, if that is `%restart_ranks`.

    >>> without_restart("%restart_ranks 3\\nx = 1"), without_restart("x = 1")
    ('x = 1', 'x = 1')
    """
    first, _, rest = code.lstrip("\n").partition("\n")
    return rest if _RESTART.match(first.rstrip()) else code
