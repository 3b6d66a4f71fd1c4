"""Whether the programs of a pipeline's ranks can run at all, under the strictest network."""

from __future__ import annotations

from minidist.parallel.pipeline.program import Exchange, Message, Step


def check_program(programs: tuple[tuple[Step, ...], ...]) -> None:
    """Raise ValueError on a deadlock, or if a rank uses or sends something before it has it.

    Walks all ranks under the strictest rules that a network could have: an exchange is over only
    when both ends of all its messages are posted, and until then its rank does nothing else.
    """
    at = [0] * len(programs)
    posted: dict[Message, set[int]] = {}
    over: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                step = program[at[rank]]
                if isinstance(step, Exchange):
                    for message in step.messages:
                        if message.source == rank and message.made_by not in program[: at[rank]]:
                            raise ValueError(f"rank {rank} sends {message.made_by} before it ran")
                        posted.setdefault(message, set()).add(rank)
                    if any(len(posted[message]) < 2 for message in step.messages):
                        break
                    over.update(step.messages)
                else:
                    late = [
                        m
                        for other in program[at[rank] :]
                        if isinstance(other, Exchange)
                        for m in other.messages
                        if m.target == rank and m.used_by == step
                    ]
                    if late:
                        raise ValueError(f"rank {rank} runs {step} before it receives {late[0]}")
                at[rank] += 1
                moved = True
    stuck = [f"rank {r} at {p[at[r]]}" for r, p in enumerate(programs) if at[r] < len(p)]
    if stuck:
        raise ValueError(f"deadlock: {'; '.join(stuck)}")
