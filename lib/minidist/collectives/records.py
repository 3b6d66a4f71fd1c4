"""The parts of a log: the record of one collective, and the merged records of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minidist.errors import MismatchError


@dataclass
class Record:
    """One collective on one rank. Times are seconds since the epoch, `time.time()`."""

    kind: str  # "all_reduce", "ring_all_reduce", "send" ...
    op: str  # the reduction; "" if the collective does not reduce
    group: str  # name of the process group
    ranks: tuple[int, ...]  # its global ranks
    number: int | None  # how many collectives of this group came before; None for send and recv
    dtype: str
    shape: tuple[int, ...]  # of the first tensor
    num_bytes: int  # of this rank's message
    issued_s: float
    ended_s: float | None = None  # None: not over, or torch does not report the end
    waited_s: float | None = None  # how long wait() blocked this rank; our own collectives only
    num_bytes_sent: int | None = None  # by this rank; our own collectives only

    @property
    def took_s(self) -> float | None:
        """From issue to completion, waiting for late ranks included."""
        return None if self.ended_s is None else self.ended_s - self.issued_s

    @property
    def ring_bytes(self) -> float:
        """Bytes that this rank sends: those counted, or those of a ring for torch's collectives.

        A collective with a root counts as what its ranks send on average.
        """
        if self.num_bytes_sent is not None:
            return self.num_bytes_sent
        n = len(self.ranks)
        share = {
            "all_reduce": 2 * (n - 1) / n,
            "all_gather": n - 1,
            "send": 1,
            "recv": 0,
            "barrier": 0,
        }
        return self.num_bytes * share.get(self.kind, (n - 1) / n)


@dataclass(frozen=True)
class Meeting:
    """One collective on all ranks that took part in it."""

    record: Record  # the record of the first rank
    arrived_s: dict[int, float]  # global rank -> when it called

    @property
    def last_rank(self) -> int:
        return max(self.arrived_s, key=lambda rank: self.arrived_s[rank])

    @property
    def waited_s(self) -> dict[int, float]:
        """Global rank -> how long this rank waited for the last rank to call."""
        last_s = self.arrived_s[self.last_rank]
        return {rank: last_s - at_s for rank, at_s in self.arrived_s.items()}


class MergedLog:
    """The logs of several ranks, matched by collective. `CollectiveLog.gather` returns this."""

    def __init__(self, logs: dict[int, list[Record]]) -> None:
        self.logs = logs
        self.meetings: list[Meeting] = []
        by_key: dict[Any, dict[int, Record]] = {}
        for rank, records in logs.items():
            for record in records:
                if record.number is not None:
                    key = (record.group, record.ranks, record.number)
                    by_key.setdefault(key, {})[rank] = record
        for (group, ranks, number), found in by_key.items():
            here = [rank for rank in ranks if rank in logs]
            said = {r: f"{found[r].kind} {found[r].op}".strip() for r in here if r in found}
            if len(said) < len(here) or len(set(said.values())) > 1:
                what = ", ".join(f"rank {r}: {said.get(r, 'nothing')}" for r in here)
                raise MismatchError(f"collective {number} of group {group!r} differs: {what}")
            arrived = {rank: found[rank].issued_s for rank in here}
            self.meetings.append(Meeting(found[here[0]], arrived))
        self.meetings.sort(key=lambda meeting: min(meeting.arrived_s.values()))

    def waited_s(self) -> dict[int, float]:
        """Global rank -> seconds that this rank waited for other ranks, over all collectives."""
        total = dict.fromkeys(sorted(self.logs), 0.0)
        for meeting in self.meetings:
            for rank, seconds in meeting.waited_s.items():
                total[rank] += seconds
        return total

    def __str__(self) -> str:
        ranks = sorted(self.logs)
        rows = [
            [
                *(m.record.group, text(m.record.number), m.record.kind),
                *(f"{m.record.num_bytes:,}", str(m.last_rank)),
                *(milliseconds(m.waited_s.get(rank)) for rank in ranks),
            ]
            for m in self.meetings
        ]
        head = ["group", "no", "collective", "bytes", "last rank"]
        return table([*head, *(f"rank {rank} waited ms" for rank in ranks)], rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Text in columns.

    >>> print(table(["op", "bytes"], [["all_reduce", "8"]]))
    op          bytes
    all_reduce  8
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
    return "\n".join(lines)


def text(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "()"


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"
