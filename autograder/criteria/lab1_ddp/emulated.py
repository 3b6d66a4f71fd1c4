"""Criteria for DDP written from scratch: how and when it communicates, on the emulated cluster.

The model's layers are charged: the broker, which belongs to the referee, hands out a secret factor
per layer and direction, and adds the layer's time to the clock of that rank. The factors must enter
activations and gradients. So the broker knows what each rank computed and when. The broker also
carries every all-reduce, so it sees which all-reduce sent which gradient. No judge here relies on
what a rank reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.charged import find_ahead, reaches_all
from autograder.criteria.common.emulated import (
    charge_plan,
    charged_mlp,
    even_cluster,
    holds_run,
    is_compute,
    of_every_rank,
    seconds_since,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from minidist.emulate.clusters import Cluster
from minidist.emulate.plan import ChargePlan, PlanChannel
from minidist.emulate.simulate import simulate
from minidist.emulate.trace import Collective

LAYERS, WIDTH, BATCH, STEPS = 12, 256, 4, 3
FORWARD_S, BACKWARD_S = 1e-3, 2e-3
STEP_S = LAYERS * (FORWARD_S + BACKWARD_S)
GRADIENT_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
MEGABYTE = 2**20
CAPS_MB = (1.0, 2.0)
SCALING_CAP_MB = 0.5
EFFICIENCY = 0.9
AFTER_BACKWARD = 0.7  # efficiency of reducing after backward on the grading cluster
LATENCY_S = 20e-6
FULL_DTYPES = ("float32", "float64")


def grading_cluster(world_size: int) -> Cluster:
    """Links on which all gradients travel in 0.3/0.7 of a step's compute, for any world size."""
    communication_s = STEP_S * (1 / AFTER_BACKWARD - 1)
    factor = 2 * (world_size - 1) / world_size
    return even_cluster(world_size, factor * GRADIENT_BYTES / communication_s, LATENCY_S)


# --- draw and observe ----------------------------------------------------------------------------


def draw_steps(draw: Draw) -> list[Values]:
    """The same weights on all ranks; different data per rank and step."""
    sizes = [WIDTH] * (LAYERS + 1)
    start = oracle.draw_parameters(draw.shared(), sizes)
    inputs = []
    for rank in range(draw.world_size):
        rng, values = draw.private(rank), dict(start)
        for step in range(STEPS):
            batch = oracle.draw_batch(rng, BATCH, sizes)
            values |= {f"x/{step}": batch["x"], f"y/{step}": batch["y"]}
        inputs.append(values)
    return inputs


def plan(draw: Draw) -> ChargePlan:
    """What each layer costs, and the secret behind the factors."""
    return charge_plan(draw, (FORWARD_S,) * LAYERS, (BACKWARD_S,) * LAYERS)


def _train_steps(
    module: nn.Module, ddp: Any, inputs: Values, finish: Any, dtype: torch.dtype
) -> None:
    for step in range(STEPS):
        x, y = (torch.from_numpy(inputs[f"{k}/{step}"]).to(dtype) for k in "xy")
        module.zero_grad()
        oracle.mse(ddp(x), y).backward()
        finish(step)


def _observe(ddp_class: Any, inputs: Values, context: Context, cap_mb: float) -> Values:
    module = charged_mlp(inputs, context.broker, torch.float32)
    ddp = ddp_class(module, bucket_cap_mb=cap_mb)
    _train_steps(
        module, ddp, inputs, lambda _: ddp.finish_gradient_synchronization(), torch.float32
    )
    return {"done": True}


def draw_buckets(draw: Draw) -> list[Values]:
    """Like `draw_steps`, with one of two bucket sizes."""
    cap = float(draw.shared("cap").choice(CAPS_MB))
    return [inputs | {"cap_mb": cap} for inputs in draw_steps(draw)]


def observe_buckets(ddp_class: Any, inputs: Values, context: Context) -> Values:
    """Trains with the bucket size that was drawn."""
    return _observe(ddp_class, inputs, context, inputs["cap_mb"])


def observe_steps(ddp_class: Any, inputs: Values, context: Context) -> Values:
    """Trains with small buckets."""
    return _observe(ddp_class, inputs, context, SCALING_CAP_MB)


# --- what the broker saw -------------------------------------------------------------------------


class _LastStep:
    """The last step of one rank: which all-reduce carried which gradient, and when it was issued.

    The last step, because torch's own DDP still changes its buckets in the first.
    """

    def __init__(self, case: Case, rank: int) -> None:
        events = case.trace.events[rank]
        backward = [i for i, e in enumerate(events) if is_compute(e, "backward", STEPS - 1)]
        self.finding: Finding | None = None
        if ahead := find_ahead(events, rank):
            self.finding = ahead
            return
        if len(backward) != LAYERS:
            self.finding = Finding(
                f"the backward pass ran {len(backward)} of {LAYERS} layers in step {STEPS - 1}.",
                rank,
            )
            return
        self.last_backward = backward[-1]
        issued = {e.key: i for i, e in enumerate(events) if e.kind == "issue" and i > backward[0]}
        # Only full precision counts: half precision would halve the time of the all-reduces.
        self.collectives: list[tuple[int, Collective]] = [
            (issued[c.key], c)
            for c in case.trace.collectives
            if c.key in issued
            and c.kind == "all_reduce"
            and c.dtype in FULL_DTYPES
            and reaches_all(c, case.world_size)
        ]
        self._find_gradients(case, rank)

    def _find_gradients(self, case: Case, rank: int) -> None:
        self.sent_at: dict[int, int] = {}
        for number, gradient in enumerate(_local_gradients(case, rank)):
            for index, collective in self.collectives:
                payload = collective.payloads.get(rank)
                if payload is not None and holds_run(
                    payload, gradient, (1.0, 1.0 / case.world_size)
                ):
                    self.sent_at[number] = index
                    break
            else:
                layer, name = number // 2, ("weight", "bias")[number % 2]
                self.finding = Finding(
                    f"the {name} gradient of layer {layer} was in no all-reduce "
                    f"of step {STEPS - 1}.",
                    rank,
                )
                return


def _local_gradients(case: Case, rank: int) -> list[np.ndarray]:
    """This rank's own gradients of the last step, in float64, with the rank's secret factors."""
    model = charged_mlp(case.inputs[rank], PlanChannel(case.plan, rank), torch.float64)
    _train_steps(model, model, case.inputs[rank], lambda _: None, torch.float64)
    return [oracle.grad_of(p) for p in model.parameters()]


def _last_steps(case: Case) -> list[_LastStep] | list[Finding]:
    return of_every_rank(case, _LastStep)


# --- judge ---------------------------------------------------------------------------------------


def judge_buckets(case: Case) -> Iterator[Finding]:
    """No all-reduce is larger than the cap, unless it carries one large parameter."""
    cap = case.inputs[0]["cap_mb"]
    largest_parameter = WIDTH * WIDTH * 4
    for rank, step in enumerate(_last_steps(case)):
        if isinstance(step, Finding):
            yield step
            continue
        sizes = [c.nbytes for _, c in step.collectives]
        # A bucket may check the limit before or after it adds a gradient.
        if max(sizes) > cap * MEGABYTE + largest_parameter:
            yield Finding(
                f"bucket_cap_mb={cap:g}: an all-reduce carried {max(sizes) / MEGABYTE:.2f} MB. A "
                f"bucket is full at {cap:g} MB; compare bytes with bytes (numel × element_size).",
                rank,
            )
        if sum(sizes) > 1.5 * GRADIENT_BYTES:
            yield Finding(
                f"{sum(sizes) / MEGABYTE:.1f} MB were all-reduced for "
                f"{GRADIENT_BYTES / MEGABYTE:.1f} MB of gradients: is each reduced once?",
                rank,
            )


def judge_overlap(case: Case) -> Iterator[Finding]:
    """Some all-reduce of gradients is issued before the backward of the last layer."""
    for rank, step in enumerate(_last_steps(case)):
        if isinstance(step, Finding):
            yield step
        elif min(step.sent_at.values()) > step.last_backward:
            yield Finding(
                "the first all-reduce of gradients came after the whole backward pass. Start a "
                "bucket's all-reduce (async_op=True) in the hook of its last gradient.",
                rank,
            )


def judge_scaling(case: Case) -> list[Finding]:
    """At least 90 % of the time of the steps is compute, in virtual time."""
    steps = _last_steps(case)
    if isinstance(steps[0], Finding):
        return [step for step in steps if isinstance(step, Finding)]
    efficiency, step_s = scaling_efficiency(case)
    if efficiency >= EFFICIENCY:
        return []
    return [
        Finding(
            f"scaling efficiency {efficiency:.3f}, target {EFFICIENCY}: a step computes for "
            f"{STEP_S * 1e3:.1f} ms but takes {step_s * 1e3:.1f} ms of virtual time. Reducing "
            f"after backward gives about {AFTER_BACKWARD}; buckets reduced with async_op=True from "
            "the hooks while backward goes on, and waited for only in "
            "finish_gradient_synchronization, hide all but the last one."
        )
    ]


def scaling_efficiency(case: Case) -> tuple[float, float]:
    """Compute time over virtual time of all steps but the first, and seconds per step."""
    timeline = simulate(case.trace, grading_cluster(case.world_size))
    step_s = seconds_since(case, timeline, 1) / (STEPS - 1)
    return STEP_S / step_s, step_s
