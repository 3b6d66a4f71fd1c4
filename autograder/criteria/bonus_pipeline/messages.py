"""Criterion for what a pipeline sends, judged from the broker's record of all messages.

Emulated messages leave at once, so a missing wait does no harm, but the record shows it: a rank
knows that a message has left if it has waited for that message, or for a later one that implies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autograder.criteria.bonus_pipeline import parts
from autograder.criteria.bonus_pipeline.emulated import (
    ATOL,
    MESSAGE_BYTES,
    SAMPLES,
    WIDTH,
    draw_run,
    trouble,
)
from autograder.criteria.bonus_pipeline.plan import gpipe_of, one_f_one_b_everywhere
from autograder.criteria.common import carried, oracle
from autograder.criteria.common.emulated import sends_of
from autograder.criteria.common.pretending import in_world_of
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from minidist.emulate.trace import Event

SLACK_BYTES = 1_000  # for a loss, or for shapes that ranks agree on once
ALONE = 2  # micro-batches of the call with one rank


def draw_messages(draw: Draw) -> list[Values]:
    """1F1B with a drawn number of micro-batches."""
    n, m = draw.world_size, draw.world_size + int(draw.shared().integers(1, 5))
    return draw_run(draw, one_f_one_b_everywhere(n, m))


def observe_messages(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """One call on uncharged stages; then, on rank 0, one in a world of one rank."""
    stage = parts.make_stage(inputs, context)
    run_pipeline(*parts.arguments(stage, inputs, context, 0))
    alone = _observe_alone(run_pipeline, inputs, context) if context.rank == 0 else {}
    return {"done": True} | alone


def _observe_alone(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """The gradients of one stage that is the first and the last one, or what was raised."""
    from minidist.launch import isolated_world

    stage = parts.make_stage(inputs, context)
    _, _, x, _, loss_fn, _ = parts.arguments(stage, inputs, context, 0)
    assert x is not None
    world = {"store": dist.HashStore(), "rank": 0, "world_size": 1, "base": 9_000_000}
    try:
        # A send to a rank that does not exist waits in vain for its address.
        alone = isolated_world("gloo", **world, timeout_s=5.0)
        with alone, in_world_of(run_pipeline, 1, rank=0):
            run_pipeline(stage, gpipe_of(ALONE), x[:ALONE], x[:ALONE], loss_fn, None)
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"[:300]}
    return parts.gradients_of(stage, 0)


def _crossing(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What has to cross each stage border: the activations of all samples, and their gradients."""
    h, y = parts.batch_of(case, 0)
    outputs: list[torch.Tensor] = []
    for stage in parts.stages_of(case):
        h = stage(h)
        outputs.append(h)
    grads = torch.autograd.grad(oracle.mse(h, y), outputs[:-1]) if case.world_size > 1 else ()
    return [output.detach() for output in outputs[:-1]], list(grads)


def _rows(case: Case, source: int, target: int) -> np.ndarray:
    """The micro-batches that `source` has sent to `target`: one row of numbers each."""
    m = len(case.inputs[0]["cases"][0]["sizes"])
    sent = [
        c.payloads.get(source)
        for c in case.trace.collectives
        if c.kind == "send" and c.ranks == (source, target) and c.nbytes >= MESSAGE_BYTES
    ]
    size = SAMPLES * WIDTH
    numbers = carried.numbers_in([p for p in sent if p is not None], "float32", (m + 1) * size)
    return numbers[: numbers.size // size * size].reshape(-1, size)


def _wrong_content(case: Case) -> Iterator[Finding]:
    """A finding if an activation or gradient is missing in the messages between two neighbours.

    A gradient may have any factor, because `pipe_scale` checks what the loss is divided by.
    """
    for border, (h, grad) in enumerate(zip(*_crossing(case), strict=True)):
        on, back = _rows(case, border, border + 1), _rows(case, border + 1, border)
        for i, part in enumerate(h.split(SAMPLES)):
            near = np.isclose(on, part.numpy().ravel(), rtol=parts.RTOL, atol=ATOL)
            if not near.all(axis=1).any():
                yield Finding(
                    f"the activation of micro-batch {i} was not in what this rank sent to rank "
                    f"{border + 1}.",
                    border,
                )
                return
        for i, part in enumerate(grad.split(SAMPLES)):
            wanted = part.numpy().ravel()
            factors = np.clip(back, -1e30, 1e30) @ wanted / (wanted @ wanted)
            off = np.abs(back - factors[:, None] * wanted).max(axis=1, initial=0.0)
            if not (off <= parts.RTOL * np.abs(factors) * np.abs(wanted).max())[factors != 0].any():
                why = (
                    "What was sent is not zero: does the gradient that came in go backward from "
                    "the output of the micro-batch that the step names?"
                    if back.any()
                    else "What goes back is the .grad of what was received, after backward."
                )
                yield Finding(
                    f"the gradient of micro-batch {i}'s activation was not in what this rank "
                    f"sent to rank {border}. {why}",
                    border + 1,
                )
                return


def _still_here(case: Case, rank: int) -> int:
    """How many messages of this rank may not have left when its call ends.

    A rank knows its own events, and all events that precede a message or collective for which it
    has waited. A message has left if its sender or receiver is known to have waited for it.
    """
    events = case.trace.events
    issues: dict[str, dict[int, int]] = {}  # key -> rank -> index of the event
    kinds: dict[str, Event] = {}
    for issuer, own in enumerate(events):
        for at, e in enumerate(own):
            if e.kind == "issue":
                issues.setdefault(e.key, {})[issuer] = at
                kinds.setdefault(e.key, e)
    known, again = {rank: len(events[rank])}, [rank]  # of each rank, how many events are known
    waited: set[str] = set()
    while again:
        there = again.pop()
        keys = [e.key for e in events[there][: known[there]] if e.kind == "wait"]
        waited.update(keys)
        for key in keys:
            for issuer, at in issues.get(key, {}).items():
                if issuer in _told_by(kinds[key], there) and at >= known.get(issuer, 0):
                    known[issuer] = at + 1
                    again.append(issuer)
    return sum(e.key not in waited for e in sends_of(case, rank))


def _told_by(event: Event, rank: int) -> tuple[int | None, ...]:
    """The ranks whose part must be there before this rank's wait for a collective ends."""
    if event.collective in ("send", "recv"):
        return event.ranks[:1]
    if event.collective in ("broadcast", "scatter"):
        return (event.root,)
    if event.collective in ("reduce", "gather") and rank != event.root:
        return ()
    return event.ranks


def _alone(case: Case) -> Iterator[Finding]:
    """A finding if the call with one rank raised, or gave gradients wrong by more than a factor."""
    answer = case.answers[0]
    if isinstance(answer.get("raised"), str):
        yield Finding(
            f"a call with one rank, the first and the last one at once: {answer['raised']}. "
            "Does it send to somebody, or receive, though there is nobody?",
            0,
        )
        return
    first = parts.stages_of(case)[0]
    x = parts.batch_of(case, 0)[0][: ALONE * SAMPLES]
    oracle.mse(first(x), x).backward()
    expected = parts.gradients_of(first, 0)["g/0"]
    grads = parts.vector(answer.get("g/0"), expected)
    factor = 0.0 if grads is None else parts.scale_of(grads, expected)
    if grads is None or not (
        factor > 1e-6 and np.abs(grads - factor * expected).max() < parts.RTOL * np.abs(grads).max()
    ):
        yield Finding("a call with one rank: the gradients are not those of the batch.", 0)


def _is_loss(event: Event) -> bool:
    """Whether a message may be a loss on its way to all ranks: one float."""
    return event.numel == 1 and "float" in event.dtype


def judge_messages(case: Case) -> list[Finding]:
    """Neighbours send M activations on and M gradients back, and nothing else that is large.

    A loss may travel beside each gradient, and a rank may wait for handles or in a barrier.
    """
    findings = trouble(case)
    n, m = case.world_size, len(case.inputs[0]["cases"][0]["sizes"])
    others = {
        e.collective
        for events in case.trace.events
        for e in events
        if e.kind == "issue" and e.collective not in ("send", "recv") and e.nbytes > SLACK_BYTES
    }
    if not findings and others:
        return [
            Finding(
                f"activations went through {sorted(others)[0]}: what only a neighbour needs is "
                "sent."
            )
        ]
    for rank in range(n) if not findings else ():
        sent: dict[int, list[Event]] = {peer: [] for peer in range(n)}
        for e in sends_of(case, rank):
            sent[e.ranks[1]].append(e)
        for peer, messages in sent.items():
            num_bytes = sum(e.nbytes for e in messages)
            expected = m * MESSAGE_BYTES if abs(peer - rank) == 1 else 0
            what = "activations" if peer > rank else "gradients of activations"
            if expected <= num_bytes <= expected + SLACK_BYTES:
                small = [e.nbytes for e in messages if e.nbytes < MESSAGE_BYTES and not _is_loss(e)]
                if expected and len(small) >= m:
                    findings.append(
                        Finding(
                            f"for {m} {what} this rank sent {len(messages)} messages to rank "
                            f"{peer}, {len(small)} of them of {min(small)} to {max(small)} bytes. "
                            "One each: `buffer` and the stage's output have the shapes.",
                            rank,
                        )
                    )
                continue
            why = f"{m} {what} of {MESSAGE_BYTES} bytes each." if expected else "No neighbours."
            if rank == 0 and peer == n - 1 and n > 2:
                why = "Before the first stage there is nobody who wants a gradient."
            findings.append(
                Finding(
                    f"this rank sent {num_bytes} bytes to rank {peer}, expected {expected}. {why}",
                    rank,
                )
            )
    return findings or [*_wrong_content(case)] or [*_too_early(case)] or [*_alone(case)]


def _too_early(case: Case) -> Iterator[Finding]:
    """A finding for each rank that returns while a message may not have left."""
    for rank in range(case.world_size):
        if count := _still_here(case, rank):
            yield Finding(
                f"the call returns while {count} of this rank's {len(sends_of(case, rank))} "
                "messages may still be on their way: it has not waited for their handles, and "
                "nothing that came later shows that they have arrived.",
                rank,
            )
