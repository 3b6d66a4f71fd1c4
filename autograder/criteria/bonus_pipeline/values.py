"""Criteria for what a pipeline computes: the gradients and the loss of the whole batch.

The first two criteria run on real ranks, where a send that no rank receives blocks. The others run
on the emulated cluster, where the other ranks stop waiting at once if a rank fails.
"""

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
    Step,
    gpipe_of,
    one_f_one_b_of,
)
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import item_of
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values


def _everywhere(draw: Draw, steps: list[Step]) -> list[list[Step]]:
    return [steps] * draw.world_size


def _one_f_one_b(draw: Draw, m: int) -> list[list[Step]]:
    return [one_f_one_b_of(rank, draw.world_size, m) for rank in range(draw.world_size)]


# --- gradients -----------------------------------------------------------------------------------


def draw_gradients(draw: Draw) -> list[Values]:
    """GPipe: one micro-batch, fewer than stages, more, and a number not divisible by the stages."""
    rng, n = draw.shared(), draw.world_size
    inputs = parts.draw_stages(draw, parts.draw_widths(draw))
    for m in (n + 1, max(1, n - 1), 1, 2 * n + 1):
        size = int(rng.integers(2, 5))
        parts.add_case(inputs, draw, _everywhere(draw, gpipe_of(m)), [size] * m)
    return inputs


def draw_orders(draw: Draw) -> list[Values]:
    """1F1B, GPipe with backwards in reverse order, one micro-batch at a time, a random order."""
    rng, n = draw.shared(), draw.world_size
    inputs = parts.draw_stages(draw, parts.draw_widths(draw, equal=True))
    size, m = int(rng.integers(2, 5)), n + 2
    parts.add_case(inputs, draw, _one_f_one_b(draw, m), [size] * m)
    back = gpipe_of(m)[:m] + gpipe_of(m)[m:][::-1]
    parts.add_case(inputs, draw, _everywhere(draw, back), [size] * m)
    naive = [(what, i) for i in range(m) for what in (FORWARD, BACKWARD)]
    parts.add_case(inputs, draw, _everywhere(draw, naive), [size] * m)
    forwards, backwards = (rng.permutation(m).tolist() for _ in range(2))
    if forwards == sorted(forwards):
        forwards.reverse()
    mixed = [(FORWARD, i) for i in forwards] + [(BACKWARD, i) for i in backwards]
    parts.add_case(inputs, draw, _everywhere(draw, mixed), [size] * m)
    return inputs


def observe_gradients(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """The gradients on this rank after a call that starts without gradients."""
    answer: Values = {}
    for number in range(len(inputs["cases"])):
        stage = parts.make_stage(inputs, context)
        run_pipeline(*parts.arguments(stage, inputs, context, number))
        answer |= parts.gradients_of(stage, number)
    return answer


def judge_gradients(case: Case) -> list[Finding]:
    """The gradients are those of the whole batch in one process, up to a common factor."""
    for number, each in enumerate(case.inputs[0]["cases"]):
        _, expected = parts.solve(case, number)
        what = f"{case.world_size} stages, {len(each['sizes'])} micro-batches"
        if case.inputs[-1]["cases"][number]["schedule"] != each["schedule"]:
            what += ", 1F1B"
        else:
            what += ", in the order " + " ".join(
                f"{kind[0].upper()}{i}" for kind, i in each["schedule"][:24]
            )
        if findings := parts.judge_direction(case, number, what, expected):
            return findings
    return []


# --- the loss and its factor ---------------------------------------------------------------------


def draw_scale(draw: Draw) -> list[Values]:
    """Micro-batches of equal size: 3 of them, and 3 more than stages."""
    rng = draw.shared()
    inputs = parts.draw_stages(draw, parts.draw_widths(draw, equal=True))
    for m in (3, draw.world_size + 3):
        parts.add_case(inputs, draw, _everywhere(draw, gpipe_of(m)), [int(rng.integers(2, 5))] * m)
    return inputs


def draw_uneven(draw: Draw) -> list[Values]:
    """Micro-batches of different sizes; a sample's target is repeated, as often as drawn."""
    rng = draw.shared()
    inputs = parts.draw_stages(draw, parts.draw_widths(draw, equal=True))
    sizes = [int(s) for s in rng.permutation([1, 2, 4, 7])]
    parts.add_case(inputs, draw, _everywhere(draw, gpipe_of(len(sizes))), sizes)
    repeats = [int(r) for r in rng.permutation([1, 2, 3, 5])]
    for values in inputs:
        values["cases"][0]["repeats"] = repeats
    return inputs


def judge_scale(case: Case) -> list[Finding]:
    """The last stage's gradients are those of the mean loss, not a multiple of them."""
    last = case.world_size - 1
    for number, each in enumerate(case.inputs[0]["cases"]):
        m = len(each["sizes"])
        expected = parts.solve(case, number)[1][last]
        grads = parts.vector(case.answers[last].get(f"g/{number}"), expected)
        if grads is None:
            return [Finding("no finite gradients came back.", last)]
        factor = parts.scale_of(grads, expected)
        if abs(factor - 1) > parts.RTOL:
            why = ""
            if abs(factor - m) < parts.RTOL * m:
                why = f" Each micro-batch counts 1 / {m} of the batch: divide its loss by M."
            elif abs(factor - 1 / m) < parts.RTOL / m:
                why = " The loss was divided by M twice."
            elif abs(factor * case.world_size - m) < parts.RTOL * m:
                why = " They were divided by the number of stages instead of micro-batches."
            return [
                Finding(
                    f"{m} micro-batches: the gradients are {factor:.6g} times those of the batch's "
                    f"mean loss.{why}",
                    last,
                )
            ]
    return []


def judge_uneven(case: Case) -> list[Finding]:
    """The weight of a micro-batch is proportional to its number of samples."""
    last = case.world_size - 1
    sizes = case.inputs[0]["cases"][0]["sizes"]
    expected = parts.solve(case, 0)[1][last]
    grads = parts.vector(case.answers[last].get("g/0"), expected)
    if grads is None:
        return [Finding("no finite gradients came back.", last)]
    off = np.abs(grads - parts.scale_of(grads, expected) * expected).max()
    if not grads.any() or off > parts.RTOL * np.abs(grads).max():
        return [
            Finding(
                f"micro-batches of {sizes} samples: the gradients do not have the direction of the "
                "batch's. A micro-batch of n out of N samples counts n / N, not 1 / M.",
                last,
            )
        ]
    return []


def observe_loss(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """The losses that `run_pipeline` returns on this rank."""
    losses = []
    for number in range(len(inputs["cases"])):
        stage = parts.make_stage(inputs, context)
        loss = run_pipeline(*parts.arguments(stage, inputs, context, number))
        losses.append(parts.read_loss(loss))
    return {"losses": losses}


def judge_loss(case: Case) -> list[Finding]:
    """Every rank returns the mean loss over the batch."""
    findings: list[Finding] = []
    for number, each in enumerate(case.inputs[0]["cases"]):
        right, m = parts.solve(case, number)[0], len(each["sizes"])
        for rank, answer in enumerate(case.answers):
            losses = answer.get("losses")
            got = item_of(losses, number)
            if type(got) is float and abs(got - right) <= 1e-5 * abs(right):
                continue
            why = ""
            if got is None or got == 0:
                why = " Only the last rank knows it: let it tell the others."
            elif type(got) is float and abs(got - m * right) < 1e-5 * m * right:
                why = " That is the sum over micro-batches, not their mean."
            findings.append(
                Finding(
                    f"{m} micro-batches: the loss of the batch is {right:.6g}, returned was "
                    f"{got if got is None else str(got)[:20]}.{why}",
                    rank,
                )
            )
        if findings:
            break
    return findings


# --- gradients from before the call --------------------------------------------------------------


def draw_accumulate(draw: Draw) -> list[Values]:
    """One call, and gradients that exist before it."""
    inputs = parts.draw_stages(draw, parts.draw_widths(draw, equal=True))
    m = draw.world_size + 1
    parts.add_case(inputs, draw, _everywhere(draw, gpipe_of(m)), [3] * m)
    for rank, values in enumerate(inputs):
        rng = draw.private(rank)
        values |= {
            f"before/{k}": rng.normal(size=values[k].shape).astype(np.float32) for k in ("w", "b")
        }
    return inputs


def observe_accumulate(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """The gradients after a call that starts with existing gradients."""
    stage = parts.make_stage(inputs, context)
    for p, name in ((stage.weight, "w"), (stage.bias, "b")):
        p.grad = torch.from_numpy(inputs[f"before/{name}"].copy()).to(p)
    run_pipeline(*parts.arguments(stage, inputs, context, 0))
    return parts.gradients_of(stage, 0)


def judge_accumulate(case: Case) -> Iterator[Finding]:
    """The old gradients are still included, and on the last rank the batch's gradients are added.

    As in `judge_scale`, the added gradients are judged on the last rank only: other criteria check
    whether gradients reach the earlier stages.
    """
    _, expected = parts.solve(case, 0)
    for rank, answer in enumerate(case.answers):
        values = case.inputs[rank]
        before = np.concatenate([values[f"before/{k}"].ravel() for k in ("w", "b")])
        grads = parts.vector(answer.get("g/0"), before)
        if grads is None:
            yield Finding("no finite gradients came back.", rank)
            continue
        # The component of `before` that is orthogonal to the new gradients.
        along = expected[rank] / np.linalg.norm(expected[rank])
        rest = before - (before @ along) * along
        share = float(grads @ rest / (rest @ rest))
        if abs(share - 1) > parts.RTOL:
            yield Finding(
                f"of the gradients that were there before the call, {share:.2g} times are there "
                "after it: expected 1. run_pipeline adds to .grad; who calls it decides when to "
                "clear.",
                rank,
            )
        elif rank == case.world_size - 1:
            added = grads - before
            factor = parts.scale_of(added, expected[rank])
            off = np.abs(added - factor * expected[rank]).max()
            # The rounding error comes from `before`, which may be far larger than what was added.
            if not 1e-6 < factor < 1e6 or off > parts.RTOL * np.abs(grads).max():
                yield Finding(
                    "gradients were there before the call, and what it has added to them does not "
                    "have the direction of the batch's gradients.",
                    rank,
                )


# --- tokens --------------------------------------------------------------------------------------

VOCABULARY, TOKENS = 11, 3


def draw_tokens(draw: Draw) -> list[Values]:
    """Integers (int32) for an embedding in the first stage; float64 between the stages."""
    n = draw.world_size
    inputs = parts.draw_stages(draw, [VOCABULARY] * (n + 1))
    m = n + 1
    parts.add_case(inputs, draw, _everywhere(draw, gpipe_of(m)), [2] * m)
    rng = draw.shared("tokens")
    shape = (2 * m, TOKENS)
    inputs[0]["x/0"] = rng.integers(0, VOCABULARY, shape, dtype=np.int32)
    inputs[-1]["y/0"] = rng.integers(0, VOCABULARY, shape)
    return inputs


class _TokenStage(nn.Module):
    """An embedding on the first rank, which is frozen, and a linear layer on each; in float64."""

    def __init__(self, values: Values, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.linear = parts.Stage(values["w"], values["b"], is_last)
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY).double() if is_first else None
        if self.embedding is not None:
            with torch.no_grad():
                eye = torch.eye(VOCABULARY, dtype=torch.float64)
                self.embedding.weight.copy_(eye + 0.1 * eye.roll(1, 0))
            self.embedding.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x if self.embedding is None else self.embedding(x))


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def observe_tokens(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """The gradients of a stage; the first stage has an embedding."""
    is_last = context.rank == context.world_size - 1
    stage = _TokenStage(inputs, context.rank == 0, is_last).to(context.device)
    given = list(parts.arguments(stage, inputs, context, 0))
    sizes, width = inputs["cases"][0]["sizes"], inputs["w"].shape[1]

    def buffer(i: int) -> torch.Tensor:
        return torch.zeros(sizes[i], TOKENS, width, dtype=torch.float64, device=context.device)

    given[4:] = [_token_loss, None if context.rank == 0 else buffer]
    run_pipeline(*given)
    return parts.gradients_of(stage, 0)


def judge_tokens(case: Case) -> list[Finding]:
    """The gradients are those of one process in float64, up to a common factor."""
    n = case.world_size
    stages = [
        _TokenStage(values, rank == 0, rank == n - 1) for rank, values in enumerate(case.inputs)
    ]
    h = torch.from_numpy(case.inputs[0]["x/0"])
    for stage in stages:
        h = stage(h)
    _token_loss(h, torch.from_numpy(case.inputs[-1]["y/0"])).backward()
    expected = [parts.gradients_of(stage, 0)["g/0"] for stage in stages]
    return parts.judge_direction(
        case, 0, "tokens in, an embedding in the first stage", expected, oracle.RTOL["float64"]
    )


# --- training ------------------------------------------------------------------------------------

STEPS, LR = 4, 0.3


def draw_train(draw: Draw) -> list[Values]:
    """Several steps, each with a batch of its own."""
    inputs = parts.draw_stages(draw, parts.draw_widths(draw, equal=True))
    m = draw.world_size + 2
    for _ in range(STEPS):
        parts.add_case(inputs, draw, _everywhere(draw, gpipe_of(m)), [3] * m)
    return inputs


def _optimizer(stage: nn.Module) -> torch.optim.Optimizer:
    """SGD with steps of length LR, whatever factor the gradients have: `pipe_scale` checks it."""
    optimizer = torch.optim.SGD(stage.parameters(), lr=LR)

    def normalise(*_: Any) -> None:
        grads = [p.grad for p in stage.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads).clamp(min=1e-30)
        for grad in grads:
            grad /= norm

    optimizer.register_step_pre_hook(normalise)
    return optimizer


def observe_train(train_step: Any, inputs: Values, context: Context) -> Values:
    """The parameters after a few steps."""
    stage = parts.make_stage(inputs, context)
    optimizer = _optimizer(stage)
    for number in range(STEPS):
        given = parts.arguments(stage, inputs, context, number)
        train_step(given[0], optimizer, *given[1:])
    return {f"p{i}": p.detach().cpu().numpy().copy() for i, p in enumerate(stage.parameters())}


def judge_train(case: Case) -> Iterator[Finding]:
    """The parameters are those of one process that takes the same steps."""
    stages = parts.stages_of(case)
    optimizers = [_optimizer(stage) for stage in stages]
    for number in range(STEPS):
        stages.zero_grad()
        x, y = parts.batch_of(case, number)
        oracle.mse(stages(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    for rank, answer in enumerate(case.answers):
        for i, p in enumerate(stages[rank].parameters()):
            got = answer.get(f"p{i}")
            start = case.inputs[rank]["wb"[i]]
            hint = "One step of the optimizer per batch, from that batch's gradients only."
            if isinstance(got, np.ndarray) and np.array_equal(got, start):
                hint = "They have not changed."
            right = p.detach().numpy()
            if wrong := oracle.differs(
                rank, f"parameter {i} after {STEPS} steps", got, right, hint=hint
            ):
                yield wrong
                break
