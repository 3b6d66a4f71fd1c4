"""From a schedule to the program of each rank: its computations, and the messages between them.

The schedule determines which rank sends what to which rank. This module chooses *when* each rank
posts its sends and receives. Ranks must never wait for each other in a circle, even if a send
returns only after its receive, and if the messages of a rank run one after the other (as on NCCL's
stream; gloo is less strict). The rule, and why it works:

1. Put all computations and messages of all ranks into one order in time: computations by their
   start in an ideal run, each message right after the computation that made it.
2. Every rank does its own part of this order. The first item of the order that is not over can
   always run: everything before it is over, so both ends of a message are free. So there is no
   deadlock.
3. A receive moves up past one computation of its rank, but never past another message. It is then
   posted before this computation, which hides the transfer. The order of messages does not change,
   so the proof still holds. Adjacent messages become one batch, with at most one receive: a batch
   is over only when all of its messages are, and no rank should wait for two inputs to get one.

>>> from minidist.parallel.pipeline.schedule import one_f_one_b
>>> for step in make_program(one_f_one_b(2, 2))[1]:
...     print(step)
Exchange(recv F0 from 0)
Exchange(recv F1 from 0)
F0
B0
Exchange(send B0 to 0)
F1
B1
Exchange(send B1 to 0)

No torch in this file.
"""

from __future__ import annotations

from dataclasses import dataclass

from minidist.parallel.pipeline.schedule import Action, Kind, Schedule
from minidist.parallel.pipeline.simulate import StageTimes, simulate


@dataclass(frozen=True)
class Message:
    """An activation (F) or the gradient of an activation (B), sent from one rank to another.

    Args:
        made_by: the action on rank `source` whose result is sent.
        used_by: the action on rank `target` that needs this result.
    """

    source: int
    target: int
    made_by: Action
    used_by: Action


@dataclass(frozen=True)
class Exchange:
    """Messages that a rank posts together, in one batch_isend_irecv, in this order."""

    rank: int
    messages: tuple[Message, ...]

    @property
    def receives(self) -> bool:
        return any(message.target == self.rank for message in self.messages)

    def __str__(self) -> str:
        texts = (
            f"send {m.made_by} to {m.target}"
            if m.source == self.rank
            else f"recv {m.made_by} from {m.source}"
            for m in self.messages
        )
        return f"Exchange({', '.join(texts)})"


Step = Action | Exchange


def make_program(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """The program of each rank: its actions, and the exchanges between them.

    Raises:
        ValueError: the schedule is invalid.
    """
    # 1. One order of everything. An item is (sort key, rank, action or message); at equal times,
    # messages come first.
    spans = simulate(schedule, StageTimes()).spans
    end_s = {(rank, s.action): s.end_s for rank, of in enumerate(spans) for s in of}
    order: list[tuple[tuple[float, int, int, int], int, Action | Message]] = []
    for rank, of_rank in enumerate(spans):
        for position, span in enumerate(of_rank):
            order.append(((span.start_s, 1, rank, position), rank, span.action))
            for source, made_by in schedule.needs(rank, span.action):
                if source != rank:
                    message = Message(source, rank, made_by, span.action)
                    key = (end_s[source, made_by], 0, source, rank)
                    order.append((key, source, message))
    order.sort(key=lambda item: item[0])

    # 2. Each rank's part of the order.
    programs: list[list[Step | Message]] = [[] for _ in spans]
    for _, rank, thing in order:
        programs[rank].append(thing)
        if isinstance(thing, Message):
            programs[thing.target].append(thing)
    return tuple(tuple(_batch(rank, program)) for rank, program in enumerate(programs))


def _batch(rank: int, program: list[Step | Message]) -> list[Step]:
    # 3. Receives move up past one computation; then adjacent messages are joined.
    steps: list[Step | Message] = []
    for thing in program:
        receive = isinstance(thing, Message) and thing.target == rank
        if receive and steps and isinstance(steps[-1], Action):
            steps.insert(-1, thing)
        else:
            steps.append(thing)
    result: list[Step] = []
    for thing in steps:
        if not isinstance(thing, Message):
            result.append(thing)
            continue
        before = result[-1] if result else None
        if isinstance(before, Exchange) and not (thing.target == rank and before.receives):
            result[-1] = Exchange(rank, (*before.messages, thing))
        else:
            result.append(Exchange(rank, (thing,)))
    return result


def num_messages(schedule: Schedule) -> int:
    """Number of messages of one step over all ranks: 2 m (p v - 1) if p > 1."""
    return sum(
        source != rank
        for rank, actions in enumerate(schedule.actions)
        for action in actions
        if action.kind in (Kind.FORWARD, Kind.BACKWARD)
        for source, _ in schedule.needs(rank, action)
    )
