"""Criterion for all kinds of schedules, on real ranks: a send that no rank receives blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.bonus_pipeline import parts
from autograder.criteria.bonus_pipeline.plan import (
    BACKWARD,
    FORWARD,
    gpipe_of,
    one_f_one_b_everywhere,
)
from autograder.criteria.bonus_pipeline.values import everywhere, name_of
from autograder.criteria.common.answers import is_floats
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

ATOL = 1e-3  # of the sum of a micro-batch's numbers, which differs by far more


def draw_orders(draw: Draw) -> list[Values]:
    """1F1B, GPipe backward in reverse order, one micro-batch at a time, a random order, a mixture.

    In the mixture the first ranks do GPipe and the others 1F1B: gradients for the first ranks are
    long on their way, since those ranks receive none before their last forward. At last one
    micro-batch at a time again, not by their numbers, and no two of the same size.
    """
    rng, n = draw.shared(), draw.world_size
    inputs = parts.draw_stages(draw, parts.draw_widths(draw, equal=True))
    size, m = int(rng.integers(2, 5)), n + 2
    parts.add_case(inputs, draw, one_f_one_b_everywhere(n, m), [size] * m)
    back = gpipe_of(m)[:m] + gpipe_of(m)[m:][::-1]
    parts.add_case(inputs, draw, everywhere(draw, back), [size] * m)
    naive = [(what, i) for i in range(m) for what in (FORWARD, BACKWARD)]
    parts.add_case(inputs, draw, everywhere(draw, naive), [size] * m)
    forwards, backwards = (rng.permutation(m).tolist() for _ in range(2))
    if forwards == sorted(forwards):
        forwards.reverse()
    mixed = [(FORWARD, i) for i in forwards] + [(BACKWARD, i) for i in backwards]
    parts.add_case(inputs, draw, everywhere(draw, mixed), [size] * m)
    m = 4 * n
    mixture = [gpipe_of(m)] * (n // 2) + one_f_one_b_everywhere(n, m)[n // 2 :]
    parts.add_case(inputs, draw, mixture, [size] * m)
    sizes = [1 + int(i) for i in rng.permutation(n + 2)]
    alone = [
        (what, (i + 1) % len(sizes)) for i in range(len(sizes)) for what in (FORWARD, BACKWARD)
    ]
    parts.add_case(inputs, draw, everywhere(draw, alone), sizes)
    return inputs


class _Watched(nn.Module):
    """A stage that notes the input of each of its passes, by the sum of the input's numbers.

    Gradients do not show this: they are right if all ranks take the same wrong micro-batch.
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.passes: dict[str, list[float]] = {FORWARD: [], BACKWARD: []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One micro-batch."""
        name = x.detach().double().sum().item()
        self.passes[FORWARD].append(name)
        y = self.stage(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.passes[BACKWARD].append(name))
        return y


def observe_orders(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """The gradients on this rank after each call, and in which order its passes were."""
    answer: Values = {}
    for number in range(len(inputs["cases"])):
        stage = _Watched(parts.make_stage(inputs, context))
        run_pipeline(*parts.arguments(stage, inputs, context, number))
        answer |= parts.gradients_of(stage, number)
        answer |= {f"{k}/{number}": np.array(v) for k, v in stage.passes.items()}
    return answer


def judge_orders(case: Case) -> list[Finding]:
    """The gradients are right, and every rank takes the micro-batches that its schedule names.

    Forwards and backwards are compared separately: `pipe_limit` judges how they alternate. The
    gradients of micro-batches of different sizes are left to `pipe_uneven`.
    """
    for number, each in enumerate(case.inputs[0]["cases"]):
        _, expected = parts.solve(case, number)
        what = name_of(case, number)
        wrong = parts.judge_direction(case, number, what, expected, one_factor=False)
        orders = list(_other_order(case, number))
        if wrong and any(not took for _, _, took, _ in orders):
            return wrong  # a pass is missing: `wrong` says more
        sums = "are wrong" if wrong else "are right all the same, added up over the batch"
        findings = [
            Finding(
                f"{what}: the {kind} passes took the micro-batches {' '.join(took) or '(none)'}"
                f"{' (? is none of them)' * ('?' in took)}, expected {' '.join(right)}. The "
                f"gradients {sums}.",
                rank,
            )
            for rank, kind, took, right in orders
        ] or [
            Finding(f"{f.message} Each pass took the micro-batch that the list names.", f.rank)
            for f in wrong
            if len(set(each["sizes"])) == 1
        ]
        if findings:
            return findings
    return []


def _other_order(case: Case, number: int) -> Iterator[tuple[int, str, list[str], list[str]]]:
    """Ranks whose passes took other micro-batches than their schedule names: took, expected.

    "?" is an input that is no micro-batch.
    """
    h, _ = parts.batch_of(case, number)
    for rank, stage in enumerate(parts.stages_of(case)):
        each = case.inputs[rank]["cases"][number]
        sums = np.array([part.sum().item() for part in h.split(each["sizes"])])
        for kind in (FORWARD, BACKWARD):
            right = [i for k, i in each["schedule"] if k == kind]
            got = case.answers[rank].get(f"{kind}/{number}")
            # Repeated passes (recomputation, to keep less) do not count.
            first = _first(got) if is_floats(got) and got.ndim == 1 else np.zeros(0)
            if (
                first.shape == (len(right),)
                and np.abs(first - sums[right]).max(initial=0.0) <= ATOL
            ):
                continue
            took = [_number_of(value, sums) for value in first[:24]]
            yield rank, kind, took, [str(i) for i in right]
            if kind == FORWARD:
                return  # the next ranks then get wrong micro-batches, too
            break
        with torch.no_grad():
            h = stage(h)


def _number_of(value: float, sums: np.ndarray) -> str:
    """The micro-batch whose numbers have this sum."""
    near = np.flatnonzero(np.abs(sums - value) <= ATOL)
    return str(near[0]) if len(near) else "?"


def _first(values: np.ndarray) -> np.ndarray:
    return values[np.sort(np.unique(values, return_index=True)[1])]
