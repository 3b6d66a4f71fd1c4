"""What every criterion asks that takes the time of some steps on the emulated cluster.

The broker charges a layer's compute when its factor is asked for, whenever that is, and a
collective takes as long as its members and bytes say. So a rank could pay for later steps in one
that is not timed, or reduce gradients in a group of its own, in no time.
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
    """A finding where `rank` was charged for a step before one that comes before it.

    Args:
        passes: forward and backward passes of one step (its micro-batches).
    """
    steps = [e.step // passes for e in events if e.kind == "compute" and e.step is not None]
    return Finding(AHEAD, rank) if any(b < a for a, b in pairwise(steps)) else None


def reaches_all(collective: Collective, world_size: int) -> bool:
    """Whether all ranks have taken part, or it is a message that another one has taken."""
    if not collective.completed:
        return False  # the others never came: a group that only this rank knows, say
    if collective.kind == "send":
        return len(set(collective.ranks)) == 2
    return len(collective.ranks) == world_size
