"""Interrupts a cell on all ranks, and makes the ranks able to communicate again afterwards."""

from __future__ import annotations

import asyncio
import time

from minidist.kernel.cell import Cell
from minidist.kernel.outputs import label
from minidist.kernel.ranks import Ranks
from minidist.kernel.watch import places_of, states_of

# Seconds after an interrupt at which a rank that is still blocked is cut off from its peers, and
# at which it is killed.
CUT_AFTER_S = 0.7
KILL_AFTER_S = 5.0
# A rank that has reacted may need longer to write its traceback when the machine is busy.
REPORT_WITHIN_S = 30.0


async def interrupt(cell: Cell, ranks: Ranks) -> None:
    """Raise KeyboardInterrupt on every rank that runs.

    A rank that does not react is first cut off from its peers; later all ranks are given up.
    """
    cell.interrupted = True
    start = time.monotonic()
    unasked = await _interrupt(ranks, cell.unfinished)
    next_cut, again, kill_at = start + CUT_AFTER_S, False, start + KILL_AFTER_S
    while cell.unfinished and cell.broken is None:
        now = time.monotonic()
        if now > kill_at:
            answers = await ranks.ask_all(cell.unfinished, "interrupt")
            reporting = [bool(answer and answer.get("reporting")) for answer in answers.values()]
            if all(reporting) and now - start < REPORT_WITHIN_S:
                kill_at = now + 1.0
                continue
            who = label(cell.unfinished)
            text = f"{who} did not react to the interrupt within {KILL_AFTER_S:.0f} s"
            states = states_of(places_of(cell, ranks.count, {}))
            for state in states:
                if state["rank"] in cell.unfinished:
                    state.update(status="lost", text="did not react to the interrupt")
            cell.stop("rank_lost", "RankLost", f"{text}; all ranks were killed", states)
            return
        if now >= next_cut:
            if again:  # not at the first cut: it would break off the first interrupt's traceback
                await ranks.ask_all(cell.unfinished, "interrupt")
            cell.cut = True
            await ranks.ask_all(cell.unfinished, "cut")
            next_cut, again = now + 1.5, True
        elif unasked and not cell.cut:  # a rank may not have begun the cell before
            unasked = await _interrupt(ranks, [rank for rank in unasked if rank in cell.unfinished])
        await asyncio.sleep(0.02)


async def _interrupt(ranks: Ranks, some: list[int]) -> list[int]:
    """Interrupts ranks; returns those that have not begun the cell, or that write a traceback."""
    answers = await ranks.ask_all(some, "interrupt")
    return [rank for rank, answer in answers.items() if answer and answer.get("reporting")]


async def recover(cell: Cell, ranks: Ranks) -> str:
    """Make the ranks able to communicate again; returns what was done, as a text for the user.

    An interrupted collective would pair with the peers' next collective and give wrong sums. So
    process groups are destroyed, unless no rank was cut off, all ranks have started the same number
    of collectives, and none is pending.
    """
    if cell.broken is not None:
        return ""
    everyone = list(range(ranks.count))
    reports = await ranks.ask_all(everyone, "where", 1.0)
    states = {(r.get("started"), r.get("pending")) for r in reports.values() if r}
    in_step = None not in reports.values() and len(states) == 1
    if not cell.cut and in_step and next(iter(states))[1] == 0:
        return ""
    answers = await ranks.ask_all(everyone, "reset", 5.0)
    if any(answer is None or "error" in answer for answer in answers.values()):
        text = "process groups could not be taken down after the interrupt"
        cell.stop("rank_lost", "RankLost", text, [])
        return ""
    if not any(answer.get("reset") for answer in answers.values() if answer):
        return ""
    return (
        "the interrupt stopped a collective half way, so the process group was destroyed on "
        "every rank: call init_process_group again before the next collective"
    )
