"""Watches a running cell: shows new output, detects hangs, applies the cell's deadline.

See [Note: the life of a cell] in README.md.
"""

from __future__ import annotations

import time
from typing import Any

from minidist.kernel.cell import Cell, failure
from minidist.kernel.hang import (
    Place,
    describe,
    headline,
    is_hang,
    last_calls,
    place,
    stands,
    unmoved,
)
from minidist.kernel.ranks import Ranks

FIRST_LOOK_S = 1.0
LOOK_EVERY_S = 0.5
# It is a hang if ranks stand still for this long and wait for something that cannot come.
HANG_AFTER_S = 3.0
# If a rank stands still for this long, and ranks do different things, the cell says what each does.
TELL_AFTER_S = 10.0
# Before a cell is ended, its ranks have this long to say where they are: the machine may be busy.
LAST_WORD_S = 5.0


class Watch:
    """Looks at the ranks of one cell from time to time.

    Args:
        deadline_s: longest time of the cell in seconds; None sets no limit.
    """

    def __init__(self, cell: Cell, ranks: Ranks, deadline_s: float | None) -> None:
        self._cell, self._ranks = cell, ranks
        self._start = time.monotonic()
        self._end = None if deadline_s is None else self._start + deadline_s
        self._deadline_s = deadline_s
        self._next_look = self._start + FIRST_LOOK_S
        self._still_since = self._start
        self._before: dict[int, Place] = {}
        self._stands: dict[int, tuple[Place, float]] = {}  # rank -> where it stands, since when
        self._told = False

    def wait_s(self) -> float:
        """Seconds until `look` has something to do."""
        times = [self._next_look] + ([] if self._end is None else [self._end])
        return max(0.0, min(times) - time.monotonic())

    async def look(self) -> None:
        """Show new output, and end the cell if it hangs or is past its deadline."""
        now = time.monotonic()
        late = self._end is not None and now >= self._end
        if now < self._next_look and not late:
            return
        self._next_look = now + LOOK_EVERY_S
        cell = self._cell
        cell.outputs.tick()
        if cell.interrupted and not late:
            return
        places = await self.places()
        if not cell.unfinished or cell.broken is not None:
            return
        for rank, here in places.items():
            before = self._before.get(rank)
            if here.status == "waiting" and (before is None or not unmoved(before, here)):
                self._still_since = now
                self._before = places
        self._tell_of_ranks_apart(now, places)
        if not is_hang(places):
            self._still_since, self._before = now, places
        hangs = now - self._still_since >= HANG_AFTER_S
        if hangs or late:
            places = await self.places(LAST_WORD_S)
            if not cell.unfinished or cell.broken is not None:
                return
        if hangs and is_hang(places):
            self._stop("hang", "DistributedHang", headline(places), places)
        elif late:
            text = f"the cell did not end within its deadline of {self._deadline_s:g} s"
            self._stop("deadline", "DeadlineExceeded", text, places)

    def _tell_of_ranks_apart(self, now: float, places: dict[int, Place]) -> None:
        """Say once where the ranks are: an endless loop on one rank is never detected as a hang."""
        for rank in self._cell.unfinished:
            before = self._stands.get(rank)
            if before is None or not stands(before[0], places[rank]):
                self._stands[rank] = (places[rank], now)
        stood_s = now - min((self._stands[rank][1] for rank in self._cell.unfinished), default=now)
        apart = {(here.status, here.op, here.at) for here in places.values()}
        if self._told or stood_s < TELL_AFTER_S or len(apart) < 2:
            return
        self._told = True
        self._cell.outputs.tell(f"after {now - self._start:.0f} s")
        for rank in places:
            self._cell.outputs.tell(f"rank {rank}: {describe(rank, places)}")

    def _stop(self, kind: str, ename: str, text: str, places: dict[int, Place]) -> None:
        states = states_of(places)
        lines = "".join(f"\nrank {state['rank']}: {state['text']}" for state in states)
        self._cell.stop(kind, ename, text + lines + last_calls(places), states)

    async def places(self, within_s: float = 1.0) -> dict[int, Place]:
        """What each rank of the kernel does now; a rank that does not answer in time is silent."""
        reports = await self._ranks.ask_all(self._cell.ranks, "where", within_s)
        return places_of(self._cell, self._ranks.count, reports)


def places_of(
    cell: Cell, count: int, reports: dict[int, dict[str, Any] | None]
) -> dict[int, Place]:
    """Places of `count` ranks from the cell's replies and the reports of unfinished ranks."""
    places: dict[int, Place] = {}
    for rank in range(count):
        if rank not in cell.ranks:
            places[rank] = Place("absent")
            continue
        here = place(reports.get(rank))
        if rank in cell.unfinished:
            places[rank] = here
            continue
        reply = cell.replies[rank]
        failed = reply.get("status") != "ok"
        note = ": ".join(failure(reply))[:300] if failed else ""
        status = "error" if failed else "finished"
        last = {"calls": here.calls, "numbered": here.numbered}
        places[rank] = Place(status, started=here.started, note=note, **last)
    return places


def states_of(places: dict[int, Place]) -> list[dict[str, Any]]:
    """The per-rank list of an execute reply's `minidist` entry."""
    words = {"absent": "finished", "silent": "running"}
    return [
        {
            "rank": rank,
            "status": words.get(here.status, here.status),
            "text": describe(rank, places),
        }
        for rank, here in places.items()
    ]
