"""Criteria for DDP written from scratch: how and when it communicates, on the emulated cluster.

The model's layers are charged: the broker, which belongs to the referee, hands out a secret factor
per layer and direction, and adds the layer's time to the clock of that rank. The factors must enter
activations and gradients. So the broker knows what each rank computed and when. The broker also
carries every all-reduce, so it sees which all-reduce sent which gradient. No judge here relies on
what a rank reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import told
from autograder.criteria.common.charged import find_ahead, find_disorder, reaches_all
from autograder.criteria.common.emulated import (
    charge_plan,
    even_cluster,
    holds_run,
    is_compute,
    local_gradients,
    seconds_each,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab1_ddp.network import make_model, wrap
from minidist.emulate.clusters import Cluster
from minidist.emulate.plan import ChargePlan, PlanChannel
from minidist.emulate.trace import Collective

BATCH, STEPS = 4, 3
MEGABYTE = 2**20
FULL_DTYPES = ("float32", "float64")  # half precision would halve the time of the all-reduces

# The network of overlap and scaling: equal layers, of which a bucket holds two. In the order of
# backward, buckets take QUICK and SLOW in turn to compute, and each all-reduce takes LATENCY +
# TRANSFER. It is hidden only if it may go on until the bucket after the next is full: a hook must
# not wait for the bucket before its own. One all-reduce per layer pays the latency twice as often,
# and a single one for all layers has nothing to hide behind.
LAYERS, WIDTH = 20, 125
UNIT_S = 1e-3
QUICK, SLOW, LATENCY, TRANSFER = 0.4, 3.6, 0.9, 0.9
LAYER_BYTES = WIDTH * WIDTH * 4
# A few layers are not registered in the order in which they run, so one bucket is full before the
# bucket that has to be launched first. Each layer has frozen parameters, which no bucket may hold.
REGISTERED = (*range(14), 16, 17, 14, 15, 18, 19)
FROZEN = WIDTH * WIDTH // 2
SCALING_CAP_MB = 0.125  # two layers, exactly so if a MB is 10^6 bytes: a full bucket is allowed
BACKWARD_S = tuple(
    UNIT_S * (QUICK, SLOW)[number // 2 % 2] / 2 for number in reversed(range(LAYERS))
)
FORWARD_S = tuple(cost / 2 for cost in BACKWARD_S)
STEP_S = sum(FORWARD_S) + sum(BACKWARD_S)
EFFICIENCY = 0.9
AFTER_BACKWARD = 0.63  # efficiency of reducing after backward on the grading cluster

# The network of `ddp_buckets`: the share of a bucket that each layer's weight takes in float32,
# from the first layer to the last. Backward begins with a weight that is larger than a bucket. Then
# come four that fit together (in float64 only two), three of which no two fit, and a large one.
SHARES = (1.5, 0.6, 0.6, 0.6, 0.24, 0.24, 0.24, 0.24, 1.5)
# Layers that are in float64 in a second run. Beside them, in both directions, there are float32
# gradients that would fit into the same bucket.
MIXED = (4, 5, 6, 8)
NARROW = 24


def grading_cluster(world_size: int) -> Cluster:
    """Links on which a bucket of two layers takes equally long for any number of ranks."""
    hops = 2 * (world_size - 1)
    bandwidth = hops / world_size * 2 * LAYER_BYTES / (TRANSFER * UNIT_S)
    return even_cluster(world_size, bandwidth, LATENCY * UNIT_S / hops)


# --- draw and observe ----------------------------------------------------------------------------


def _draw(draw: Draw, widths: Sequence[int], bias: bool, more: Values) -> list[Values]:
    """The same weights on all ranks; different data per rank and step."""
    rng = draw.shared()
    start: Values = {"layers": len(widths) - 1, **more}
    for number, (fan_in, fan_out) in enumerate(pairwise(widths)):
        weight = rng.normal(0, fan_in**-0.5, (fan_out, fan_in))
        start[f"w{number}"] = weight.astype(np.float32)
        # No small parameter comes right before the last weight, not even among those of its dtype:
        # torch's DDP, say, would put both into one bucket.
        if bias and number < start["layers"] - 3:
            start[f"b{number}"] = rng.normal(0, 0.3, fan_out).astype(np.float32)
    inputs = []
    for rank in range(draw.world_size):
        own, values = draw.private(rank), dict(start)
        for step in range(STEPS):
            batch = oracle.draw_batch(own, BATCH, widths)
            values |= {f"x/{step}": batch["x"], f"y/{step}": batch["y"]}
        inputs.append(values)
    return inputs


def draw_steps(draw: Draw) -> list[Values]:
    """Equal layers, and buckets that hold two of them."""
    more = {"cap_mb": SCALING_CAP_MB, "runs": [[]], "registered": REGISTERED, "frozen": FROZEN}
    return _draw(draw, [WIDTH] * (LAYERS + 1), False, more)


def plan_steps(draw: Draw) -> ChargePlan:
    """What each layer costs, and the secret behind the factors."""
    return charge_plan(draw, FORWARD_S, BACKWARD_S)


def draw_buckets(draw: Draw) -> list[Values]:
    """Layers of unequal size, made for a bucket size that is drawn; a second run has two dtypes."""
    cap = round(float(draw.shared("cap").uniform(0.08, 0.16)), 3)
    widths = [NARROW]
    for share in SHARES:
        widths.append(round(share * cap * 1e6 / 4 / widths[-1]))
    return _draw(draw, widths, True, {"cap_mb": cap, "runs": [[], list(MIXED)]})


def plan_buckets(draw: Draw) -> ChargePlan:
    """Every layer costs the same."""
    return charge_plan(draw, (UNIT_S,) * len(SHARES), (UNIT_S,) * len(SHARES))


def observe(ddp_class: Any, inputs: Values, context: Context) -> Values:
    """Trains each network for a few steps with the bucket size of the case."""
    done = 0
    for doubles in inputs["runs"]:
        try:
            module, ddp = wrap(ddp_class, inputs, context, doubles)
            for step in range(STEPS):
                x, y = (torch.from_numpy(inputs[f"{k}/{step}"]) for k in "xy")
                module.zero_grad()
                oracle.mse(ddp(x), y).backward()
                ddp.finish_gradient_synchronization()
                if step == 0 and any(
                    not p.requires_grad and p.grad is not None for p in module.parameters()
                ):
                    # It reduces frozen parameters, too (`judge_tied` finds that): go on without.
                    module, ddp = wrap(ddp_class, inputs | {"frozen": 0}, context, doubles)
        except Exception:
            if not done:
                raise
            break  # this DDP cannot keep two dtypes apart: `judge_tied` finds that
        done += 1
    return {"done": done}


# --- what the broker saw -------------------------------------------------------------------------


class _Step:
    """One step of one rank: which all-reduce carried which gradient, and when it was issued."""

    def __init__(self, case: Case, rank: int, step: int, gradients: list[np.ndarray]) -> None:
        self.rank, self.step = rank, step
        self.inputs, self.gradients = case.inputs[rank], gradients
        events = case.trace.events[rank]
        backward = [i for i, e in enumerate(events) if is_compute(e, "backward", step)]
        later = [i for i, e in enumerate(events) if is_compute(e, "forward", step + 1)]
        span = range(backward[0], later[0] if later else len(events))
        self.backward, self.last_backward = backward, backward[-1]
        self.waited = {events[i].key for i in span if events[i].kind == "wait"}
        issued = {events[i].key: i for i in span if events[i].kind == "issue"}
        self.collectives: list[tuple[int, Collective]] = [
            (issued[c.key], c)
            for c in case.trace.collectives
            if c.key in issued
            and c.kind == "all_reduce"
            and c.dtype in FULL_DTYPES
            and reaches_all(c, case.world_size)
        ]
        self.carried = self._find_gradients((1.0, 1.0 / case.world_size))

    def _find_gradients(self, scales: tuple[float, ...]) -> dict[int, tuple[int, Collective]]:
        """Number of a gradient -> the all-reduce that carried it, and when that was issued."""
        found = {}
        for number, gradient in enumerate(self.gradients):
            for index, collective in self.collectives:
                payload = collective.payloads.get(self.rank)
                if payload is not None and holds_run(payload, gradient, scales):
                    found[number] = index, collective
                    break
        return found

    def layers_late(self) -> int:
        """How many layers went backward between the first all-reduce's last gradient and its issue.

        Without biases, parameters are the layers in the order in which they are registered.
        """
        issued, first = min(self.carried.values(), key=itemgetter(0))
        layers = self.inputs["registered"]
        ready = max(
            len(layers) - layers[number]
            for number, (_, collective) in self.carried.items()
            if collective.key == first.key
        )
        return sum(index < issued for index in self.backward) - ready

    def missing(self) -> Finding | None:
        """A finding if a gradient did not travel, or was not waited for, in this step."""
        for number in range(len(self.gradients)):
            where = f"gradient of layer {number} in step {self.step}"
            if number not in self.carried:
                return Finding(
                    f"the {where} was in no all-reduce over all ranks. Every step that is timed "
                    "has to reduce all gradients, in full precision.",
                    self.rank,
                )
            if self.carried[number][1].key not in self.waited:
                return Finding(
                    f"nobody waited for the all-reduce of the {where} before the next step began.",
                    self.rank,
                )
        return None

    def too_few(self) -> Finding | None:
        """A finding if less than half of the gradients' numbers travelled."""
        travelled = sum(self.gradients[number].size for number in self.carried)
        if travelled >= sum(gradient.size for gradient in self.gradients) / 2:
            return None
        return Finding(
            f"only {len(self.carried)} of {len(self.gradients)} gradients were in an all-reduce "
            f"of step {self.step}.",
            self.rank,
        )


def _local_gradients(case: Case, rank: int) -> list[list[np.ndarray]]:
    """For each step this rank's own gradients, in float64, with the rank's secret factors."""
    inputs = case.inputs[rank]
    model = make_model(inputs, PlanChannel(case.plan, rank), range(inputs["layers"]))
    return local_gradients(model, inputs, [*range(STEPS)] * len(inputs["runs"]))


def _runs(case: Case) -> int:
    """How many networks were trained to their end; the first one always counts."""
    done = [told(answer, "done") for answer in case.answers]
    return max(1, min((n for n in done if isinstance(n, int)), default=1))


def _steps(case: Case, numbers: Sequence[int]) -> list[_Step] | list[Finding]:
    """Every rank's steps of these numbers; only findings if a rank did not compute all layers."""
    findings, end = [], STEPS * _runs(case)
    expected = 2 * case.inputs[0]["layers"] * end
    for rank, events in enumerate(case.trace.events):
        charged = [e for e in events if e.kind == "compute" and (e.step or 0) < end]
        if len(charged) != expected:
            findings.append(
                Finding(
                    f"{len(charged)} layers went forward or backward, expected {expected}: calling "
                    "the wrapper runs the module once.",
                    rank,
                )
            )
        elif problem := find_ahead(events, rank) or find_disorder(events, rank):
            findings.append(problem)
    if findings:
        return findings
    return [
        _Step(case, rank, step, gradients[step])
        for rank in range(case.world_size)
        for gradients in [_local_gradients(case, rank)]
        for step in numbers
    ]


def _last_steps(case: Case) -> list[_Step] | list[Finding]:
    """The last step of each network: torch's own DDP still changes its buckets after the first."""
    return _steps(case, [(run + 1) * STEPS - 1 for run in range(_runs(case))])


# --- judge ---------------------------------------------------------------------------------------


def judge_buckets(case: Case) -> Iterator[Finding]:
    """No bucket holds two dtypes, or is larger than the cap unless it holds a single parameter.

    Everything else is the student's choice: a MB of 10^6 or of 2^20 bytes, smaller buckets, one
    parameter for each, whether a new dtype closes a bucket or begins a second one beside it, other
    values in the same all-reduce. `judge_tied` judges whether float64 is rounded to float32.
    """
    cap = case.inputs[0]["cap_mb"]
    for step in _last_steps(case):
        if isinstance(step, Finding):
            yield step
            continue
        if problem := step.too_few():
            yield problem
            continue
        buckets: dict[str, list[int]] = {}
        for number, (_, collective) in step.carried.items():
            buckets.setdefault(collective.key, []).append(number)
        doubles = step.inputs["runs"][step.step // STEPS]
        parameters = list(make_model(step.inputs, None, doubles).parameters())
        is_rounded = any(
            parameters[number].dtype == torch.float64 and collective.dtype != "float64"
            for number, (_, collective) in step.carried.items()
        )
        for numbers in buckets.values():
            size = sum(parameters[number].nbytes for number in numbers)
            listed = ", ".join(_show(parameters[number]) for number in numbers)
            if not is_rounded and len({parameters[number].dtype for number in numbers}) > 1:
                yield Finding(f"a bucket carried gradients of two dtypes ({listed}).", step.rank)
                break
            if len(numbers) > 1 and size > cap * MEGABYTE:
                yield Finding(
                    f"bucket_cap_mb={cap:g}: a bucket carried {size / MEGABYTE:.3f} MB of "
                    f"gradients ({listed}).",
                    step.rank,
                )
                break
        numel = sum(c.numel for _, c in step.collectives)
        expected = sum(p.numel() for p in parameters)
        # The span of an earlier network's last step contains the wrapping of the next network.
        if step.step == STEPS * _runs(case) - 1 and numel > 1.5 * expected:
            yield Finding(
                f"{numel} numbers were all-reduced for {expected} numbers of gradients: is each "
                "reduced once?",
                step.rank,
            )


def _show(parameter: torch.Tensor) -> str:
    shape = " × ".join(str(n) for n in parameter.shape)
    return f"{shape} {str(parameter.dtype).removeprefix('torch.')}"


def judge_overlap(case: Case) -> Iterator[Finding]:
    """Some all-reduce of gradients is issued before the backward of the last layer.

    The first one is issued as soon as its last gradient is there.
    """
    for step in _last_steps(case):
        if isinstance(step, Finding):
            yield step
        elif problem := step.too_few():
            yield problem
        elif min(index for index, _ in step.carried.values()) > step.last_backward:
            why = (
                "All gradients travel in a single one, which is complete only then: how much does "
                "a bucket hold?"
                if len({collective.key for _, collective in step.carried.values()}) == 1
                else "Start a bucket's all-reduce (async_op=True) in the hook of its last gradient."
            )
            text = "the first all-reduce of gradients came after the whole backward pass. "
            yield Finding(text + why, step.rank)
        elif (late := step.layers_late()) > 0:
            yield Finding(
                "the first bucket's all-reduce was issued too late: "
                f"{late} of the layers had gone backward since its last gradient. Start it in the "
                "hook of that gradient, when the gradient is in it.",
                step.rank,
            )


def judge_scaling(case: Case) -> Iterator[Finding]:
    """At least 90 % of the time of the steps is compute, in virtual time.

    The first step is not timed; in each of the others, all gradients travel and are waited for.
    """
    steps = _steps(case, range(1, STEPS))
    problems = [it if isinstance(it, Finding) else it.missing() for it in steps]
    found = {it.rank: it for it in reversed(problems) if it is not None}
    if found:
        yield from found.values()
        return
    efficiency, step_s = scaling_efficiency(case)
    if efficiency < EFFICIENCY:
        yield Finding(
            f"scaling efficiency {efficiency:.3f}, target {EFFICIENCY}: a step computes for "
            f"{STEP_S * 1e3:.1f} ms but takes {step_s * 1e3:.1f} ms of virtual time, "
            f"{_count(steps)}. Reducing after backward gives about {AFTER_BACKWARD}. Full "
            "buckets, reduced with async_op=True from the hooks while backward goes on and waited "
            "for only in finish_gradient_synchronization, hide all but the last one. (Some layers "
            "run in a different order than they are registered: a bucket that is full before its "
            "turn starts as soon as the one before it has started.)"
        )


def _count(steps: Sequence[_Step | Finding]) -> str:
    """How many all-reduces carried the gradients of the first rank's last step, and how early."""
    step = next(it for it in reversed(steps) if isinstance(it, _Step) and it.rank == 0)
    issued = {collective.key: index for index, collective in step.carried.values()}
    early = sum(index < step.last_backward for index in issued.values())
    return (
        f"with {len(issued)} all-reduces of gradients, {early} of them issued before the last "
        f"layer's backward ({LAYERS // 2} buckets would do: bucket_cap_mb={SCALING_CAP_MB} holds "
        f"exactly two layers' gradients, {LAYER_BYTES} bytes each, and frozen parameters do not "
        "travel)"
    )


def scaling_efficiency(case: Case) -> tuple[float, float]:
    """Compute time over virtual time of all steps but the first, and seconds per step."""
    step_s = seconds_each(case, grading_cluster(case.world_size), 1, STEPS - 1)
    return STEP_S / step_s, step_s
