"""Criteria for the training loop with mixed precision, judged step by step.

The loop gets the grader's scaler, so a mistake in the student's own scaler costs no points here.
Each criterion compares every recorded step with what it should do from where it began
(`expected_steps.py`). A criterion about a feature also records plain steps without it, and judges
only how the feature changes them: what is wrong in plain steps costs `amp_loop_fp16` alone.

Choices that the text leaves, all of which pass: one backward for each batch, or one for the step;
`no_sync` or not; losses or gradients divided by `accumulate`; clipped after `unscale_`, or scaled
gradients at a scaled threshold; `zero_grad` before each step, or before the first one and after
each, to zeros or to None; whether a step was taken learned from `step()` or from the scale; the
scheduler before or after `update()`; no autocast, or one that is off, in full precision.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autograder.criteria.common import oracle
from autograder.criteria.criterion import Case, Context, Draw, Values
from autograder.criteria.lab4_amp import expected_steps
from autograder.criteria.lab4_amp.recorded import LR, attempt, run

SIZES = (5, 8, 2)
BATCH = 4
TINY = 1e-7  # with this factor on the loss, the gradients underflow in fp16
HALF_RTOL = 0.05  # relative to the largest entry of a gradient; fp16 has 11 bits, bf16 has 8
BF16_RTOL = 0.2  # a step without the scaler is off by the scale, which is far more


# --- draw ----------------------------------------------------------------------------------------


def _draw(draw: Draw, runs: dict[str, Values]) -> list[Values]:
    """The same start on all ranks; for each run its settings, and private batches of its own.

    A run's "batches" is their number, "rows" the rows of each (all `BATCH` if left out).
    """
    start = oracle.draw_parameters(draw.shared("start"), SIZES)
    inputs = []
    for rank in range(draw.world_size):
        values = start | {"settings": runs}
        for name, settings in runs.items():
            rng = draw.shared(f"rank {rank} {name}")
            for n in range(settings["batches"]):
                rows = settings.get("rows", [BATCH] * settings["batches"])[n]
                batch = oracle.draw_batch(rng, rows, SIZES)
                values |= {f"x/{name}/{n}": batch["x"], f"y/{name}/{n}": batch["y"]}
        inputs.append(values)
    return inputs


def _scale(draw: Draw, low: int, high: int) -> float:
    return float(2 ** draw.shared("scale").integers(low, high))


def draw_fp16(draw: Draw) -> list[Values]:
    """A loss so small that its gradients underflow in fp16 without a large scale; and bf16."""
    settings = {"scale": _scale(draw, 15, 18), "batches": 5, "strict": True}
    tiny = {"dtype": "float16", "factor": TINY, "lr": LR / TINY}
    bf16 = {"dtype": "bfloat16", "batches": 2}
    return _draw(draw, {"bf16": settings | bf16, "main": settings | tiny})


def draw_update(draw: Draw) -> list[Values]:
    """The scale grows after every step, and the last step overflows, on one rank."""
    scale = _scale(draw, 4, 9)
    plain = {"scale": scale, "batches": 2}
    inputs = _draw(draw, {"plain": plain, "main": plain | {"batches": 6, "interval": 1}})
    _break(inputs, "main", 5, [int(draw.shared("where").integers(draw.world_size))])
    return inputs


def _break(inputs: list[Values], name: str, batch: int, ranks: list[int]) -> None:
    for rank in ranks:
        inputs[rank][f"y/{name}/{batch}"][0, 0] = np.inf


def draw_clip(draw: Draw) -> list[Values]:
    """Small and large gradients; max_norm lies between their norms, far below any scaled norm.

    In the run "zero" it is 0.
    """
    rng = draw.shared("clip")
    settings = {"scale": _scale(draw, 6, 11)}
    pair = settings | {"accumulate": 2}
    runs = {
        "plain": settings | {"batches": 2},
        "pair": pair | {"batches": 2},
        "zero": settings | {"batches": 2, "max_norm": 0.0},
        "one": settings | {"batches": 6},
        "two": pair | {"batches": 8},
    }
    inputs = _draw(draw, runs)
    sizes = {
        "one": rng.permutation([1, 1, 1, 0, 0, 0]),
        "two": np.concatenate([[(1, 1), (1, 0), (0, 1), (0, 0)][i] for i in rng.permutation(4)]),
    }
    norms: list[list[float]] = [[], []]
    case, at = Case(draw.world_size, inputs, []), _flat(inputs[0])
    for name, large in sizes.items():
        for n, is_large in enumerate(large):
            for values in inputs:
                values[f"y/{name}/{n}"] *= np.float32(9.0 if is_large else 0.3)
            norms[is_large].append(
                float(np.linalg.norm(expected_steps.gradient(case, name, [n], at)))
            )
    low, high = max(norms[0]), min(norms[1])
    for name in sizes:
        runs[name]["max_norm"] = low + 0.25 * (high - low)
    return inputs


def _flat(inputs: Values) -> np.ndarray:
    return np.concatenate([p.astype(np.float64).ravel() for p in oracle.parameters_of(inputs)])


def draw_skips(draw: Draw) -> list[Values]:
    """The loss overflows in some steps: the first, the last, two in a row; on one or more ranks.

    In the run "two", it overflows in the first batch of one step, and in the second of a different
    step; in the runs "bf16" and "limited", which has a max_norm, in the second step and on all
    ranks. In the run "limit" it never does, and parameters have gradients before the first step.
    """
    rng, last = draw.shared("skips"), draw.world_size - 1
    # The scale also grows, so a changed scale does not mean that a step was left out.
    settings = {"scale": _scale(draw, 9, 12), "scheduler": True, "clears": False, "interval": 2}
    pair = settings | {"accumulate": 2}
    tried, limit = settings | {"tried": True, "batches": 3}, {"max_norm": 1e6}
    runs = {"main": settings | {"batches": 9}, "two": pair | {"batches": 8}}
    others = {"bf16": tried | {"dtype": "bfloat16"}, "limit": tried | limit | {"old": True}}
    others |= {"limited": tried | limit}
    inputs = _draw(draw, runs | {"pair": pair | {"batches": 2}} | others)
    for name in ("bf16", "limited"):
        _break(inputs, name, 1, list(range(draw.world_size)))
    row = int(rng.integers(2, 6))
    some = sorted({0, last // 2, last} - {int(rng.integers(draw.world_size))}) or [0]
    for step, ranks in ((0, [0]), (row, [last]), (row + 1, some), (8, [last // 2])):
        _break(inputs, "main", step, ranks)
    first = int(rng.integers(2))
    for batch, rank in ((first, last), (4 + 1 - first, 0)):
        _break(inputs, "two", batch, [rank])
    return inputs


def draw_accumulates(draw: Draw) -> list[Values]:
    """Three steps of k batches, some longer than others; the scale grows after every step."""
    rng = draw.shared("k")
    k, scale = int(rng.integers(3, 5)), _scale(draw, 4, 9)
    plain = {"scale": scale, "interval": 1, "batches": 2}
    rows = [int(n) for _ in range(3) for n in rng.permutation([2, 3, 5, 7])[:k]]
    main = plain | {"accumulate": k, "batches": 3 * k, "rows": rows}
    return _draw(draw, {"plain": plain, "main": main})


# --- observe -------------------------------------------------------------------------------------


def observe(train_amp: Any, inputs: Values, context: Context) -> Values:
    """Trains in every run; "main" has to work, and so have other runs with one batch per step.

    An error in a run with several batches per step, or in one that is "tried", is an answer, too.
    """
    answer: Values = {}
    for name, settings in inputs["settings"].items():
        several = settings.get("accumulate", 1) > 1 and name != "main"
        tried = several or settings.get("tried")
        answer |= (attempt if tried else run)(train_amp, inputs, name, context)
    return answer
