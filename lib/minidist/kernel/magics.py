"""The magics that the front itself obeys: `%%rank 0,2` and `%restart_ranks [N]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANK = re.compile(r"%%ranks?(?:[ \t]+(?P<ranks>[^\n]*))?$")
_RESTART = re.compile(r"%restart_ranks(?:[ \t]+(?P<count>[^\n]*))?$")


class MagicError(ValueError):
    """A magic of ours was written wrongly; the message says how to write it."""


@dataclass(frozen=True)
class Plan:
    """What a cell asks for.

    Attributes:
        code: what the ranks run.
        ranks: the ranks that run it; None for all.
        restart: whether fresh ranks are to be started first.
        count: how many fresh ranks; None for as many as before.
    """

    code: str
    ranks: tuple[int, ...] | None = None
    restart: bool = False
    count: int | None = None


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in re.split(r"[,\s]+", text.strip()):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise MagicError(
                f"%%rank: expected ranks such as 0 or 0,2 or 1-3, got {text.strip()!r}"
            )
        found += range(int(first), int(last or first) + 1) if int(last or first) < 10**6 else []
    return sorted(set(found))


def read(code: str, count: int) -> Plan:
    """The plan of a cell that is to run on `count` ranks.

    Raises:
        MagicError: a `%%rank` or `%restart_ranks` line cannot be understood.
    """
    body = code.lstrip("\n")
    first, _, rest = body.partition("\n")
    if match := _RESTART.match(first.rstrip()):
        text = (match["count"] or "").strip()
        if text and (not text.isdigit() or not 1 <= int(text) <= 1024):
            raise MagicError(f"%restart_ranks: expected a number of ranks, got {text!r}")
        new_count = int(text) if text else None
        plan = read(rest, new_count or count)
        return Plan(code=plan.code, ranks=plan.ranks, restart=True, count=new_count)
    if not (match := _RANK.match(first.rstrip())):
        return Plan(code=code)
    ranks = _numbers(match["ranks"] or "")
    if not ranks or ranks[-1] >= count:
        raise MagicError(f"%%rank: expected ranks from 0 to {count - 1}, got {match['ranks']!r}")
    # A cell magic must stay on the first line; otherwise a comment keeps line numbers right.
    if not rest.lstrip("\n").startswith("%%"):
        rest = f"# {first}\n{rest}"
    return Plan(code=rest, ranks=tuple(ranks))
