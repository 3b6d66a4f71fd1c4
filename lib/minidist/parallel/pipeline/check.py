"""Checks that a schedule can run and does all of the work; and finds an order in which it can run.

>>> from minidist.parallel.pipeline.schedule import Action, Kind, Schedule
>>> F, B = Kind.FORWARD, Kind.BACKWARD
>>> rows = ((Action(F, 0), Action(B, 0), Action(F, 1), Action(B, 1)),
...         (Action(F, 1), Action(B, 1), Action(F, 0), Action(B, 0)))
>>> check_schedule(Schedule("mine", 2, 2, rows))
Traceback (most recent call last):
ValueError: mine: deadlock: rank 0 at B0 waits for B0 of rank 1; rank 1 at F1 waits for F1 of rank 0
"""

from __future__ import annotations

from collections.abc import Iterator

from minidist.parallel.pipeline.schedule import Action, Kind, Schedule


def check_schedule(schedule: Schedule) -> None:
    """Raise ValueError, naming the rank, unless the schedule can run and does all of the work.

    Every rank must have F of every micro-batch and chunk exactly once. If any rank has a B, W or U,
    then every rank must also have all actions of this kind exactly once. Then the check walks all
    ranks through their lists: an action runs when everything that it `needs` is over. If no rank
    can go on, the schedule has a deadlock.
    """
    _check_complete(schedule)
    for _ in in_order(schedule):
        pass


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """All (rank, action), ordered so that each comes after everything that it needs.

    Raises:
        ValueError: a deadlock; the message says what every stuck rank waits for.
    """
    at = [0] * schedule.num_ranks
    over: set[tuple[int, Action]] = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if any(need not in over for need in schedule.needs(rank, action)):
                    break
                over.add((rank, action))
                at[rank] += 1
                moved = True
                yield rank, action
    stuck = [
        f"rank {rank} at {actions[at[rank]]} waits for "
        + " and ".join(
            f"{action} of rank {other}"
            for other, action in schedule.needs(rank, actions[at[rank]])
            if (other, action) not in over
        )
        for rank, actions in enumerate(schedule.actions)
        if at[rank] < len(actions)
    ]
    if stuck:
        raise ValueError(f"{schedule.name}: deadlock: {'; '.join(stuck)}")


def _check_complete(schedule: Schedule) -> None:
    if len(schedule.actions) != schedule.num_ranks:
        raise ValueError(
            f"{schedule.name}: expected a list of actions for each of {schedule.num_ranks} ranks, "
            f"got {len(schedule.actions)}"
        )
    kinds = schedule.kinds | {Kind.FORWARD}
    expected = {
        Action(kind, micro_batch, chunk)
        for kind in kinds
        for micro_batch in range(schedule.num_micro_batches)
        for chunk in range(schedule.num_chunks)
    }
    for rank, actions in enumerate(schedule.actions):
        seen: set[Action] = set()
        for action in actions:
            if action not in expected:
                raise ValueError(
                    f"{schedule.name}: rank {rank} has {action}, but there are "
                    f"{schedule.num_micro_batches} micro-batches and {schedule.num_chunks} chunks"
                )
            if action in seen:
                raise ValueError(f"{schedule.name}: rank {rank} has {action} twice")
            seen.add(action)
        if missing := expected - seen:
            names = " ".join(sorted(map(str, missing)))
            raise ValueError(f"{schedule.name}: rank {rank} never runs {names}")
