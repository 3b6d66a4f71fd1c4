"""Criteria for gradients that travel in planned buckets, on the emulated cluster.

Every layer is charged, so the broker knows the earliest time at which its gradient can be known.
The broker also carries each all-reduce, so it sees the payload. Layers, network and plan are drawn.
With this plan a right submission is more than 90 % efficient. The criteria on the cluster do not
rely on anything that a rank reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import emulated, oracle
from autograder.criteria.common.answers import naming
from autograder.criteria.common.charged import find_ahead, find_disorder, reaches_all
from autograder.criteria.common.emulated import even_cluster, is_compute
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab6_profiling.buckets import best_plan, step_seconds
from minidist.emulate.clusters import Cluster
from minidist.emulate.plan import ChargePlan, PlanChannel
from minidist.emulate.trace import Collective

LAYERS, BATCH, STEPS = 16, 2, 3
LATENCY, TRANSFER = 0.9, 0.3  # fractions of backward: one all-reduce per layer; all bytes
EFFICIENCY, ROOM = 0.9, 0.93  # required, and possible with the plan

# --- gradients are means -------------------------------------------------------------------------


def draw_mean(draw: Draw) -> list[Values]:
    """A model, a plan with buckets in an unusual order, and different data on every rank."""
    rng = draw.shared()
    sizes = [int(rng.integers(3, 9)) for _ in range(5)]
    values = oracle.draw_parameters(rng, sizes)
    order = list(reversed(range(8)))
    cuts = sorted(int(c) for c in rng.choice(np.arange(1, 8), 3, replace=False))
    plan = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 8], strict=True)]
    # Two neighbouring buckets are swapped: the plan, not the gradients, decides the order.
    plan[1], plan[2] = plan[2], plan[1]
    return oracle.private_batches(draw, values | {"plan": plan}, [(5,)] * STEPS, sizes)


def observe_mean(buckets_class: Any, inputs: Values, context: Context) -> Values:
    """The gradients of several steps, in float64: a bucket has the dtype of its gradients."""
    model = oracle.mlp(inputs, torch.float64).to(context.device)
    buckets = buckets_class(model, [list(bucket) for bucket in inputs["plan"]])
    answer: Values = {}
    for step in range(STEPS):
        model.zero_grad(set_to_none=step != 2)
        x, y = (torch.from_numpy(inputs[f"{k}/{step}"]).double().to(context.device) for k in "xy")
        with naming(f"backward() and finish() of step {step}"):
            oracle.mse(model(x), y).backward()
            buckets.finish()
        for i, p in enumerate(model.parameters()):
            answer[f"g{step}/{i}"] = oracle.grad_of(p).astype(np.float64)
    return answer


def judge_mean(case: Case) -> Iterator[Finding]:
    """Gradients are the mean over ranks, in every step and on every rank.

    They may be divided before or after the all-reduce; p.grad may be the old tensor or a new one.
    """
    for step in range(STEPS):
        local = [
            oracle.gradients(inputs, inputs[f"x/{step}"], inputs[f"y/{step}"])
            for inputs in case.inputs
        ]
        for rank, answer in enumerate(case.answers):
            for i, per_rank in enumerate(zip(*local, strict=True)):
                mean, got = oracle.mean(per_rank), answer.get(f"g{step}/{i}")
                hint = oracle.explain_gradient(got, mean, local[rank][i], case.world_size)
                if not hint and oracle.agrees(got, mean):
                    hint = "That is right to 7 digits: a bucket has the dtype of its gradients."
                what = f"step {step}, gradient of parameter {i}"
                if wrong := oracle.differs(rank, what, got, mean, dtype="float64", hint=hint):
                    yield wrong
                    return


# --- on the emulated cluster ---------------------------------------------------------------------


def draw_steps(draw: Draw) -> list[Values]:
    """Layers of drawn widths, a plan that suits them, and different data per rank and step."""
    shape = _shape(draw)
    rng, widths = draw.shared("weights"), shape["widths"]
    weights = {
        f"p{i}": rng.normal(0, a**-0.5, (b, a)).astype(np.float32)
        for i, (a, b) in enumerate(pairwise(widths))
    }
    return oracle.private_batches(draw, weights | shape, [(BATCH,)] * STEPS, widths)


def _shape(draw: Draw) -> Values:
    """Widths, seconds per layer, network figures, and a plan with an efficiency above ROOM.

    Two buckets of the plan are swapped: the plan decides which bucket travels first.
    """
    values: Values = {}
    for attempt in range(100):
        values = _draw_shape(draw.shared(f"shape {attempt}"))
        plan = best_plan(values["sizes"], partial(_predicted, values))
        if len(plan) < 4:
            continue
        values["plan"] = [plan[0], plan[2], plan[1], *plan[3:]]
        if _compute_s(values) / _predicted(values, values["plan"]) > ROOM:
            break
    return values


def _draw_shape(rng: np.random.Generator) -> Values:
    widths = [int(w) * 2 for w in rng.integers(16, 33, LAYERS + 1)]
    sizes = [4 * a * b for a, b in pairwise(widths)]
    scale = float(rng.uniform(0.02, 0.2))
    backward = rng.uniform(0.8, 1.2, LAYERS)
    backward *= scale / backward.sum()
    return {
        "widths": widths,
        "sizes": sizes,
        "backward_s": backward.tolist(),
        "forward_s": (backward / 2).tolist(),
        "fixed_s": LATENCY * scale / LAYERS,
        "s_per_byte": TRANSFER * scale / sum(sizes),
    }


def _compute_s(values: Values) -> float:
    return sum(values["forward_s"]) + sum(values["backward_s"])


def _predicted(values: Values, plan: list[list[int]]) -> float:
    return step_seconds(
        plan,
        values["sizes"],
        values["backward_s"],
        sum(values["forward_s"]),
        lambda nbytes: values["fixed_s"] + values["s_per_byte"] * nbytes,
    )


def charge_plan(draw: Draw) -> ChargePlan:
    """The seconds of each layer, and the secret from which its factors are made."""
    shape = _shape(draw)
    return emulated.charge_plan(draw, shape["forward_s"], shape["backward_s"])


def grading_cluster(values: Values, world_size: int) -> Cluster:
    """A cluster on which an all-reduce costs the drawn time, for any number of ranks."""
    rounds = 2 * (world_size - 1)
    bandwidth = rounds / world_size / values["s_per_byte"]
    return even_cluster(world_size, bandwidth, values["fixed_s"] / rounds)


def _charged_model(inputs: Values, channel: Any, dtype: torch.dtype) -> nn.Sequential:
    linears = (oracle.linear(inputs[f"p{i}"], dtype=dtype) for i in range(LAYERS))
    return emulated.charge((nn.Sequential(linear, nn.Tanh()) for linear in linears), channel)


def observe_steps(buckets_class: Any, inputs: Values, context: Context) -> Values:
    """Trains with the drawn plan."""
    model = _charged_model(inputs, context.broker, torch.float32)
    buckets = buckets_class(model, [list(bucket) for bucket in inputs["plan"]])
    for step in range(STEPS):
        x, y = (torch.from_numpy(inputs[f"{k}/{step}"]) for k in "xy")
        model.zero_grad()
        with naming(f"backward() and finish() of step {step}"):
            oracle.mse(model(x), y).backward()
            buckets.finish()
    return {"done": True}


def _all_reduces(case: Case, rank: int, step: int) -> list[Collective] | Finding:
    """The all-reduces of one step, in the order of their calls, or what is wrong.

    Those count that are issued after the step's backward begins and before the next forward.
    """
    events = case.trace.events[rank]
    if problem := find_ahead(events, rank) or find_disorder(events, rank):
        return problem
    backward = [i for i, e in enumerate(events) if is_compute(e, "backward", step)]
    if len(backward) != LAYERS:
        return Finding(f"backward ran {len(backward)} of {LAYERS} layers in step {step}.", rank)
    following = [i for i, e in enumerate(events) if is_compute(e, "forward", step + 1)]
    by_key = {c.key: c for c in case.trace.collectives if reaches_all(c, case.world_size)}
    part = events[backward[0] : following[0] if following else None]
    issued = [by_key.get(e.key) for e in part if e.kind == "issue"]
    return [c for c in issued if c and c.kind == "all_reduce" and "float" in c.dtype]


def _local_gradients(case: Case, rank: int) -> list[list[np.ndarray]]:
    """For each step this rank's own gradients, in float64, with the factors that it received."""
    model = _charged_model(case.inputs[rank], PlanChannel(case.plan, rank), torch.float64)
    return emulated.local_gradients(model, case.inputs[rank], range(STEPS))


def _carries(payload: Any, gradients: list[np.ndarray], world_size: int) -> bool:
    """Whether a payload is these gradients, in any order, divided by `world_size` or not."""
    sent = np.sort(np.asarray(payload, dtype=np.float64).ravel())
    wanted = np.sort(np.concatenate([g.ravel() for g in gradients]))
    if len(sent) != len(wanted):
        return False
    tolerance = 1e-4 * np.abs(wanted).max()
    return any(
        bool((np.abs(sent - wanted * scale) <= tolerance * scale).all())
        for scale in (1.0, 1.0 / world_size)
    )


def judge_sends(case: Case) -> Iterator[Finding]:
    """In every step each bucket has one all-reduce of its gradients, in the plan's order."""
    for rank in range(case.world_size):
        local = _local_gradients(case, rank)
        for step in range(STEPS):
            if problem := _sends_problem(case, rank, step, local[step]):
                yield problem
                break


def _sends_problem(case: Case, rank: int, step: int, local: list[np.ndarray]) -> Finding | None:
    plan, sizes = case.inputs[0]["plan"], case.inputs[0]["sizes"]
    wanted = [sum(sizes[i] for i in bucket) for bucket in plan]
    found = _all_reduces(case, rank, step)
    if isinstance(found, Finding):
        return found
    got = [c.nbytes for c in found]
    if got != wanted:
        order = " The plan's order is the order on the wire." * (sorted(got) == sorted(wanted))
        return Finding(
            f"step {step}: expected {len(wanted)} all-reduces of {wanted} bytes, one per bucket, "
            f"got {len(got)} of {got}.{order}",
            rank,
        )
    for number, (bucket, collective) in enumerate(zip(plan, found, strict=True)):
        payload = collective.payloads.get(rank)
        if payload is None or not _carries(payload, [local[i] for i in bucket], case.world_size):
            return Finding(
                f"all-reduce {number} of step {step} does not carry the gradients of bucket "
                f"{number}: was it started before they were there, or are those an earlier step's "
                "tensors?",
                rank,
            )
    return None


def judge_efficiency(case: Case) -> Iterator[Finding]:
    """At least 90 % of the steps' virtual time is computation.

    In every step all gradients travel, nothing waits while backward goes on, and every all-reduce
    is waited for before the next step.
    """
    if wrong := _missing_gradients(case) or _waits_in_backward(case) or _left_under_way(case):
        yield wrong
        return
    values = case.inputs[0]
    compute_s = _compute_s(values)
    step_s = seconds_per_step(case)
    if compute_s / step_s >= EFFICIENCY:
        if wrong := _late(case):
            yield wrong
        return
    each = compute_s / _predicted(values, [[i] for bucket in values["plan"] for i in bucket])
    late = compute_s / (
        compute_s
        + sum(
            values["fixed_s"] + values["s_per_byte"] * sum(values["sizes"][i] for i in bucket)
            for bucket in values["plan"]
        )
    )
    found = _all_reduces(case, 0, 1)
    sent = len(found) if isinstance(found, list) else 0
    hint = (
        "Start a bucket's all-reduce with async_op=True in the hook of its last gradient, and wait "
        "in finish() only."
    )
    if sent > len(values["plan"]):
        hint = (
            f"A step sent {sent} all-reduces for {len(values['plan'])} buckets, and each pays the "
            "latency: put all gradients of a bucket into one."
        )
    yield Finding(
        f"efficiency {compute_s / step_s:.3f}, target {EFFICIENCY}: a step computes for "
        f"{compute_s * 1e3:.1f} ms and takes {step_s * 1e3:.1f} ms of virtual time. Here each "
        f"gradient alone gives {each:.2f}, the plan's buckets all after backward {late:.2f}. {hint}"
    )


def _missing_gradients(case: Case) -> Finding | None:
    """A finding on the first gradient that was in no all-reduce of its step, if any."""
    for rank in range(case.world_size):
        for step, gradients in enumerate(_local_gradients(case, rank)):
            found = _all_reduces(case, rank, step)
            if isinstance(found, Finding):
                return found
            sent = [
                np.sort(np.asarray(c.payloads[rank], dtype=np.float64).ravel())
                for c in found
                if rank in c.payloads
            ]
            for layer, gradient in enumerate(gradients):
                if not any(_holds(payload, gradient, case.world_size) for payload in sent):
                    why = f"the gradient of layer {layer} was in no all-reduce of step {step}."
                    return Finding(why, rank)
    return None


def _waits_in_backward(case: Case) -> Finding | None:
    """A finding if a rank waited for a collective before the last layer of a step's backward."""
    for rank, events in enumerate(case.trace.events):
        for step in range(STEPS):
            backward = [i for i, e in enumerate(events) if is_compute(e, "backward", step)]
            part = events[backward[0] : backward[-1]]
            if any(e.kind == "wait" for e in part):
                return Finding(
                    f"step {step}: an all-reduce was waited for while backward still had layers to "
                    "go. Nothing waits before finish(): the network has a queue of its own.",
                    rank,
                )
    return None


def _left_under_way(case: Case) -> Finding | None:
    """A finding if a rank has not waited for each all-reduce before the next step or the end."""
    for rank, events in enumerate(case.trace.events):
        for step in range(STEPS):
            found = _all_reduces(case, rank, step)
            if isinstance(found, Finding):
                return found
            begins = [i for i, e in enumerate(events) if is_compute(e, "forward", step + 1)]
            part = events[: begins[0] if begins else None]
            waited = {e.key for e in part if e.kind == "wait"}
            if left := [n for n, c in enumerate(found) if c.key not in waited]:
                return Finding(
                    f"step {step}: nobody waited for all-reduce {left[0]} of {len(found)}, so "
                    "its gradients may be no mean yet when finish() returns. Collectives may "
                    "end in a different order than that of their calls: wait for each.",
                    rank,
                )
    return None


def _late(case: Case) -> Finding | None:
    """A finding if a complete bucket was not sent before the next layer's backward, in any step."""
    plan, sizes = case.inputs[0]["plan"], case.inputs[0]["sizes"]
    kinds = {c.key: c for c in case.trace.collectives if reaches_all(c, case.world_size)}
    for rank, events in enumerate(case.trace.events):
        for step in range(STEPS):
            sent, there = 0, LAYERS  # bytes sent; gradients from this layer on are ready
            for event in events[_first_backward(events, step) :]:
                if is_compute(event, "backward", step):
                    complete = [all(i >= there for i in bucket) for bucket in plan]
                    count = complete.index(False)
                    due = sum(sizes[i] for bucket in plan[:count] for i in bucket)
                    if sent < due:
                        more = " One hook may have to start several buckets." * (sent > 0)
                        return Finding(
                            f"step {step}: when backward came to layer {there - 1}, the first "
                            f"{count} bucket{'s' * (count > 1)} of the plan could go, which "
                            f"are {due} bytes, and {sent} bytes did. Each starts as soon as "
                            "its gradients are there and all before it have started, in every "
                            f"step.{more}",
                            rank,
                        )
                    there -= 1
                elif event.kind == "issue" and event.key in kinds:
                    sent += kinds[event.key].nbytes
                if there == 0:
                    break
    return None


def _first_backward(events: Sequence[Any], step: int) -> int:
    return next(i for i, e in enumerate(events) if is_compute(e, "backward", step))


def _holds(payload: np.ndarray, gradient: np.ndarray, world_size: int) -> bool:
    """Whether the sorted payload holds every value of a gradient, divided by world_size or not."""
    if len(payload) < max(2, gradient.size):
        return False
    for scale in (1.0, 1.0 / world_size):
        wanted = gradient.ravel() * scale
        at = np.clip(np.searchsorted(payload, wanted), 1, len(payload) - 1)
        near = np.minimum(np.abs(payload[at] - wanted), np.abs(payload[at - 1] - wanted))
        if (near <= 1e-5 * np.abs(wanted).max()).all():
            return True
    return False


def seconds_per_step(case: Case) -> float:
    """Mean virtual seconds of a step, without the first step."""
    cluster = grading_cluster(case.inputs[0], case.world_size)
    return emulated.seconds_each(case, cluster, 1, STEPS - 1)
