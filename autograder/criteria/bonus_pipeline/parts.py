"""What the criteria of a pipeline share: stages, micro-batches, a call's arguments, the oracle."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.bonus_pipeline.plan import Step
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

# Ranks compute in float32; one criterion has float64. The oracle computes in float64.
RTOL = oracle.RTOL["float32"]


class Stage(nn.Module):
    """tanh(W x + b) in float64, without the tanh on the last rank."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray, is_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(weight).double())
        self.bias = nn.Parameter(torch.from_numpy(bias).double())
        self.is_last = is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One micro-batch."""
        y = nn.functional.linear(x, self.weight, self.bias)
        return y if self.is_last else torch.tanh(y)


def draw_stages(draw: Draw, widths: list[int]) -> list[Values]:
    """Per rank the parameters of its stage; widths[r] goes in, widths[r + 1] comes out."""
    rng, inputs = draw.shared("weights"), []
    for fan_in, fan_out in pairwise(widths):
        inputs.append(
            {
                "w": rng.normal(0, fan_in**-0.5, (fan_out, fan_in)).astype(np.float32),
                "b": rng.normal(0, 0.3, fan_out).astype(np.float32),
            }
        )
    return inputs


def draw_widths(draw: Draw, *, equal: bool = False) -> list[int]:
    """The width of the input, and the width after each stage.

    Unless they are `equal`, neighbours have different widths. So code that takes one width for the
    other fails only the criterion with different widths.
    """
    widths = draw.shared("widths").integers(2, 6, draw.world_size + 1) + 2 * equal
    if equal:
        return [int(widths[0])] * len(widths)
    return [2 * int(w) + i % 2 for i, w in enumerate(widths)]


def add_case(
    inputs: list[Values], draw: Draw, schedules: list[list[Step]], sizes: list[int]
) -> None:
    """Adds a call: a schedule per rank, samples per micro-batch, x on rank 0, y on the last."""
    number = len(inputs[0].setdefault("cases", []))
    last = len(inputs) - 1
    for rank, values in enumerate(inputs):
        steps = [list(step) for step in schedules[rank]]
        values.setdefault("cases", []).append({"schedule": steps, "sizes": sizes})
    rng = draw.shared(f"data {number}")
    count = sum(sizes)
    for rank, name, axis in ((0, "x", 1), (last, "y", 0)):
        shape = (count, inputs[rank]["w"].shape[axis])
        inputs[rank][f"{name}/{number}"] = rng.normal(size=shape).astype(np.float32)


def make_stage(inputs: Values, context: Context) -> Stage:
    """This rank's stage, in float32."""
    is_last = context.rank == context.world_size - 1
    return Stage(inputs["w"], inputs["b"], is_last).to(context.device, torch.float32)


def add_old_gradients(inputs: list[Values], draw: Draw, scale: float = 1.0) -> None:
    """Draws the gradients that each rank has before a call."""
    for rank, values in enumerate(inputs):
        rng = draw.private(rank)
        values |= {
            f"before/{k}": rng.normal(0, scale, values[k].shape).astype(np.float32) for k in "wb"
        }


def set_old_gradients(stage: Any, inputs: Values) -> None:
    """Gives the stage the gradients that `add_old_gradients` has drawn."""
    for p, name in ((stage.weight, "w"), (stage.bias, "b")):
        p.grad = torch.from_numpy(inputs[f"before/{name}"].copy()).to(p)


def arguments(stage: Any, inputs: Values, context: Context, number: int) -> tuple[Any, ...]:
    """The arguments of `run_pipeline` in case `number`."""
    case = inputs["cases"][number]
    schedule = [(what, i) for what, i in case["schedule"]]
    sizes, width = case["sizes"], inputs["w"].shape[1]

    def cut(name: str) -> list[torch.Tensor] | None:
        if f"{name}/{number}" not in inputs:
            return None
        whole = torch.from_numpy(inputs[f"{name}/{number}"].copy()).to(context.device)
        return list(whole.split(sizes))

    def buffer(i: int) -> torch.Tensor:
        return torch.full((sizes[i], width), 1e3, device=context.device)

    targets, loss_fn = cut("y"), oracle.mse
    if targets is not None and "repeats" in case:
        pairs = zip(targets, case["repeats"], strict=True)
        targets = [target.repeat_interleave(r, 1).unflatten(1, (-1, r)) for target, r in pairs]
        loss_fn = _mse_of_repeats
    return stage, schedule, cut("x"), targets, loss_fn, None if context.rank == 0 else buffer


def _mse_of_repeats(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`oracle.mse` of [n, width] and [n, width, repeats], in which each number is repeated.

    So the numbers per sample differ between micro-batches. Arguments in the wrong order change
    nothing here, as in `oracle.mse`: they cost `pipe_tokens`.
    """
    if output.dim() > target.dim():
        output, target = target, output
    return oracle.mse(output.unsqueeze(-1).expand_as(target), target)


def gradients_of(stage: nn.Module, number: int) -> Values:
    """Gradients of all parameters, flat, in one array."""
    grads = [oracle.grad_of(p).astype(np.float64).ravel() for p in stage.parameters()]
    return {f"g/{number}": np.concatenate(grads)}


def read_loss(loss: Any) -> float | str:
    """The number in a tensor of one real number; for anything else what it is, in words."""
    if not isinstance(loss, torch.Tensor):
        return "nothing (None)" if loss is None else f"a {type(loss).__name__[:20]}, not a tensor"
    if loss.numel() != 1 or loss.is_complex():
        return f"a tensor of {loss.numel()} numbers"
    return float(loss.item())


# --- the oracle ----------------------------------------------------------------------------------


def stages_of(case: Case) -> nn.Sequential:
    """The stages of all ranks, in float64."""
    last = case.world_size - 1
    return nn.Sequential(
        *(Stage(values["w"], values["b"], r == last) for r, values in enumerate(case.inputs))
    )


def batch_of(case: Case, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target of the whole batch in float64."""
    x, y = case.inputs[0][f"x/{number}"], case.inputs[-1][f"y/{number}"]
    return torch.from_numpy(x).double(), torch.from_numpy(y).double()


def solve(case: Case, number: int) -> tuple[float, list[np.ndarray]]:
    """Loss of the whole batch and each stage's flat gradient, computed in one process."""
    stages, (x, y) = stages_of(case), batch_of(case, number)
    loss = oracle.mse(stages(x), y)
    loss.backward()
    return loss.item(), [gradients_of(stage, 0)["g/0"] for stage in stages]


def vector(value: Any, like: np.ndarray) -> np.ndarray | None:
    """`value` as float64 if it is a finite array of `like`'s shape."""
    if not is_floats(value, like.shape):
        return None
    value = value.astype(np.float64)
    return value if np.isfinite(value).all() and np.abs(value).max(initial=0) < 1e30 else None


def scale_of(got: np.ndarray, expected: np.ndarray) -> float:
    """The factor s that makes s * expected closest to `got`."""
    return float(got @ expected / max(float(expected @ expected), 1e-300))


def judge_direction(
    case: Case,
    number: int,
    what: str,
    expected: list[np.ndarray],
    rtol: float = RTOL,
    *,
    one_factor: bool = True,
) -> list[Finding]:
    """Every rank's gradients are right up to one common factor, which other criteria check.

    Without `one_factor` each rank may have a factor of its own, since `pipe_gradients` checks that.
    """
    findings: list[Finding] = []
    n = case.world_size
    factor = None
    for rank in reversed(range(n)):
        grads = vector(case.answers[rank].get(f"g/{number}"), expected[rank])
        if grads is None:
            findings.append(Finding(f"{what}: no finite gradients came back.", rank))
            continue
        if not grads.any():
            findings.append(
                Finding(
                    f"{what}: the stage has no gradients but zeros. Does backward run through "
                    "every stage? Does what was received ask for a gradient, and does its .grad go "
                    "back?",
                    rank,
                )
            )
            continue
        if factor is None or not one_factor:
            factor = scale_of(grads, expected[rank])
        wrong = np.abs(grads - factor * expected[rank])
        if (
            not 1e-6 < factor < 1e6
            or wrong.max() > rtol * abs(factor) * np.abs(expected[rank]).max()
        ):
            why = "Do gradient, input and output belong to the same micro-batch?"
            own = scale_of(grads, expected[rank])
            if own and np.abs(grads - own * expected[rank]).max() < rtol * np.abs(grads).max():
                why = f"They are {own:.3g} times what they should be, the last {factor:.3g} times."
                if own == factor:
                    why = f"They are {own:.3g} times what they should be."
            findings.append(
                Finding(f"{what}: the gradients are not those of the batch. {why}", rank)
            )
    return findings[::-1]
