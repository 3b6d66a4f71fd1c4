"""Decides from the ranks' reports whether a cell hangs, and describes what each rank does.

A rank's report (see `diagnose.where`) is not trusted: it is only shown or compared, and only after
every value is checked for its type and cut to a bounded length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minidist.processes.last_calls import OVERSIZED, NumberedCall, disagreement

# A blocked thread may wake now and then to check a deadline; a working thread wakes far more often.
MAX_SWITCHES = 20
# Collectives, by Python's names, whose tensors have one shape on all ranks. Not `all_gather` and
# `reduce_scatter`: their lists may hold different sizes.
_SAME_SHAPES = ("all_reduce", "broadcast", "reduce", "barrier")
_SAME_SHAPES += ("all_gather_into_tensor", "all_gather_single")  # two names of one function
_SAME_SHAPES += ("reduce_scatter_tensor", "reduce_scatter_single")


@dataclass(frozen=True)
class Place:
    """What one rank does.

    Attributes:
        status: "finished" (or "error", "absent"), "waiting" in a collective, "running" or "silent".
        ranks: the collective's group; empty for all ranks.
        note: the error of a rank that failed, or a hint.
        mark: changes when the rank moves on.
        oversized: whether gloo has refused a message for its size.
        calls: the last collectives that the rank has begun, also in earlier cells, oldest first.
        numbered: more of these calls, without send and recv, to compare with other ranks.
    """

    status: str
    op: str = ""
    tensor: str = ""
    ranks: tuple[int, ...] = ()
    peer: int | None = None
    at: str = ""
    doing: str = ""
    started: int = 0
    pending: int = 0
    mark: object = None
    oversized: bool = False
    switches: int = 0
    note: str = field(default="", compare=False)
    calls: tuple[str, ...] = field(default=(), compare=False)
    numbered: tuple[NumberedCall, ...] = field(default=(), compare=False)


def _string(value: Any, size: int = 200) -> str:
    return value[:size] if isinstance(value, str) else ""


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def place(report: dict[str, Any] | None) -> Place:
    """The checked form of a rank's report; `report` is None if the rank gave none."""
    if report is None or "state" not in report:
        return Place("silent")
    tensor = " ".join(filter(None, (_string(report.get("dtype")), _string(report.get("shape")))))
    at = ""
    if report.get("cell"):
        at = f"{_string(report['cell'])}, line {_integer(report.get('line'))}"
        at += f": {_string(report.get('source'))}" if report.get("source") else ""
    group = report.get("ranks")
    return Place(
        status="waiting" if report["state"] == "collective" else "running",
        op=_string(report.get("op")),
        tensor=tensor,
        ranks=tuple(map(_integer, group[:4096])) if isinstance(group, list) else (),
        peer=report["peer"] if isinstance(report.get("peer"), int) else None,
        at=at,
        doing=_string(report.get("doing")),
        started=_integer(report.get("started")),
        pending=_integer(report.get("pending")),
        note=_string(report.get("hint")),
        oversized=report.get("oversized") is True,
        mark=(_integer(report.get("stack")), _integer(report.get("started"))),
        switches=_integer(report.get("switches")),
        calls=_calls(report.get("calls")),
        numbered=_numbered(report.get("numbered")),
    )


def _calls(value: Any) -> tuple[str, ...]:
    return tuple(map(_string, value[:8])) if isinstance(value, list) else ()


def _numbered(value: Any) -> tuple[NumberedCall, ...]:
    rows = (
        [row for row in value[:64] if isinstance(row, list) and len(row) == 4]
        if isinstance(value, list)
        else []
    )
    return tuple(
        NumberedCall(_string(g), _integer(n), _string(op), _string(t)) for g, n, op, t in rows
    )


def headline(places: dict[int, Place]) -> str:
    """Why the ranks wait forever, in a line: who called what, if that is known to differ."""
    if found := disagreement({rank: here.numbered for rank, here in places.items()}):
        return found
    if refused := [rank for rank, here in places.items() if here.oversized]:
        return f"rank {refused[0]}: {OVERSIZED}"
    failed = [str(rank) for rank, here in sorted(places.items()) if here.status == "error"]
    if failed:
        return f"rank{'s' * (len(failed) > 1)} {', '.join(failed)} failed, and others wait forever"
    return "the ranks wait for each other forever"


def unmoved(before: Place, now: Place) -> bool:
    """Whether a waiting rank has stood still between two reports."""
    return before.status == now.status == "waiting" and stands(before, now)


def stands(before: Place, now: Place) -> bool:
    """Whether a rank is where it was: it sleeps, waits, or loops there."""
    same = before.status == now.status and before.mark == now.mark
    return same and now.switches - before.switches <= MAX_SWITCHES


def is_hang(places: dict[int, Place]) -> bool:
    """Whether waiting ranks wait for something that cannot come.

    The caller also checks that the waiting ranks stand still for seconds. It is no hang if a rank
    runs, because it may still reach the collective, or if all ranks wait in the same collective,
    because their link may be slow. A rank that got an oversized message waits for ever.
    """
    if any(here.oversized for here in places.values()):
        return True
    everyone = tuple(sorted(places))
    moving = {r for r, p in places.items() if p.status in ("running", "silent")}
    waiting = {r for r, p in places.items() if p.status == "waiting"}
    if moving or not waiting:
        return False

    def can_end(rank: int) -> bool:
        here = places[rank]
        if here.op in ("send", "recv"):
            other = places.get(here.peer) if here.peer is not None else None
            return other is not None and {here.op, other.op} == {"send", "recv"}
        group = here.ranks or everyone
        same = (here.op, here.tensor, here.ranks or everyone)
        for member in group:
            there = places.get(member)
            if there is None or there.status != "waiting":
                return False
            if (there.op, there.tensor, there.ranks or everyone) != same and (
                there.op != here.op or here.op in _SAME_SHAPES
            ):
                return False
        return True

    return not any(can_end(rank) for rank in waiting)


def last_calls(places: dict[int, Place]) -> str:
    """A line per rank with its last collectives; empty if no rank is known to have begun one."""
    known = {rank: here.calls for rank, here in places.items() if here.calls}
    if not known or len(set(known.values())) == 1 < len(known):
        return ""  # with the same calls on every rank there is nothing to compare
    lines = [f"rank {rank}: {'; '.join(calls)}" for rank, calls in known.items()]
    return "\nlast collectives begun, the newest at the end:\n" + "\n".join(lines)


def describe(rank: int, places: dict[int, Place]) -> str:
    """One line: what `rank` does, without its number."""
    here = places[rank]
    at = f" at {here.at}" if here.at else ""
    if here.status == "waiting":
        details = [here.tensor] if here.tensor else []
        if here.peer is not None:
            details.append(f"{'from' if here.op == 'recv' else 'to'} rank {here.peer}")
        if here.ranks and len(here.ranks) < len(places):
            details.append(f"group of ranks {', '.join(map(str, here.ranks[:16]))}")
        inside = f" ({', '.join(details)})" if details else ""
        return f"waits in {here.op}{inside}{at}"
    if here.status in ("finished", "error"):
        what = "finished the cell" if here.status == "finished" else f"failed with {here.note}"
        text = f"{what} after {here.started} collective{'' if here.started == 1 else 's'}"
        ahead = [(p.started, r) for r, p in places.items() if p.started > here.started]
        if ahead:
            text += f"; rank {max(ahead)[1]} has started {max(ahead)[0]}"
        return text
    if here.status == "absent":
        return "takes no part in this cell (%%rank)"
    if here.status == "silent":
        return "gives no answer (the machine is busy, or code lets no other Python thread run)"
    hint = f". {here.note}" if here.note else ""
    return f"{here.doing or 'is running'}{at}{hint}"
