"""Criteria for how a pipeline works, judged on the emulated cluster: time and memory.

A charged stage asks the broker for every forward and backward pass, so the broker knows when each
one ran. The limit on kept activations is enforced by the stage in the student's process, so
`judge_limit` also checks the gradients.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.bonus_pipeline import parts
from autograder.criteria.bonus_pipeline.plan import (
    BACKWARD,
    FORWARD,
    Step,
    gpipe_of,
    one_f_one_b_everywhere,
)
from autograder.criteria.common.emulated import charge_plan, even_cluster
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from minidist.emulate.clusters import Cluster
from minidist.emulate.plan import ChargePlan, PlanChannel
from minidist.emulate.simulate import simulate

WIDTH, SAMPLES = 80, 6
MESSAGE_BYTES = 4 * WIDTH * SAMPLES
FORWARD_S, BACKWARD_S = 1e-3, 2e-3
MESSAGE_S = 0.5e-3  # time of a message: half of a forward
# Relative to the best time. Sends that overlap with compute reach 1, blocking sends 1.2 and more.
MOST_TIME = 1.06
ATOL = 1e-5  # of activations, which are about 1
# Received tensors that may outlive their backward pass: a loop's variables hold one or two.
MOST_LEFT_OVER = 2


# --- a run ---------------------------------------------------------------------------------------


def draw_run(draw: Draw, schedules: list[list[Step]]) -> list[Values]:
    """One call; all stages have the same width, all micro-batches the same size."""
    inputs = parts.draw_stages(draw, [WIDTH] * (draw.world_size + 1))
    m = len(schedules[0]) // 2
    parts.add_case(inputs, draw, schedules, [SAMPLES] * m)
    return inputs


def trouble(case: Case) -> list[Finding]:
    """Findings that make it impossible to judge a run."""
    if any(answer.get("done") is not True for answer in case.answers):
        return [Finding("the call did not come to its end.")]
    return []


# --- time ----------------------------------------------------------------------------------------


def plan(draw: Draw) -> ChargePlan:
    """Stage r is layer r; all stages take the same time."""
    n = draw.world_size
    return charge_plan(draw, (FORWARD_S,) * n, (BACKWARD_S,) * n)


def draw_time(draw: Draw) -> list[Values]:
    """GPipe: no rank waits for gradients in the first half, or for activations in the second."""
    m = 2 * draw.world_size + int(draw.shared().integers(1, 4))
    return draw_run(draw, [gpipe_of(m)] * draw.world_size)


def observe_time(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """One call on a charged stage."""
    from minidist.emulate.device import Charged

    stage = Charged(parts.make_stage(inputs, context), context.rank, context.broker)
    run_pipeline(*parts.arguments(stage, inputs, context, 0))
    return {"done": True}


def grading_cluster(world_size: int) -> Cluster:
    """One device per rank; a message takes MESSAGE_S."""
    latency_s = 1e-5
    return even_cluster(world_size, MESSAGE_BYTES / (MESSAGE_S - latency_s), latency_s)


def judge_time(case: Case) -> Iterator[Finding]:
    """Passes are in the schedule's order, activations are real, the bubble is as theory says."""
    wrong = (trouble, _wrong_order, _wrong_activations, _wrong_gradients)
    if findings := next(filter(None, ([*check(case)] for check in wrong)), None):
        yield from findings
        return
    n, m = case.world_size, len(case.inputs[0]["cases"][0]["sizes"])
    timeline = simulate(case.trace, grading_cluster(n))
    spans = [
        timeline.event_times[rank][index]
        for rank, events in enumerate(case.trace.events)
        for index, e in enumerate(events)
        if e.kind == "compute"
    ]
    took_s = max(end for _, end in spans) - min(start for start, _ in spans)
    busy_s = m * (FORWARD_S + BACKWARD_S)
    best_s = busy_s + (n - 1) * (FORWARD_S + BACKWARD_S + 2 * MESSAGE_S)
    if took_s > MOST_TIME * best_s:
        yield Finding(
            f"{n} stages, {m} micro-batches of {1e3 * (FORWARD_S + BACKWARD_S):g} ms: took "
            f"{took_s * 1e3:.2f} ms of virtual time, {best_s * 1e3:.2f} ms are possible (idle "
            f"{1 - busy_s / took_s:.0%} instead of {1 - busy_s / best_s:.0%}). Is everything "
            "sent as soon as it is there, and does no rank wait until it has arrived?"
        )
    elif took_s < 0.95 * best_s:
        yield Finding(f"it took {took_s * 1e3:.2f} ms of virtual time: too little to be true.")


def _wrong_order(case: Case) -> Iterator[Finding]:
    """A finding for each rank whose forwards and backwards are not those of its schedule."""
    for rank, events in enumerate(case.trace.events):
        did = [(e.direction, e.layer) for e in events if e.kind == "compute"]
        steps = case.inputs[rank]["cases"][0]["schedule"]
        if did != [(what, rank) for what, _ in steps]:
            num_forward = sum(direction == FORWARD for direction, _ in did)
            m = len(steps) // 2
            what = f"{num_forward} forward and {len(did) - num_forward} backward passes"
            if len(did) == len(steps) and num_forward == m:
                what = f"the {what} are not in the order of the schedule."
            else:
                what = f"{what} went through this stage; the schedule has {m} of each."
            yield Finding(what, rank)


def _wrong_activations(case: Case) -> Iterator[Finding]:
    """A finding if a rank sent activations that its charged stage did not compute."""
    h, _ = parts.batch_of(case, 0)
    steps = case.inputs[0]["cases"][0]["schedule"]
    order = [i for what, i in steps if what == FORWARD]
    for rank, stage in enumerate([*parts.stages_of(case)][:-1]):
        channel = PlanChannel(case.plan, rank)
        factors = {i: channel.charge(rank, FORWARD) for i in order}
        with torch.no_grad():
            h = stage(h)
            h = torch.cat([factors[i] * part for i, part in enumerate(h.split(SAMPLES))])
        sent = [
            np.asarray(c.payloads[rank], dtype=np.float64).ravel()
            for c in case.trace.collectives
            if c.kind == "send"
            and c.ranks == (rank, rank + 1)
            and c.nbytes >= MESSAGE_BYTES
            and c.payloads.get(rank) is not None
        ]
        right = [h.split(SAMPLES)[i].numpy().ravel() for i in order]
        if len(sent) != len(right) or not all(
            a.shape == b.shape and np.allclose(a, b, rtol=parts.RTOL, atol=ATOL)
            for a, b in zip(sent, right, strict=True)
        ):
            yield Finding(
                f"the {len(right)} activations of this stage, one message each in the order of "
                f"its forwards, did not reach rank {rank + 1}.",
                rank,
            )
            return


def _wrong_gradients(case: Case) -> Iterator[Finding]:
    """A finding for each rank that sent too few gradients back, or one before its backward pass.

    `pipe_gradients` judges the gradients' values.
    """
    for rank, events in enumerate(case.trace.events[1:], start=1):
        ready = sent = early = 0
        for e in events:
            ready += e.kind == "compute" and e.direction == BACKWARD
            if e.kind == "issue" and e.ranks == (rank, rank - 1) and e.nbytes >= MESSAGE_BYTES:
                sent += 1
                early += sent > ready
        if early or sent != ready:
            yield Finding(
                f"after each of its {ready} backward passes a gradient should go to rank "
                f"{rank - 1}, one message each: {sent} went, {early} of them too early.",
                rank,
            )


# --- memory --------------------------------------------------------------------------------------


def draw_limit(draw: Draw) -> list[Values]:
    """1F1B with far more micro-batches than a rank has room for."""
    n = draw.world_size
    m = 2 * n + int(draw.shared().integers(2, 6))
    return draw_run(draw, one_f_one_b_everywhere(n, m))


class _Kept:
    """A micro-batch's activations: alive as long as autograd holds one of their tensors."""

    def __init__(self, room: _Room) -> None:
        self.room = room
        room.change(1)

    def __del__(self) -> None:
        self.room.change(-1)


class _Room:
    """Room for the activations of `limit` micro-batches."""

    def __init__(self, limit: int) -> None:
        self.limit, self.now, self._lock = limit, 0, threading.RLock()

    def change(self, by: int) -> None:
        with self._lock:
            self.now += by


class _SmallDevice(nn.Module):
    """A stage on a device that has room for few micro-batches' activations.

    The device has no room for received tensors of micro-batches whose backward pass is over.
    """

    def __init__(self, stage: nn.Module, limit: int, schedule: list[Step]) -> None:
        super().__init__()
        self.stage, self.room = stage, _Room(limit)
        self.schedule = list(schedule)
        self.received: list[tuple[int, weakref.ref[torch.Tensor]]] = []

    def remember(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """Notes that this rank receives micro-batch `i` into `tensor`."""
        self.received.append((i, weakref.ref(tensor)))
        return tensor

    def left_over(self, x: torch.Tensor) -> list[int]:
        """Micro-batches whose received tensor is alive, though their backward comes before `x`.

        Empty if `x` is not in the memory of a remembered tensor.
        """
        alive = {i: tensor for i, ref in self.received if (tensor := ref()) is not None}
        now = [i for i, tensor in alive.items() if tensor.data_ptr() == x.data_ptr()]
        before = self.schedule[: self.schedule.index((FORWARD, now[0]))] if now else []
        return sorted(alive.keys() & {i for what, i in before if what == BACKWARD})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.left_over(x)) > MOST_LEFT_OVER:
            gc.collect()
        if len(left := self.left_over(x)) > MOST_LEFT_OVER:
            raise MemoryError(
                f"this rank still keeps what it has received for micro-batches {left}, whose "
                "backward pass is over. Is all of a micro-batch let go then (its input, too, and "
                "no sum of losses with their graphs)?"
            )
        if self.room.now >= self.room.limit:
            raise MemoryError(
                f"this rank has room for the activations of {self.room.limit} micro-batches, and "
                "autograd still keeps as many: 1F1B never needs more than P - rank. Are steps done "
                "in the order of the list, and is everything free after its backward (no "
                "retain_graph, no list of old outputs)?"
            )
        kept = _Kept(self.room)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (kept, tensor), lambda saved: saved[1]
        ):
            return self.stage(x)


def observe_limit(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """One call with room for what 1F1B keeps."""
    limit = context.world_size - context.rank
    steps = [(what, i) for what, i in inputs["cases"][0]["schedule"]]
    stage = _SmallDevice(parts.make_stage(inputs, context), limit, steps)
    *given, buffer = parts.arguments(stage, inputs, context, 0)
    run_pipeline(*given, buffer and (lambda i: stage.remember(i, buffer(i))))
    return {"done": True} | parts.gradients_of(stage, 0)


def judge_limit(case: Case) -> list[Finding]:
    """The call finished, and every stage ran backward through the activations that it kept.

    The gradients show this, up to a factor. The limit alone does not: a stage without a graph keeps
    nothing.
    """
    m = len(case.inputs[0]["cases"][0]["sizes"])
    return trouble(case) or parts.judge_direction(
        case, 0, f"{m} micro-batches, 1F1B", parts.solve(case, 0)[1], one_factor=False
    )
