"""Checks against cheating for every criterion that times some steps on the emulated cluster.

The broker charges a layer's compute at the moment when a rank requests the layer's factor. The
time of a collective follows from its members and bytes. So a rank could request the factors of
later steps during a step that is not timed, or reduce gradients in a group of one rank, which takes
no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from autograder.criteria.criterion import Finding
from minidist.emulate.trace import Collective, Event

AHEAD = (
    "the compute of a later step was asked for before that of an earlier one had ended: each step "
    "goes forward and backward before the next one begins."
)


def find_ahead(events: Iterable[Event], rank: int, passes: int = 1) -> Finding | None:
    """A finding if `rank` was charged for a step before an earlier step had ended.

    Args:
        passes: number of forward and backward passes in one step (its micro-batches).
    """
    steps = [e.step // passes for e in events if e.kind == "compute" and e.step is not None]
    return Finding(AHEAD, rank) if any(b < a for a, b in pairwise(steps)) else None


def find_disorder(events: Iterable[Event], rank: int) -> Finding | None:
    """A finding if a layer went forward after the backward of the same pass had begun.

    Otherwise a rank could ask for the compute of a backward early, and hide its late traffic.
    """
    begun: set[int] = set()
    for event in events:
        if event.kind != "compute" or event.step is None:
            continue
        if event.direction == "forward" and event.step in begun:
            return Finding(
                "a layer went forward after the backward pass of the same step had begun.", rank
            )
        if event.direction == "backward":
            begun.add(event.step)
    return None


def reaches_all(collective: Collective, world_size: int) -> bool:
    """Whether all ranks took part, or, for a send, whether a different rank received it."""
    if not collective.completed:
        return False  # the other ranks never joined: only this rank knows the group, for example
    if collective.kind == "send":
        return len(set(collective.ranks)) == 2
    return len(collective.ranks) == world_size
