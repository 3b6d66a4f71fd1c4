"""Criteria for sharding on the emulated cluster: what travels, when, and in which dtype.

Each unit is a charged layer, so the broker knows when each unit computes. The broker also carries
everything that travels. The values in an all-gather show which unit it brings. The referee computes
the gradients with the factors that the broker handed out, and compares them to what a
reduce-scatter carries. Ranks report only what `fully_shard` does on them: the bytes and dtypes of
the parameters that it leaves, and whether its options reach every unit.
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
    of_every_rank,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab3_fsdp import parts
from minidist.emulate.clusters import Cluster
from minidist.emulate.plan import ChargePlan, PlanChannel
from minidist.emulate.simulate import simulate
from minidist.emulate.trace import Collective

LAYERS, WIDTH, BATCH, STEPS = 6, 84, 3, 2  # 2, 3, 4, 6 and 7 divide the 84 rows
FORWARD_S, BACKWARD_S = 1e-3, 2e-3
UNIT_NUMEL = WIDTH * WIDTH + WIDTH
GATHER_TO_FORWARD = 0.5  # time of a unit's all-gather / time of its forward
# Targets. No prefetch gives 0.71 in both directions, blocking all-gathers 0.75, prefetch about 1.
# Waiting at once for each reduce-scatter is allowed and gives 0.83 in backward.
EFFICIENCY = {"forward": 0.88, "backward": 0.79}
MAX_UNITS = 1.5  # units that one collective may carry
MAX_PASSES = 2.6  # times that a step may gather all parameters, with padding
SMALL_NUMEL = UNIT_NUMEL // 16  # for a loss, a norm or a flag; a rank's part of a unit has more
LATENCY_S = 1e-6
TOP = 300  # number of largest entries that identify a gradient
_FLOATS = ("float32", "bfloat16", "float16", "float64")


def grading_cluster(world_size: int) -> Cluster:
    """Links on which the all-gather of a unit takes the same time for any number of ranks."""
    share = (world_size - 1) / world_size
    bandwidth = share * UNIT_NUMEL * 4 / (GATHER_TO_FORWARD * FORWARD_S)
    return even_cluster(world_size, bandwidth, LATENCY_S)


# --- draw and observe ----------------------------------------------------------------------------


def draw(source: Draw) -> list[Values]:
    """The same weights on all ranks, each value once; different data per rank and step."""
    sizes = [WIDTH] * (LAYERS + 1)
    start = parts.draw_mlp(source.shared(), sizes, scale=0.2)
    inputs = []
    for rank in range(source.world_size):
        rng, values = source.private(rank), dict(start)
        for step in range(STEPS):
            batch = oracle.draw_batch(rng, BATCH, sizes)
            values |= {f"{name}/{step}": batch[name] for name in "xy"}
        inputs.append(values)
    return inputs


def plan(source: Draw) -> ChargePlan:
    """What each layer costs, and the secret behind the factors."""
    return charge_plan(source, (FORWARD_S,) * LAYERS, (BACKWARD_S,) * LAYERS)


def _steps(model: Any, inputs: Values, dtype: torch.dtype, before: Any) -> None:
    for step in range(STEPS):
        x, y = (torch.from_numpy(inputs[f"{name}/{step}"]).to(dtype) for name in "xy")
        before()
        oracle.mse(model(x).to(dtype), y).backward()


def observe_class(fsdp_class: Any, inputs: Values, context: Context) -> Values:
    """Forward and backward passes with the student's class, without an update of the shards."""
    model = charged_mlp(inputs, context.broker, torch.float32)
    fsdp = fsdp_class(model, list(model))
    shards = parts.local_parameters(fsdp)

    def forget_gradients() -> None:
        for p in shards:
            p.grad = None

    _steps(fsdp, inputs, torch.float32, forget_gradients)
    return {"done": True}


def observe_native(shard_model: Any, inputs: Values, context: Context) -> Values:
    """Forward and backward passes with the student's function, which calls `fully_shard`."""
    return _observe_native(shard_model, inputs, context, {})


def observe_precision(shard_model: Any, inputs: Values, context: Context) -> Values:
    """Like `observe_native`, with parameters that are gathered in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    asked: list[int] = []  # numel of each parameter that torch passed to the function below
    options = {"mp_policy": policy, "shard_placement_fn": lambda p: asked.append(p.numel())}
    answer = _observe_native(shard_model, inputs, context, options)
    return answer | {"asked": sum(asked)}


def _observe_native(
    shard_model: Any, inputs: Values, context: Context, options: dict[str, Any]
) -> Values:
    mesh = parts.make_mesh("cpu")
    model = charged_mlp(inputs, context.broker, torch.float32)
    sharded = shard_model(model, list(model), mesh, **options)
    if not isinstance(sharded, nn.Module):
        raise TypeError(f"shard_model: expected the model, got {type(sharded).__name__}")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.0)
    _steps(sharded, inputs, torch.float32, optimizer.zero_grad)
    return {
        "bytes": parts.resident_bytes(sharded.parameters(), set()),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in sharded.parameters()}),
    }


# --- what the broker saw -------------------------------------------------------------------------


class _LastStep:
    """The last step of one rank: its computes, all-gathers and reductions, in their order."""

    def __init__(self, case: Case, rank: int) -> None:
        self.rank, self.finding = rank, None
        events = case.trace.events[rank]
        computes = [i for i, e in enumerate(events) if e.kind == "compute"]
        if len(computes) != 2 * LAYERS * STEPS:
            self.finding = Finding(
                f"{len(computes)} forward and backward passes of layers, expected "
                f"{2 * LAYERS * STEPS}.",
                rank,
            )
            return
        if ahead := find_ahead(events, rank):
            self.finding = ahead
            return
        last = computes[-2 * LAYERS :]
        self.forward, self.backward = last[:LAYERS], last[LAYERS:]
        begin = computes[-2 * LAYERS - 1]  # the last backward compute of the step before
        issued = {e.key: i for i, e in enumerate(events) if e.kind == "issue"}
        mine = [
            (issued[c.key], c)
            for c in case.trace.collectives
            if c.key in issued
            and c.numel > 0
            and c.dtype in _FLOATS
            and reaches_all(c, case.world_size)
        ]
        self.gathers = [(i, c) for i, c in mine if i > begin and c.kind == "all_gather"]
        self.reductions = [c for i, c in mine if i > self.backward[0] and c.kind != "all_gather"]
        values, order = parts.lookup([], _as_sent(case.inputs[0], self.gathers))
        self.units = [
            set().union(*(_units_in(c, r, values, order) for r in c.payloads))
            for _, c in self.gathers
        ]

    def not_gathered(self) -> Finding | None:
        """A finding if some unit was not gathered before its forward."""
        for unit in range(LAYERS):
            here = [
                i for (i, _), units in zip(self.gathers, self.units, strict=True) if unit in units
            ]
            if not here or min(here) > self.forward[unit]:
                return Finding(
                    f"unit {unit} was not in any all-gather before its forward pass, in step "
                    f"{STEPS - 1}: shards have to be gathered anew in every step.",
                    self.rank,
                )
        return None

    def not_gathered_again(self) -> Finding | None:
        """A finding if some unit stayed whole between forward and backward.

        The last unit may stay whole, because its backward comes first.
        """
        for unit in range(LAYERS - 1):
            late = [
                i
                for (i, _), units in zip(self.gathers, self.units, strict=True)
                if unit in units and i > self.forward[unit]
            ]
            if not late:
                return Finding(
                    f"unit {unit} was not gathered again for backward: it was not freed after "
                    "forward (reshard_after_forward).",
                    self.rank,
                )
        return None


def _as_sent(inputs: Values, gathers: list[tuple[int, Collective]]) -> list[np.ndarray]:
    """The model's parameters, rounded to bf16 if an all-gather carried bf16."""
    params = oracle.parameters_of(inputs)
    if any(c.dtype == "bfloat16" for _, c in gathers):
        params = [torch.from_numpy(p).bfloat16().float().numpy() for p in params]
    return params


def _units_in(c: Collective, rank: int, values: np.ndarray, order: np.ndarray) -> set[int]:
    """The units whose parameters this rank sent, without stray matches."""
    sent = c.payloads.get(rank)
    if sent is None:
        return set()
    flat = np.asarray(sent, dtype=np.float64).ravel()
    places = parts.find(values, order, flat[flat != 0])
    units, counts = np.unique(places[places >= 0] // UNIT_NUMEL, return_counts=True)
    # A value rounded to bf16 may occur in several units: keep the most frequent units.
    return {int(u) for u, n in zip(units, counts, strict=True) if n >= 0.5 * counts.max()}


def _last_steps(case: Case) -> list[_LastStep] | list[Finding]:
    return of_every_rank(case, _LastStep)


def _local_gradients(case: Case, rank: int) -> list[np.ndarray]:
    """This rank's own gradients of the last step, per unit, in float64, with its secret factors."""
    model = charged_mlp(case.inputs[rank], PlanChannel(case.plan, rank), torch.float64)
    _steps(model, case.inputs[rank], torch.float64, model.zero_grad)
    grads = [oracle.grad_of(p).ravel() for p in model.parameters()]
    return [np.concatenate(grads[2 * i : 2 * i + 2]) for i in range(LAYERS)]


def _carries(sent: np.ndarray, gradient: np.ndarray) -> bool:
    """Whether `sent` is `gradient` in any order, times any factor, with zeros added.

    Compares the absolute values of the `TOP` largest entries, divided by the largest: these differ
    from gradient to gradient.
    """
    profiles = [np.sort(np.abs(values))[::-1][:TOP] for values in (sent, gradient)]
    if any(len(p) < TOP or not np.isfinite(p).all() or p[0] == 0 for p in profiles):
        return False
    ours, theirs = (p / p[0] for p in profiles)
    return bool(np.allclose(ours, theirs, rtol=1e-3, atol=0.0))


# --- judge ---------------------------------------------------------------------------------------


def judge_units(case: Case) -> Iterator[Finding]:
    """Each unit has its own all-gathers and its own reduce-scatter, with the right gradients."""
    for step in _last_steps(case):
        if isinstance(step, Finding):
            yield step
        elif problem := (
            _giant_gather(step, case) or step.not_gathered() or _wrong_reduction(step, case)
        ):
            yield problem


def _giant_gather(step: _LastStep, case: Case) -> Finding | None:
    for _, c in step.gathers:
        units = c.numel * case.world_size / UNIT_NUMEL
        if units > MAX_UNITS:
            return Finding(
                f"one all-gather brought {units:.1f} units at once, expected one unit each: the "
                "whole model would lie in memory.",
                step.rank,
            )
    passes = sum(c.numel for _, c in step.gathers) * case.world_size / (LAYERS * UNIT_NUMEL)
    if passes > MAX_PASSES:
        return Finding(
            f"all-gathers brought the parameters {passes:.1f} times in one step; forward and "
            "backward need them once each.",
            step.rank,
        )
    return None


def _wrong_reduction(step: _LastStep, case: Case) -> Finding | None:
    scatters = [c for c in step.reductions if c.kind in ("reduce_scatter", "all_to_all")]
    for c in step.reductions:
        if c.kind in ("all_reduce", "reduce", "broadcast") and c.numel > SMALL_NUMEL:
            return Finding(
                f"{c.numel} numbers went through {c.kind} in backward. Each rank needs only its "
                "own part of the sum: that is a reduce-scatter, half the traffic.",
                step.rank,
            )
    sent = [
        np.asarray(c.payloads[step.rank], dtype=np.float64).ravel()
        for c in scatters
        if c.payloads.get(step.rank) is not None
    ]
    for values in sent:
        if len(values) > MAX_UNITS * UNIT_NUMEL:
            return Finding(
                f"one reduce-scatter carried the gradients of {len(values) / UNIT_NUMEL:.1f} "
                "units, expected one unit each: the whole gradient would lie in memory.",
                step.rank,
            )
    for unit, gradient in enumerate(_local_gradients(case, step.rank)):
        if not any(_carries(values, gradient) for values in sent):
            return Finding(
                f"this rank's gradients of unit {unit} were in no reduce-scatter of step "
                f"{STEPS - 1}.",
                step.rank,
            )
    return None


def judge_prefetch_forward(case: Case) -> list[Finding]:
    """In virtual time, the forward pass of one unit hides the all-gather of the next unit."""
    return _judge_prefetch(
        case,
        "forward",
        "Start the all-gather of unit i + 1 (async_op=True) before unit i computes.",
    )


def judge_prefetch_backward(case: Case) -> list[Finding]:
    """In virtual time, the backward pass of one unit hides the all-gather of the unit before it."""
    return _judge_prefetch(
        case,
        "backward",
        "Start the all-gather of unit i - 1 (async_op=True) before the backward of unit i.",
    )


def _judge_prefetch(case: Case, direction: str, hint: str) -> list[Finding]:
    steps = _last_steps(case)
    findings = [s if isinstance(s, Finding) else s.not_gathered() for s in steps]
    if any(findings):
        return [finding for finding in findings if finding]
    timeline = simulate(case.trace, grading_cluster(case.world_size))
    for step in steps:
        assert isinstance(step, _LastStep)
        if direction == "backward" and not any(c.numel > SMALL_NUMEL for c in step.reductions):
            return [Finding("no gradients were reduced in backward.", step.rank)]
    efficiency = min(
        _efficiency(timeline.event_times[step.rank], getattr(step, direction), direction)
        for step in steps
        if isinstance(step, _LastStep)
    )
    if efficiency >= EFFICIENCY[direction]:
        return []
    return [
        Finding(
            f"{direction}: {efficiency:.2f} of the virtual time between the first and the last "
            f"unit is compute, target {EFFICIENCY[direction]}: the units wait for their "
            f"parameters. {hint}"
        )
    ]


def _efficiency(times: Any, computes: list[int], direction: str) -> float:
    span = times[computes[-1]][1] - times[computes[0]][0]
    return LAYERS * (FORWARD_S if direction == "forward" else BACKWARD_S) / max(span, 1e-12)


def judge_native(case: Case) -> list[Finding]:
    """Like `judge_units`; units are freed after forward, and a rank keeps 1/N of the parameters."""
    findings = list(judge_units(case))
    if not findings and case.world_size > 1:
        steps = [step for step in _last_steps(case) if isinstance(step, _LastStep)]
        findings = [problem for step in steps if (problem := step.not_gathered_again())]
    params = oracle.parameters_of(case.inputs[0])
    bound = parts.shard_bound([p.shape for p in params], case.world_size)
    for rank, answer in enumerate(case.answers):
        got = answer.get("bytes")
        if type(got) is not int or got > bound:
            findings.append(
                Finding(
                    f"{got} bytes of parameters on this rank after a step, expected at most "
                    f"{bound} (1/{case.world_size} of {sum(p.nbytes for p in params)}, plus "
                    "padding). Is fully_shard called on every unit and on the model?",
                    rank,
                )
            )
    return findings


def judge_precision(case: Case) -> list[Finding]:
    """Parameters travel in bf16, gradients in fp32, and the shards are fp32."""
    findings: list[Finding] = []
    for rank, answer in enumerate(case.answers):
        dtypes = answer.get("dtypes")
        if not isinstance(answer.get("asked"), int) or answer["asked"] < LAYERS * UNIT_NUMEL:
            findings.append(
                Finding("shard_placement_fn, one of the options, did not reach every unit.", rank)
            )
        if not isinstance(dtypes, list) or dtypes != ["float32"]:
            findings.append(
                Finding(
                    f"the sharded parameters are {answer.get('dtypes')}, expected float32: the "
                    "policy casts what is gathered; the optimizer works on fp32.",
                    rank,
                )
            )
    if findings or case.world_size == 1:
        return findings
    for step in _last_steps(case):
        if isinstance(step, Finding):
            findings.append(step)
            continue
        large = [c for c in step.reductions if c.numel > SMALL_NUMEL]
        for what, found, expected in (
            ("parameters were gathered", [c for _, c in step.gathers], "bfloat16"),
            ("gradients were reduced", large, "float32"),
        ):
            dtypes = sorted({c.dtype for c in found})
            if dtypes != [expected]:
                findings.append(
                    Finding(
                        f"{what} in {', '.join(dtypes) or 'nothing'}, expected {expected}. Are all "
                        "options handed on to every call of fully_shard?",
                        step.rank,
                    )
                )
                break
    return findings
