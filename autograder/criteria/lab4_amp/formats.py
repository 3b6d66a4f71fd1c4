"""Criteria on number formats: what 16 bits lose, which scale is safe, which format to choose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from autograder.criteria.common.answers import described, item_of, short, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, named_ranks
from autograder.criteria.lab4_amp.scaler import same

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}
# |x| up to this limit becomes 0: half of the smallest subnormal number (a tie rounds to even, 0).
LOST_UP_TO = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150}
SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126}
EDGES = (1e-4, 2e-5, 1e-7, 6e-8, 3.1e-8, 2.9e-8, 1e-9)


# --- lost_share ----------------------------------------------------------------------------------


def draw_share(draw: Draw) -> list[Values]:
    """Numbers over many orders of magnitude, some of them 0, in several formats and scales.

    Among them are the largest number that is lost, and the next float32 above it.
    """
    rng = draw.shared("settings")
    settings = [
        {"dtype": "float16", "scale": 1.0},
        {"dtype": "float16", "scale": float(2 ** rng.integers(4, 8))},
        {"dtype": "float16", "scale": float(2 ** rng.integers(10, 14))},
        {"dtype": "float16", "scale": 2.0**30},  # many become inf, which is not lost
        {"dtype": "bfloat16", "scale": 1.0},
        {"dtype": "float32", "scale": 1.0},
        {"dtype": "bfloat16", "scale": 2.0**-120},  # some products are 0 in float32 already
    ]
    settings = [settings[i] for i in rng.permutation(len(settings))]
    inputs = []
    for rank in range(draw.world_size):
        own = draw.private(rank)
        values: Values = {"settings": settings}
        for number, setting in enumerate(settings):
            last = np.float32(LOST_UP_TO[setting["dtype"]] / setting["scale"])
            edges = [*EDGES, *([last, np.nextafter(last, np.float32(1))] if last else [])]
            size = 4 * int(own.integers(40, 60))
            numbers = 10 ** own.uniform(-11, -2, size) * own.choice([-1.0, 1.0], size)
            numbers[: len(edges)] = edges
            numbers[own.choice(np.arange(len(edges), size), size // 6, replace=False)] = 0.0
            values[f"v{number}"] = numbers.astype(np.float32).reshape(4, -1)
        values["zeros"] = np.zeros(3, dtype=np.float32)
        inputs.append(values)
    return inputs


def observe_share(lost_share: Any, inputs: Values, context: Context) -> Values:
    """The share that the function returns for each array, for zeros, and for no numbers."""
    shares = []
    for number, setting in enumerate(inputs["settings"]):
        numbers = torch.from_numpy(inputs[f"v{number}"].copy()).to(context.device)
        share = lost_share(numbers, DTYPES[setting["dtype"]], scale=setting["scale"])
        shares.append(described(share))
    zeros = torch.from_numpy(inputs["zeros"]).to(context.device)
    nothing = {"only zeros": zeros, "no numbers": zeros[:0]}
    return {"shares": shares} | {
        what: described(lost_share(numbers, torch.float16)) for what, numbers in nothing.items()
    }


def judge_share(case: Case) -> Iterator[Finding]:
    """The share of the non-zero numbers that become 0."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        shares = told(answer, "shares")
        for number, setting in enumerate(inputs["settings"]):
            values = np.abs(inputs[f"v{number}"])
            values = values[values > 0]
            expected = _share(values * np.float32(setting["scale"]), setting["dtype"])
            got = item_of(shares, number)
            if not isinstance(got, float) or not abs(got - expected) <= 1e-6:
                hint = _explain_share(got, values, setting, inputs[f"v{number}"].size)
                yield Finding(
                    f"{setting['dtype']}, scale {setting['scale']:g}: expected {expected:.4f}, "
                    f"got {short(got)}.{hint}",
                    rank,
                )
                break
        for what in ("only zeros", "no numbers"):
            if not same(answer.get(what), 0.0):
                yield Finding(
                    f"{what}: expected 0.0, got {answer.get(what)}. There is nothing to lose.",
                    rank,
                )


def _share(scaled: np.ndarray, dtype: str) -> float:
    return float((scaled.astype(np.float64) <= LOST_UP_TO[dtype]).mean())


def _explain_share(got: Any, values: np.ndarray, setting: Values, size: int) -> str:
    """Why a share is wrong, if that is known; `values` are absolute and not 0, in float32."""
    if not isinstance(got, float):
        return " A Python float is asked for."
    scale, dtype = setting["scale"], setting["dtype"]
    scaled = values * np.float32(scale)
    right = _share(scaled, dtype)
    if abs(got / 100 - right) < 1e-6:
        return " That is per cent; a number between 0 and 1 is asked for."
    flushed = float((scaled < SMALLEST_NORMAL[dtype]).mean())
    early = _share(values, dtype)
    of_all = right * len(values) / size
    zeros = (right * len(values) + size - len(values)) / size
    infinite = right + float((scaled > LARGEST.get(dtype, math.inf)).mean())
    below = float((scaled < LOST_UP_TO[dtype]).mean())
    still = _share(scaled[scaled > 0], dtype) if scaled.any() else 0.0
    for share, reason in (
        (flushed, " Subnormal numbers are not lost: fp16 goes on down to 6e-8."),
        (early, " Scale first, in the dtype that the numbers have, and round after that."),
        (of_all, " The share is of the numbers that were not 0 before."),
        (zeros, " Numbers that were 0 before are not lost."),
        (infinite, " What becomes inf is not lost."),
        (below, " Exactly half of the smallest number becomes 0 as well."),
        (still, " What becomes 0 already when it is scaled, in float32, is lost as well."),
    ):
        if abs(got - share) <= 1e-6:
            return reason
    return ""


# --- safe_scale ----------------------------------------------------------------------------------


def draw_safe(draw: Draw) -> list[Values]:
    """Gradients whose largest entry is in one tensor of one rank.

    The entry is just below, at, and just above what the next power of two allows, "just" being the
    next float32; on the first, middle and last rank and in each tensor; positive and negative; once
    beyond fp16 itself; and once so small that the scale is no float32. The first tensor is stored
    as its transpose. In each case some ranks have a tensor more than others. Over all cases, two or
    three ranks have equally many, so that code that reduces each tensor fails but does not hang.
    """
    rng, world_size = draw.shared("settings"), draw.world_size
    ranks = [0, world_size // 2, world_size - 1]
    ulp = 2.0**-23
    # (format, largest entry relative to what the scale 2^k allows, k, rank, tensor, sign).
    cases = [
        ("float16", 1 - ulp, int(rng.integers(3, 14)), 0, 2, -1.0),
        ("float16", 1.0, int(rng.integers(3, 14)), 2, 0, 1.0),
        ("float16", 1 + ulp, int(rng.integers(3, 14)), 1, 1, -1.0),  # below 2^16 / 2^k
        ("float16", float(rng.uniform(1.1, 1.9)), int(rng.integers(-4, -1)), 2, 2, 1.0),
        ("bfloat16", float(rng.uniform(0.6, 0.9)), int(rng.integers(180, 190)), 0, 1, -1.0),
        ("float16", float(rng.uniform(0.6, 0.9)), int(rng.integers(3, 14)), 1, 0, -1.0),
    ]
    alone = 4  # in this case all other ranks have zeros only
    order = [int(i) for i in rng.permutation(len(cases))]
    inputs: list[Values] = [{"dtypes": [cases[i][0] for i in order]} for _ in range(world_size)]
    for number, case in enumerate(order):
        name, relative, exponent, where, tensor, sign = cases[case]
        largest = LARGEST[name] * 2.0**-exponent * relative
        for rank in range(world_size):
            own = draw.shared(f"rank {rank} case {number}")
            shapes = [(3, 4), (6,), (2, 2)] + [(5,)] * ((number + rank) % world_size == 0)
            for i, shape in enumerate(shapes):
                grad = largest * own.uniform(-1, 1, shape) * 0.2
                if rank == ranks[where] and i == tensor:
                    grad.flat[int(own.integers(grad.size))] = largest * sign
                if case == alone and rank != ranks[where]:
                    grad[:] = 0.0
                inputs[rank][f"g{number}/{i}"] = grad.astype(np.float32)
    return inputs


def observe_safe(safe_scale: Any, inputs: Values, context: Context) -> Values:
    """The scale for every case."""
    scales, unchanged = [], True
    for number, name in enumerate(inputs["dtypes"]):
        arrays = _gradients(inputs, number)
        grads = [torch.from_numpy(array.copy()).to(context.device) for array in arrays]
        grads[0] = grads[0].t().contiguous().t()
        scales.append(described(safe_scale(grads, DTYPES[name])))
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
            got = item_of(told(answer, "scales"), number)
            if isinstance(got, float) and math.isclose(got, expected, rel_tol=1e-6):
                continue
            hint, everyone = "", [item_of(told(a, "scales"), number) for a in case.answers]
            apart = any(other != got for other in everyone)
            if not isinstance(got, float):
                hint = " A Python float is asked for."
            elif got == _power(name, _largest_positive(case.inputs, number)):
                hint = " Look at absolute values: the entry is negative."
            elif apart and per_rank[rank] > 0 and got == _power(name, per_rank[rank]):
                hint = " That is right for this rank alone: take the largest entry of all ranks."
            elif got > 0 and math.log2(got) % 1:
                hint = " That is no power of two."
            elif got > expected:
                hint = " With this scale the entry overflows."
            elif got < expected:
                hint = " With twice this scale nothing overflows yet."
                if max(per_rank) * expected == LARGEST[name]:
                    hint = " The largest number itself may be reached."
            if apart and len({len(_gradients(inputs, number)) for inputs in case.inputs}) > 1:
                hint += " (Ranks have different numbers of tensors here.)"
            yield Finding(
                f"{name}, largest entry {max(per_rank):.9g}: expected the scale {expected:g}, "
                f"got {short(got)}.{hint}",
                rank,
            )


def _gradients(inputs: Values, number: int) -> list[np.ndarray]:
    """The list of a case; ranks have different numbers of tensors."""
    names = (f"g{number}/{i}" for i in range(4))
    return [inputs[name] for name in names if name in inputs]


def _largest(inputs: Values, number: int) -> float:
    return max(float(np.abs(grad).max()) for grad in _gradients(inputs, number))


def _largest_positive(inputs: Sequence[Values], number: int) -> float:
    return max(float(grad.max()) for one in inputs for grad in _gradients(one, number))


def _power(name: str, largest: float) -> float:
    return 2.0 ** math.floor(math.log2(LARGEST[name] / largest))


# --- choose_precision ----------------------------------------------------------------------------

HALF_OF_FP16 = 32_752.0
JUST = 2.0**-9  # from HALF_OF_FP16 to the next float32: code must not round this away
BF16, FP16, NEITHER = ["bfloat16", False], ["float16", True], ["None", False]
# kind -> the choice, the facts of most ranks, and those of the odd ranks: (bf16, fp16, largest).
CHOICES: dict[str, tuple[list[Any], tuple[bool, bool, Any], tuple[bool, bool, Any]]] = {
    "every device has bf16": (BF16, (True, True, None), (True, True, None)),
    "every device has bf16, none has fp16": (BF16, (True, False, None), (True, False, None)),
    "every device has bf16; {} met 1e6": (BF16, (True, True, None), (True, True, 1e6)),
    "all have fp16, all but {} have bf16": (FP16, (True, True, None), (False, True, None)),
    "no device has bf16, all have fp16": (FP16, (False, True, None), (False, True, None)),
    "no device has bf16, all but {} have fp16": (
        NEITHER, (False, True, None), (False, False, None)
    ),
    "fp16 alone on {}, bf16 alone on the others": (
        NEITHER, (True, False, None), (False, True, None)
    ),
    "no device has bf16 or fp16": (NEITHER, (False, False, None), (False, False, None)),
    "no device has bf16; {} met 32752, half of fp16's largest number": (
        FP16, (False, True, None), (False, True, HALF_OF_FP16)
    ),
    "no device has bf16; {} met 32744, a bit less than half of fp16's largest number": (
        FP16, (False, True, None), (False, True, HALF_OF_FP16 - 8)
    ),
    "no device has bf16; {} met 32752.002, a bit more than half of fp16's largest number": (
        NEITHER, (False, True, None), (False, True, HALF_OF_FP16 + JUST)
    ),
    "no device has bf16; {} met 2e5": (NEITHER, (False, True, None), (False, True, 2e5)),
}  # fmt: skip  # one case is one entry, read from left to right; the formatter spreads it


def draw_choice(draw: Draw) -> list[Values]:
    """Each kind with the first, the middle or the last rank as the odd one, and with two odd."""
    rng, n = draw.shared("order"), draw.world_size
    odd_ranks = {(0,), (n // 2,), (n - 1,), tuple(sorted({0, n - 1}))}
    calls = [
        (kind, list(odd))
        for kind in CHOICES
        for odd in (sorted(odd_ranks) if "{}" in kind else [(0,)])
        if len(odd) < n or "the others" not in kind
    ]
    calls = [calls[i] for i in rng.permutation(len(calls))]
    inputs = []
    for rank in range(n):
        own, facts = draw.private(rank), []
        for kind, odd in calls:
            has_bf16, has_fp16, largest = CHOICES[kind][2 if rank in odd else 1]
            small = float(own.uniform(10, 20_000))
            facts.append([has_bf16, has_fp16, small if largest is None else largest])
        inputs.append({"calls": [list(call) for call in calls], "facts": facts})
    return inputs


def observe_choice(choose_precision: Any, inputs: Values, context: Context) -> Values:
    """The choice in every case."""
    choices = []
    for has_bf16, has_fp16, largest in inputs["facts"]:
        choice = choose_precision(has_bf16, has_fp16, float(largest), context.device)
        if isinstance(choice, tuple | list) and len(choice) == 2:
            choices.append([str(choice[0]).removeprefix("torch."), bool(choice[1])])
        else:
            choices.append(described(choice))
    return {"choices": choices}


def judge_choice(case: Case) -> Iterator[Finding]:
    """bf16 if all ranks have it, else fp16 with a scaler if all ranks can use it, else neither."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, (kind, odd) in enumerate(inputs["calls"]):
            expected, got = CHOICES[kind][0], item_of(told(answer, "choices"), number)
            if got != expected:
                everyone = [item_of(told(a, "choices"), number) for a in case.answers]
                alone = any(choice != got for choice in everyone) or same(
                    told(answer, "choices"), [_choice_by(*f) for f in case.inputs[0]["facts"]]
                )
                yield Finding(
                    f"{kind.format(named_ranks(odd))}: expected (dtype, needs a scaler) = "
                    f"{_shown(expected)}, got {_shown(got)}."
                    + (" All ranks have to choose alike, from the facts of all." if alone else ""),
                    rank,
                )
                break


def _choice_by(has_bf16: bool, has_fp16: bool, largest: float) -> list[Any]:
    """What the facts of a single rank would decide."""
    if has_bf16:
        return BF16
    return FP16 if has_fp16 and largest <= HALF_OF_FP16 else NEITHER


def _shown(choice: Any) -> str:
    return f"({choice[0]}, {choice[1]})" if isinstance(choice, list) else str(choice)
