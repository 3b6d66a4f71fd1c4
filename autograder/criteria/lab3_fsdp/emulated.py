"""Criteria for sharding on the emulated cluster: what travels, and in which dtype.

Each unit is a charged layer, so the broker knows when each unit computes. The broker also carries
everything that travels. The values in an all-gather show which unit it brings. The referee computes
the gradients with the factors that the broker handed out, and compares them to what a
reduce-scatter carries. All parameters change between two steps, so each step has to gather the
current values of the shards. In every step, layers have to run in order, and each unit's all-gather
has to be waited for before the unit computes. Ranks report only what `fully_shard` does on them:
the bytes and dtypes of the parameters that it leaves, and whether its options reach every unit.

A submission may choose how gradients reach their ranks (a reduce-scatter, or an all-to-all and a
sum), how it cuts and pads a unit, and when it waits for a reduce-scatter, as long as it waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import answers, oracle
from autograder.criteria.common.answers import read_tensor
from autograder.criteria.common.emulated import (
    charge_plan,
    charged_mlp,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab3_fsdp import parts
from autograder.criteria.lab3_fsdp.sharded_steps import (
    FACTOR,
    LAYERS,
    MAX_WHOLE,
    STEPS,
    UNIT_NUMEL,
    WIDTH,
    Step,
    every_evaluation,
    every_step,
)
from minidist.emulate.plan import ChargePlan, PlanChannel

BATCH = 3
# Passes without backward, each twice: what stays whole shows in the second.
EVALUATIONS = ("under torch.no_grad()", "in eval mode")
FORWARD_S, BACKWARD_S = 1e-3, 2e-3
MAX_UNITS = 1.5  # units that one collective may carry
MAX_PASSES = 2.6  # times that a step may gather all parameters, with padding
SMALL_NUMEL = UNIT_NUMEL // 16  # for a loss, a norm or a flag; a rank's part of a unit has more
TOP = 300  # number of largest entries that identify a gradient


# --- draw and observe ----------------------------------------------------------------------------


def draw(source: Draw) -> list[Values]:
    """The same weights on all ranks, each value once; different data per rank and step."""
    sizes = [WIDTH] * (LAYERS + 1)
    start = parts.draw_mlp(source.shared(), sizes, scale=0.2)
    start["left_over"] = int(source.shared("left over").integers(LAYERS))
    return oracle.private_batches(source, start, [(BATCH,)] * STEPS, sizes)


def draw_evaluated(source: Draw) -> list[Values]:
    """The same; after the steps come forward passes without backward, as in an evaluation."""
    return [values | {"evaluations": 2 * len(EVALUATIONS)} for values in draw(source)]


def plan(source: Draw) -> ChargePlan:
    """What each layer costs, and the secret behind the factors."""
    return charge_plan(source, (FORWARD_S,) * LAYERS, (BACKWARD_S,) * LAYERS)


def _steps(
    model: Any, inputs: Values, dtype: torch.dtype, params: Sequence[torch.Tensor]
) -> Iterator[int]:
    """Runs each step, and stops after it; before the next one, `params` change."""
    for step in range(STEPS):
        x, y = (torch.from_numpy(inputs[f"{name}/{step}"]).to(dtype) for name in "xy")
        with parts.naming_faults():
            oracle.mse(read_tensor(model(x), "the model").to(dtype), y).backward()
        yield step
        with torch.no_grad():
            for p in params:
                p.mul_(FACTOR)
                p.grad = None


def observe_class(fsdp_class: Any, inputs: Values, context: Context) -> Values:
    """Forward and backward passes with the student's class; its shards change between them.

    Whole gradients are deleted, and errors of an evaluation suppressed: different criteria judge
    both. Notes the bytes that model and shards take whenever a layer begins.
    """
    model = charged_mlp(inputs, context.broker, torch.float32)
    fsdp = fsdp_class(model, list(model))
    shards = parts.local_parameters(fsdp)
    held: list[int] = []
    for layer in model:
        layer.register_forward_pre_hook(
            lambda *_: held.append(parts.resident_bytes([*shards, *model.parameters()], set()))
        )
    for _ in _steps(fsdp, inputs, torch.float32, shards):
        parts.forget_whole_gradients(model, fsdp)
    with contextlib.suppress(Exception):
        for number in range(inputs["evaluations"]):
            evaluates = number >= 2
            if evaluates:
                fsdp.eval()
            with torch.set_grad_enabled(evaluates):
                fsdp(torch.from_numpy(inputs["x/0"]))
    return {"held": held}


def observe_native(shard_model: Any, inputs: Values, context: Context) -> Values:
    """Forward and backward passes with the student's function, which calls `fully_shard`."""
    return _observe_native(shard_model, inputs, context, {}) | {"own": _sharded_alone(shard_model)}


def _sharded_alone(shard_model: Any) -> list[str]:
    """The modules that were sharded on their own, of a model with two units inside a container."""
    from torch.distributed.fsdp import FSDPModule

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    shard_model(model, parts.linears(model), parts.make_mesh("cpu"))
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def observe_precision(shard_model: Any, inputs: Values, context: Context) -> Values:
    """Like `observe_native`, with parameters that are gathered in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    asked: list[int] = []  # numel of each parameter that torch passed to the function below
    options = {"mp_policy": policy, "shard_placement_fn": lambda p: asked.append(p.numel())}
    answer = _observe_native(shard_model, inputs, context, options)
    return answer | {"asked": sum(asked)}


def _observe_native(
    shard_model: Any, inputs: Values, context: Context, options: dict[str, Any]
) -> Values:
    from torch.distributed.tensor import DTensor

    mesh = parts.make_mesh("cpu")
    model = charged_mlp(inputs, context.broker, torch.float32)
    for linear in parts.linears(model):  # a layer that is not sharded has to accept bf16 inputs
        linear.register_forward_pre_hook(lambda it, args: args[0].to(it.weight.dtype))
    units = [layer for i, layer in enumerate(model) if i != inputs["left_over"]]
    sharded = shard_model(model, units, mesh, **options)
    if options and sharded is None:
        sharded = model  # `observe_native` judges the return value
    if not isinstance(sharded, nn.Module):
        raise TypeError(f"shard_model: expected the model, got {type(sharded).__name__}")
    params = list(sharded.parameters())
    cut = {name: p for name, p in sharded.named_parameters() if isinstance(p, DTensor)}
    for _ in _steps(sharded, inputs, torch.float32, params):
        pass
    return {
        "whole": [name for name, _ in sharded.named_parameters() if name not in cut],
        "elsewhere": [
            name
            for name, p in cut.items()
            if p.device_mesh.mesh_dim_names != mesh.mesh_dim_names  # type: ignore[attr-defined]
        ],
        "sharded": sum(p.numel() for p in cut.values()),
        "bytes": parts.resident_bytes(params, set()),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in params}),
    }


def _local_gradients(case: Case, rank: int) -> list[list[np.ndarray]]:
    """This rank's own gradients per step and unit, in float64, with its secret factors."""
    model = charged_mlp(case.inputs[rank], PlanChannel(case.plan, rank), torch.float64)
    params = list(model.parameters())
    found = []
    for _ in _steps(model, case.inputs[rank], torch.float64, params):
        grads = [oracle.grad_of(p).ravel().copy() for p in params]
        found.append([np.concatenate(grads[2 * i : 2 * i + 2]) for i in range(LAYERS)])
    return found


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
    """Each unit has its own all-gathers and its own reduce-scatter, with the right gradients.

    A unit may be cut and padded in any way, its reduce-scatter may be an all-to-all and a sum, and
    one or two units may be gathered ahead. Passes without backward hold no more units than others.
    """
    steps = list(_judge_steps(case))
    yield from steps or _judge_held(case)


def _judge_held(case: Case) -> Iterator[Finding]:
    """Findings if more units are whole in a pass without backward than may be.

    `fsdp_limit` judges the steps, and `fsdp_forward` units that the next pass does not gather.
    """
    most = (LAYERS / case.world_size + MAX_WHOLE + 0.5) * UNIT_NUMEL * 4
    second = {(s.rank, s.number): s for s in every_evaluation(case) if (s.number - STEPS) % 2}
    for rank, answer in enumerate(case.answers):
        held = told if isinstance(told := answers.told(answer, "held"), list) else []
        passes = [held[i : i + LAYERS] for i in range(0, len(held), LAYERS)]
        over = [any(type(size) is not int or size > most for size in sizes) for sizes in passes]
        for number, how in enumerate(EVALUATIONS) if not any(over[:STEPS]) else ():
            last = STEPS + 2 * number + 1
            step = second.get((rank, last))
            if any(over[last : last + 1]) and step and not step.not_gathered(old=True):
                yield Finding(
                    f"a forward pass {how} had more than {MAX_WHOLE} units whole at a time: each "
                    "unit is freed after its forward there, too.",
                    rank,
                )
                break


def _judge_steps(case: Case) -> Iterator[Finding]:
    """Findings about what travels in each step."""
    gradients = [_local_gradients(case, rank) for rank in range(case.world_size)]
    for step in every_step(case):
        if isinstance(step, Finding):
            yield step
        elif problem := (
            _giant_gather(step, case)
            or step.not_gathered()
            or step.too_far_ahead()
            or _wrong_reduction(step, gradients[step.rank][step.number])
        ):
            yield problem


def _giant_gather(step: Step, case: Case) -> Finding | None:
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


def _wrong_reduction(step: Step, gradients: list[np.ndarray]) -> Finding | None:
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
    for unit, gradient in enumerate(gradients):
        if not any(_carries(values, gradient) for values in sent):
            what = f"this rank's gradients of unit {unit} were in no reduce-scatter of step"
            if any(len(values) >= gradient.size for values in sent):
                what = (
                    "no reduce-scatter carried the gradients that the whole model has in unit "
                    f"{unit}, so its weights or what was sent are wrong, in step"
                )
            return Finding(f"{what} {step.number}.", step.rank)
    if step.unfinished:
        return Finding(
            f"a {step.unfinished[0].kind} of step {step.number} was not waited for before the "
            "next step: when backward() returns, every gradient has to be there.",
            step.rank,
        )
    return None


def judge_native(case: Case) -> list[Finding]:
    """Each step as in `judge_units`; units are freed after forward, and a rank keeps 1/N of them.

    One layer, drawn anew, is in no unit, so it is left over for the root. The root, and the last
    unit, may stay whole, because their backward comes first.
    """
    if badly := list(_not_cut(case)):
        return badly
    several = case.world_size > 1  # on a single rank torch gathers nothing
    findings = list(_judge_steps(case)) if several else []
    if several and not findings:
        *freed, _ = (i for i in range(LAYERS) if i != case.inputs[0]["left_over"])
        steps = [step for step in every_step(case) if isinstance(step, Step)]
        findings = [problem for step in steps if (problem := step.not_gathered_again(freed))]
    params = oracle.parameters_of(case.inputs[0])
    bound = parts.shard_bound([p.shape for p in params], case.world_size)
    for rank, answer in enumerate(case.answers):
        if not findings and (own := answers.told(answer, "own")) != _OWN:
            findings.append(
                Finding(
                    f"a model with the units 0.0, 0.1 and 1: sharded on their own were {own} "
                    "('' is the model itself), expected the units and, in any case, the model.",
                    rank,
                )
            )
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


_OWN = ["", "0.0", "0.1", "1"]


def _not_cut(case: Case) -> Iterator[Finding]:
    for rank, answer in enumerate(case.answers):
        whole, elsewhere = answers.told(answer, "whole"), answers.told(answer, "elsewhere")
        if whole != []:
            yield Finding(
                f"these parameters are no DTensors: {whole}. Layer {case.inputs[0]['left_over']} "
                "is in none of the units: what they leave over belongs to the model itself, which "
                "is sharded last.",
                rank,
            )
        elif elsewhere != []:
            yield Finding(f"these parameters are sharded over a different mesh: {elsewhere}.", rank)


def judge_precision(case: Case) -> list[Finding]:
    """Parameters travel in bf16, gradients in fp32, and the shards are fp32."""
    findings: list[Finding] = []
    for rank, answer in enumerate(case.answers):
        dtypes, asked = answer.get("dtypes"), answer.get("asked")
        # A different criterion judges whether all parameters are sharded.
        if not isinstance(asked, int) or asked < max(UNIT_NUMEL, answer.get("sharded", 0)):
            findings.append(
                Finding(
                    "shard_placement_fn, one of the options, did not reach every call of "
                    "fully_shard: units and the model itself get all of them.",
                    rank,
                )
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
    for step in every_step(case):
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
