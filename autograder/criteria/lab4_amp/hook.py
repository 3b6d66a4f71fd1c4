"""Criteria for a DDP communication hook that sends 16 bits, on the emulated cluster.

The gradient of each parameter is a private array that the referee drew. So the referee knows the
right payloads and the right results without training anything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograder.criteria.common.answers import described, told
from autograder.criteria.common.charged import reaches_all
from autograder.criteria.common.comm_hooks import as_future, refused
from autograder.criteria.common.places import on_cpu
from autograder.criteria.common.pretending import pretending
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs
from autograder.criteria.lab4_amp.formats import DTYPES
from autograder.criteria.lab4_amp.held_back import HeldBack
from autograder.criteria.lab4_amp.many_ranks import RANKS, ManyRanks
from autograder.criteria.lab4_amp.scaler import same

# DDP makes three buckets of one size, so that a hook fails that keeps one tensor for each size.
SHAPES = ((30, 30), (500,), (20, 20), (25, 36))
NUMEL = sum(int(np.prod(shape)) for shape in SHAPES)
STEPS = 3  # gradients are compared in the last step: DDP settles its buckets in the first
# With this factor the largest gradients are as near to the largest number in bf16 as in fp16.
FACTORS = {"float16": 1.0, "bfloat16": 2.0**112}
INF_IN = 1  # the parameter whose last gradient is inf on the last rank
LARGE = 53_500.0  # up to 1.1 times this, 90 % of fp16's largest number: a sum of two overflows


class Weighted(nn.Module):
    """Sum of parameter × weight, so that the weights are the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(shape) for shape in SHAPES])

    def forward(self, weights: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * w).sum() for p, w in zip(self.parts, weights, strict=True)]).sum()


def _draw(draw: Draw, names: list[str], large: bool) -> list[Values]:
    inputs: list[Values] = [{"names": names} for _ in range(draw.world_size)]
    signs = [draw.shared("signs").choice([-1.0, 1.0], shape) for shape in SHAPES]
    for rank, values in enumerate(inputs):
        rng = draw.private(rank)
        for i, (shape, sign) in enumerate(zip(SHAPES, signs, strict=True)):
            # The same sign on all ranks, so that nothing cancels.
            weights = sign * 10 ** rng.uniform(-2, 2, shape)
            if large and i == INF_IN and rank == draw.world_size - 1:
                weights.flat[-1] = np.inf
            if large:
                weights.flat[:3] = sign.flat[:3] * LARGE * rng.uniform(0.9, 1.1, 3)
            values[f"w/{i}"] = weights.astype(np.float32)
    return inputs


def draw_mean(draw: Draw) -> list[Values]:
    """Gradients whose sum overflows in fp16 and whose mean does not; for both formats."""
    return _draw(
        draw, [["float16", "bfloat16"][i] for i in draw.shared("order").permutation(2)], large=True
    )


def draw_bytes(draw: Draw) -> list[Values]:
    """One format, and gradients of ordinary size."""
    return _draw(draw, [str(draw.shared("name").choice(["float16", "bfloat16"]))], large=False)


def observe(make_hook: Any, inputs: Values, context: Context) -> Values:
    """Runs backward several times in each format; the gradients of the last backward.

    In the case of `draw_mean` no all-reduce begins before the last bucket has come: until then, the
    hook must not write into a tensor that it has handed to an all-reduce.
    """
    answer: Values = {"hook": ""}
    held = HeldBack() if len(inputs["names"]) > 1 else None
    for name in inputs["names"]:
        hook, futures = make_hook(DTYPES[name]), []
        if not callable(hook):
            raise TypeError(f"make_compress_hook returned {described(hook)}; expected a function")
        model = DistributedDataParallel(Weighted(), bucket_cap_mb=0.003)
        answer["hook"] = answer["hook"] or refused(model, hook)
        many = ManyRanks(make_hook, DTYPES[name]) if held else None
        called = partial(_call, hook, futures, held, many)
        # A lambda has no annotations, which DDP would check.
        model.register_comm_hook(None, lambda state, bucket, call=called: call(state, bucket))
        weights = _weights(inputs, name)
        # Several nodes, so that the size of a node is not taken for the number of ranks.
        late = pretending(hook, {(dist, "all_reduce"): held.all_reduce}) if held else None
        places = mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"})
        with places, on_cpu(hook), late or contextlib.nullcontext():
            for _ in range(STEPS):
                model.zero_grad()
                if many:
                    many.buckets = []
                model(weights).backward()
            answer[f"many/{name}"] = many.values() if many else np.zeros(0, "f4")
        for i, p in enumerate(model.parameters()):
            grad = torch.zeros(0) if p.grad is None else p.grad
            answer[f"dtype/{name}/{i}"] = str(grad.dtype).removeprefix("torch.")
            answer[f"g/{name}/{i}"] = grad.float().numpy()
        answer[f"calls/{name}"] = len(futures)
        values = [future.value() for future in futures]
        kinds = {str(v.dtype) if isinstance(v, torch.Tensor) else described(v) for v in values}
        answer[f"values/{name}"] = sorted(kind.removeprefix("torch.") for kind in kinds)
    return answer


def _weights(inputs: Values, name: str) -> list[torch.Tensor]:
    """The gradients of a rank; those of `draw_mean` are as large as the format allows."""
    factor = FACTORS[name] if len(inputs["names"]) > 1 else 1.0
    return [torch.from_numpy(inputs[f"w/{i}"] * np.float32(factor)) for i in range(len(SHAPES))]


def _call(
    hook: Any,
    futures: list[Any],
    held: HeldBack | None,
    many: ManyRanks | None,
    state: object,
    bucket: dist.GradBucket,
) -> torch.futures.Future[torch.Tensor]:
    if many is not None:
        many.keep(bucket)
    future = hook(state, bucket)
    if held is not None and bucket.is_last():
        held.release()
    futures.append(future)
    return as_future(future, "the hook")


def judge_mean(case: Case) -> Iterator[Finding]:
    """Gradients are the mean over ranks, in float32, within the rounding error of the format.

    The hook may wait, write into the buffer, and divide partly before and partly after the sum.
    """
    for rank, answer in enumerate(case.answers):
        if refused := told(answer, "hook"):
            yield Finding(f"{refused}", rank)
            continue
        for name in case.inputs[0]["names"]:
            if (kinds := told(answer, f"values/{name}")) != ["float32"]:
                yield Finding(
                    f"{name}: the value of the hook's Future is {kinds}, expected a tensor in the "
                    "dtype of the buffer, float32.",
                    rank,
                )
                break
            eps = float(torch.finfo(DTYPES[name]).eps)
            for i in range(len(SHAPES)):
                local = [_weights(inputs, name)[i].double().numpy() for inputs in case.inputs]
                got, expected = answer.get(f"g/{name}/{i}"), np.mean(local, axis=0)
                if i == INF_IN and isinstance(got, np.ndarray) and got.shape == expected.shape:
                    *_, last = got.flat
                    if np.isfinite(last):
                        yield Finding(
                            f"{name}: a gradient that is inf on one rank has become {last:g}. The "
                            "mean is inf: the scaler has to see it.",
                            rank,
                        )
                        break
                    got, expected = got.ravel()[:-1], expected.ravel()[:-1]
                if not same(answer.get(f"dtype/{name}/{i}"), "float32"):
                    yield Finding(
                        f"{name}: gradient {i} has become {answer.get(f'dtype/{name}/{i}')}. "
                        "Only what travels is in 16 bits.",
                        rank,
                    )
                    break
                own = local[rank].ravel()[: expected.size].reshape(expected.shape)
                hint = _explain(got, expected, own, case.world_size) or (
                    "Is it the mean? And does each bucket have a 16-bit tensor of its own until "
                    "its all-reduce has ended?"
                )
                if wrong := differs(
                    rank,
                    f"{name}: gradient {i}",
                    got,
                    expected,
                    rtol=2 * eps,
                    atol=0.0,
                    hint=hint,
                ):
                    yield wrong
                    break
            else:
                many = answer.get(f"many/{name}")
                infinite = int(rank == case.world_size - 1)
                if isinstance(many, np.ndarray) and (~np.isfinite(many)).sum() > infinite:
                    yield Finding(
                        f"{name}: on {RANKS} ranks, each of which has this rank's gradients, the "
                        "sum overflows. What keeps it small has to follow the number of ranks.",
                        rank,
                    )


def _explain(got: Any, expected: np.ndarray, own: np.ndarray, world_size: int) -> str:
    if not isinstance(got, np.ndarray) or got.shape != expected.shape:
        return ""
    finite = np.isfinite(got)
    if not finite.any():
        return "No value is finite. Has what travels the dtype that make_compress_hook was given?"
    got, expected, own = got[finite], expected[finite], own[finite]
    if world_size > 1 and np.allclose(got, expected * world_size, rtol=0.02):
        return (
            f"That is {world_size} times the mean. Divide by WORLD_SIZE (LOCAL_WORLD_SIZE is 1 "
            "here: each rank is alone on its node)."
        )
    for divisor, how in ((1, ""), (world_size, f", divided by {world_size}")):
        if world_size > 1 and np.allclose(got, own / divisor, rtol=0.02):
            return (
                f"That is this rank's own gradient{how}: nothing was added up. Does the "
                "all-reduce take all ranks?"
            )
    if world_size != 2 and np.allclose(got, expected * world_size / 2, rtol=0.02):
        return "That is the sum divided by 2: is the number of ranks written into the code?"
    if not finite.all() and np.allclose(got, expected, rtol=0.02):
        return (
            "Where it is finite it is right: the sum over the ranks overflowed, the mean would not "
            "have. Divide before the all-reduce."
        )
    return ""


def judge_bytes(case: Case) -> Iterator[Finding]:
    """Every gradient travels once per step, in two bytes per element."""
    name = case.inputs[0]["names"][0]
    collectives = {c.key: c for c in case.trace.collectives}
    for rank, inputs in enumerate(case.inputs):
        issued = [
            collectives[e.key]
            for e in case.trace.events[rank]
            if e.kind == "issue" and e.key in collectives
        ]
        reduced = [c for c in issued if c.kind == "all_reduce" and "float" in c.dtype]
        others = {c.kind for c in issued if "float" in c.dtype} - {"all_reduce", "broadcast"}
        wide = [c for c in reduced if c.dtype not in FACTORS]  # `judge_mean` judges which dtype
        if others or wide:
            what = f"an all-reduce of {wide[0].dtype}" if wide else f"{sorted(others)[0]}"
            yield Finding(
                f"{name}: expected one all-reduce of {name} per bucket, saw {what}.", rank
            )
            continue
        reduced = [c for c in reduced if reaches_all(c, case.world_size)]
        sent = sum(c.nbytes for c in reduced)
        if not 0.9 * STEPS * NUMEL * 2 <= sent <= 1.1 * STEPS * NUMEL * 2:
            yield Finding(
                f"{name}: {sent} bytes of gradients were all-reduced over all ranks in {STEPS} "
                f"steps, expected {STEPS * NUMEL * 2}.",
                rank,
            )
        elif told(case.answers[rank], f"calls/{name}") != len(reduced):
            yield Finding(
                f"{name}: {len(reduced)} all-reduces for "
                f"{told(case.answers[rank], f'calls/{name}')} buckets; expected one for each.",
                rank,
            )
        elif not _carries(reduced, rank, inputs):
            yield Finding(
                f"{name}: what was all-reduced in the last step is not this rank's gradients.",
                rank,
            )


def _carries(reduced: list[Any], rank: int, inputs: Values) -> bool:
    """Whether the last step's payloads are this rank's gradients, divided by any number."""
    payloads = [
        np.asarray(c.payloads[rank], np.float64).ravel()
        for c in reduced
        if c.payloads.get(rank) is not None
    ]
    if not payloads:
        return False
    sent = np.sort(np.concatenate(payloads)[-NUMEL:])
    own = np.concatenate([inputs[f"w/{i}"].astype(np.float64).ravel() for i in range(len(SHAPES))])
    if len(sent) != NUMEL or not np.isfinite(sent).all():
        return False
    # Any divisor is accepted here; `judge_mean` checks the divisor.
    factor = np.abs(sent).sum() / np.abs(own).sum()
    eps = max(float(torch.finfo(DTYPES[c.dtype]).eps) for c in reduced)
    return factor > 0 and np.allclose(sent / factor, np.sort(own), rtol=4 * eps, atol=1e-4)
