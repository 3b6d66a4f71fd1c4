"""Criteria on number formats: what 16 bits lose, which scale is safe, which format to choose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab4_amp.scaler import same

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}
# |x| up to this limit becomes 0: half of the smallest subnormal number (a tie rounds to even, 0).
LOST_UP_TO = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150}
SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126}
EDGES = (1e-4, 2e-5, 1e-7, 6e-8, 3.1e-8, 2.9e-8, 1e-9)


# --- lost_share ----------------------------------------------------------------------------------


def draw_share(draw: Draw) -> list[Values]:
    """Numbers over many orders of magnitude, some of them 0, in several formats and scales."""
    rng = draw.shared("settings")
    settings = [
        {"dtype": "float16", "scale": 1.0},
        {"dtype": "float16", "scale": float(2 ** rng.integers(4, 8))},
        {"dtype": "float16", "scale": float(2 ** rng.integers(10, 14))},
        {"dtype": "bfloat16", "scale": 1.0},
        {"dtype": "float32", "scale": 1.0},
    ]
    settings = [settings[i] for i in rng.permutation(len(settings))]
    inputs = []
    for rank in range(draw.world_size):
        own = draw.private(rank)
        values: Values = {"settings": settings}
        for number in range(len(settings)):
            size = int(own.integers(150, 250))
            numbers = 10 ** own.uniform(-11, -2, size) * own.choice([-1.0, 1.0], size)
            numbers[: len(EDGES)] = EDGES
            numbers[own.choice(np.arange(len(EDGES), size), size // 6, replace=False)] = 0.0
            values[f"v{number}"] = numbers.astype(np.float32)
        values["zeros"] = np.zeros(3, dtype=np.float32)
        inputs.append(values)
    return inputs


def observe_share(lost_share: Any, inputs: Values, context: Context) -> Values:
    """The share that the function returns for each array, and for an array of zeros."""
    shares = []
    for number, setting in enumerate(inputs["settings"]):
        numbers = torch.from_numpy(inputs[f"v{number}"]).to(context.device)
        shares.append(float(lost_share(numbers, DTYPES[setting["dtype"]], scale=setting["scale"])))
    zeros = torch.from_numpy(inputs["zeros"]).to(context.device)
    return {"shares": shares, "zeros": float(lost_share(zeros, torch.float16))}


def judge_share(case: Case) -> Iterator[Finding]:
    """The share of the non-zero numbers that become 0."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        shares = answer.get("shares")
        for number, setting in enumerate(inputs["settings"]):
            values = np.abs(inputs[f"v{number}"].astype(np.float64))
            values = values[values > 0]
            scaled, dtype = values * setting["scale"], setting["dtype"]
            expected = float((scaled <= LOST_UP_TO[dtype]).mean())
            got = shares[number] if isinstance(shares, list) and number < len(shares) else None
            if not isinstance(got, float) or not abs(got - expected) <= 1e-6:
                hint = _explain_share(got, values, setting, len(inputs[f"v{number}"]))
                yield Finding(
                    f"{dtype}, scale {setting['scale']:g}: expected {expected:.4f}, "
                    f"got {got}.{hint}",
                    rank,
                )
                break
        if not same(answer.get("zeros"), 0.0):
            yield Finding(
                f"only zeros: expected 0.0, got {answer.get('zeros')}. There is nothing to lose.",
                rank,
            )


def _explain_share(got: Any, values: np.ndarray, setting: Values, size: int) -> str:
    if not isinstance(got, float):
        return ""
    scaled, dtype = values * setting["scale"], setting["dtype"]
    flushed = float((scaled < SMALLEST_NORMAL[dtype]).mean())
    early = float((values <= LOST_UP_TO[dtype]).mean())
    of_all = float((scaled <= LOST_UP_TO[dtype]).sum()) / size
    zeros = (float((scaled <= LOST_UP_TO[dtype]).sum()) + size - len(values)) / size
    for share, reason in (
        (flushed, " Subnormal numbers are not lost: fp16 goes on down to 6e-8."),
        (early, " Scale first, in the dtype that the numbers have, and round after that."),
        (of_all, " The share is of the numbers that were not 0 before."),
        (zeros, " Numbers that were 0 before are not lost."),
    ):
        if abs(got - share) <= 1e-6:
            return reason
    return ""


# --- safe_scale ----------------------------------------------------------------------------------


def draw_safe(draw: Draw) -> list[Values]:
    """Gradients whose largest entry is in one tensor of one rank and may be negative."""
    rng, world_size = draw.shared("settings"), draw.world_size
    names = ["float16", "float16", "bfloat16", "float16"]
    inputs: list[Values] = [{"dtypes": names} for _ in range(world_size)]
    for number, name in enumerate(names):
        # The exponent is never close to an integer, so rounding cannot change the right scale.
        # In one case the largest entry is beyond fp16 itself, so the right scale is below 1.
        low, high = (-4, -1) if number == 1 else (3, 14)
        exponent = int(rng.integers(low, high)) + float(rng.uniform(0.05, 0.95))
        largest = LARGEST[name] * 2.0**-exponent
        where, tensor = int(rng.integers(world_size)), int(rng.integers(3))
        for rank in range(world_size):
            own = draw.shared(f"rank {rank} case {number}")
            for i, shape in enumerate(((3, 4), (6,), (2, 2))):
                grad = largest * own.uniform(-1, 1, shape) * 0.2
                if rank == where and i == tensor:
                    grad.flat[int(own.integers(grad.size))] = largest * own.choice([-1.0, 1.0])
                if number == 2 and rank != where:
                    grad[:] = 0.0  # this rank's part of the gradient is zero
                inputs[rank][f"g{number}/{i}"] = grad.astype(np.float32)
    return inputs


def observe_safe(safe_scale: Any, inputs: Values, context: Context) -> Values:
    """The scale for every case."""
    scales, unchanged = [], True
    for number, name in enumerate(inputs["dtypes"]):
        arrays = [inputs[f"g{number}/{i}"] for i in range(3)]
        grads = [torch.from_numpy(array.copy()).to(context.device) for array in arrays]
        scales.append(float(safe_scale(grads, DTYPES[name])))
        unchanged &= all(
            np.array_equal(g.cpu().numpy(), a) for g, a in zip(grads, arrays, strict=True)
        )
    return {"scales": scales, "unchanged": unchanged}


def judge_safe(case: Case) -> Iterator[Finding]:
    """Every rank finds the largest power of two with which no entry of any rank overflows."""
    for rank, answer in enumerate(case.answers):
        if answer.get("unchanged") is not True:
            yield Finding("the gradients were changed.", rank)
    for number, name in enumerate(case.inputs[0]["dtypes"]):
        per_rank = [_largest(inputs, number) for inputs in case.inputs]
        expected = _power(name, max(per_rank))
        for rank, answer in enumerate(case.answers):
            scales = answer.get("scales")
            got = scales[number] if isinstance(scales, list) and number < len(scales) else None
            if isinstance(got, float) and math.isclose(got, expected, rel_tol=1e-6):
                continue
            hint = ""
            if per_rank[rank] > 0 and got == _power(name, per_rank[rank]):
                hint = " That is right for this rank alone: take the largest entry of all ranks."
            elif isinstance(got, float) and got > expected:
                hint = " With this scale an entry overflows. Did you look at absolute values?"
            elif isinstance(got, float) and got > 0 and math.log2(got) % 1:
                hint = " That is no power of two."
            yield Finding(
                f"{name}, largest entry {max(per_rank):.6g}: expected the scale {expected:g}, "
                f"got {got}.{hint}",
                rank,
            )


def _largest(inputs: Values, number: int) -> float:
    return max(float(np.abs(inputs[f"g{number}/{i}"]).max()) for i in range(3))


def _power(name: str, largest: float) -> float:
    return 2.0 ** math.floor(math.log2(LARGEST[name] / largest))


# --- choose_precision ----------------------------------------------------------------------------

CHOICES = {
    "all bf16": "every rank's device has bf16",
    "all bf16, large": "every rank's device has bf16; one rank has seen 1e6",
    "one without bf16": "one rank's device has no bf16; all have fp16",
    "none bf16": "no device has bf16; all have fp16",
    "large": "no device has bf16; all have fp16; one rank has seen more than fp16 can hold",
    "half large": "no device has bf16; all have fp16; one rank has seen 45,000",
    "one without fp16": "no device has bf16, and one has no fp16 either",
    "nothing": "no device has bf16 or fp16",
    "bf16 only": "every rank's device has bf16, none has fp16",
}
_FP16 = ("one without bf16", "none bf16")
_BF16 = ("all bf16", "all bf16, large", "bf16 only")


def draw_choice(draw: Draw) -> list[Values]:
    """Facts about each rank's device; in each case one rank may differ from all others."""
    rng, world_size = draw.shared("order"), draw.world_size
    order = [list(CHOICES)[i] for i in rng.permutation(len(CHOICES))]
    odd = [int(rng.integers(world_size)) for _ in order]
    inputs = []
    for rank in range(world_size):
        own = draw.private(rank)
        facts = []
        for kind, where in zip(order, odd, strict=True):
            largest = float(own.uniform(10, 20_000))
            has_bf16 = kind in _BF16 or (kind == "one without bf16" and rank != where)
            has_fp16 = kind not in ("nothing", "bf16 only")
            if rank == where:
                has_fp16 = has_fp16 and kind != "one without fp16"
                large = {"all bf16, large": 1e6, "large": 2e5, "half large": 45_000.0}
                largest = large.get(kind, largest)
            facts.append([has_bf16, has_fp16, largest])
        inputs.append({"order": order, "facts": facts})
    return inputs


def observe_choice(choose_precision: Any, inputs: Values, context: Context) -> Values:
    """The choice in every case."""
    choices = []
    for has_bf16, has_fp16, largest in inputs["facts"]:
        dtype, needs_scaler = choose_precision(has_bf16, has_fp16, float(largest), context.device)
        choices.append([str(dtype).removeprefix("torch."), bool(needs_scaler)])
    return {"choices": choices}


def judge_choice(case: Case) -> Iterator[Finding]:
    """bf16 if all ranks have it, else fp16 with a scaler if all ranks can use it, else neither."""
    for number, kind in enumerate(case.inputs[0]["order"]):
        expected = (
            ["bfloat16", False]
            if kind in _BF16
            else ["float16", True]
            if kind in _FP16
            else ["None", False]
        )
        if kind == "one without bf16" and case.world_size == 1:
            expected = ["float16", True]
        for rank, answer in enumerate(case.answers):
            choices = answer.get("choices")
            got = choices[number] if isinstance(choices, list) and number < len(choices) else None
            if got != expected:
                yield Finding(
                    f"{CHOICES[kind]}: expected (dtype, needs a scaler) = {expected}, got {got}. "
                    "All ranks have to choose alike, from the facts of all.",
                    rank,
                )
