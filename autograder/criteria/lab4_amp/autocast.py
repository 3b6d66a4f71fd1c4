"""Criterion for where autocast begins and ends, judged by how numbers were rounded.

Three places of the model and the loss are built so that rounding changes a gradient by tens of
percent, each place in a different way:

- The inputs are 1 + a few eps of the 16-bit format, with signs that cancel the 1. The gradient of a
  layer under autocast is computed from the rounded inputs.
- The same inputs go through a block that switches autocast off. The gradient of this block is
  computed from the exact inputs, unless *backward* runs under autocast.
- A matrix product inside the loss has two factors that differ by 0.6 eps. They differ by a whole
  eps if the loss is computed under autocast.

So the criterion does not rely on anything that the process reports about itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab4_amp.formats import DTYPES
from autograder.criteria.lab4_amp.loop import NEVER, GivenScaler, change_differs, wrap

NAMES = ("float16", "bfloat16")
BATCH, FEATURES, SCALE = 8, 6, 1024.0
GAP = 0.6  # eps between the factors in the loss
RTOL = 0.04  # relative to the largest update

# (autocast on in forward, in the loss, in backward) -> the hint for the student
MISTAKES = {
    (False, False, False): "That is the result of computing everything in float32: autocast was "
    "never on.",
    (True, False, False): "The model ran under autocast, the loss did not: loss_fn belongs into "
    "the block as well.",
    (True, True, True): "backward() ran under autocast as well. It has to come after the block: "
    "each operation's backward takes the dtype of its forward by itself.",
    (False, True, False): "The loss ran under autocast, the model did not.",
    (True, False, True): "The model and backward() ran under autocast, the loss did not.",
}


class TwoBlocks(nn.Module):
    """A layer that autocast may compute in 16 bits, and a block that always computes in float32."""

    def __init__(self, w: np.ndarray, v: np.ndarray) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1, bias=False)
        self.sensitive = nn.Parameter(torch.from_numpy(v.copy()))
        with torch.no_grad():
            self.layer.weight.copy_(torch.from_numpy(w))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layer(x)
        with torch.autocast(x.device.type, enabled=False):
            second = x.float() @ self.sensitive
        return first.float() + second


def draw(source: Draw) -> list[Values]:
    """Private inputs per format, drawn again until every mistake changes the result."""
    shared = source.shared("start")
    start = {
        "w": shared.normal(size=(1, FEATURES)).astype(np.float32),
        "v": shared.normal(size=(FEATURES, 1)).astype(np.float32),
        "order": [NAMES[i] for i in shared.permutation(2)],
    }
    inputs: list[Values] = [dict(start) for _ in range(source.world_size)]
    for name in NAMES:
        eps = float(torch.finfo(DTYPES[name]).eps)
        for attempt in range(100):
            for rank, values in enumerate(inputs):
                rng = source.shared(f"rank {rank} {name} {attempt}")
                x = 1 + eps * rng.uniform(0.1, 8, (BATCH, FEATURES))
                signs = rng.permutation(np.repeat([1.0, -1.0], BATCH // 2))
                values[f"x/{name}"] = x.astype(np.float32)
                values[f"s/{name}"] = signs.astype(np.float32)[:, None]
            right = _gradients(inputs, name, (True, True, False))
            if all(_differ(right, _gradients(inputs, name, wrong)) for wrong in MISTAKES):
                break
    return inputs


def _differ(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> bool:
    """Whether two results differ clearly in at least one of the two parameters."""
    return any(
        np.abs(mine - other).max() > 5 * RTOL * np.abs(mine).max()
        for mine, other in zip(a, b, strict=True)
    )


def observe(train_amp: Any, inputs: Values, context: Context) -> Values:
    """Trains one step in each format; the parameters after the step."""
    answer: Values = {}
    for name in inputs["order"]:
        eps, device = float(torch.finfo(DTYPES[name]).eps), context.device
        model = wrap(TwoBlocks(inputs["w"], inputs["v"]).to(device), device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1 / eps**2)
        scaler = GivenScaler(device.type, init_scale=SCALE, growth_interval=NEVER)
        factors = torch.tensor([[1 + GAP * eps, 1.0]], device=device)
        batch = [torch.from_numpy(inputs[f"{k}/{name}"]).to(device) for k in "xs"]

        def loss_fn(
            prediction: torch.Tensor, signs: torch.Tensor, factors: torch.Tensor = factors
        ) -> torch.Tensor:
            return ((prediction @ factors) * torch.cat([signs, -signs], dim=1)).mean()

        train_amp(model, [tuple(batch)], loss_fn, optimizer, scaler, dtype=DTYPES[name])
        for i, p in enumerate(model.parameters()):
            answer[f"dtype/{name}/{i}"] = str(p.dtype).removeprefix("torch.")
            answer[f"p/{name}/{i}"] = p.detach().float().cpu().numpy()
    return answer


def _round(values: np.ndarray, name: str) -> np.ndarray:
    return torch.from_numpy(np.asarray(values, np.float32)).to(DTYPES[name]).double().numpy()


def _gradients(
    inputs: list[Values], name: str, autocast: tuple[bool, bool, bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of `sensitive` and of the layer, times 1/eps², for autocast in the given places."""
    forward, loss, backward = autocast
    eps = float(torch.finfo(DTYPES[name]).eps)
    factor = np.asarray(1 + GAP * eps, np.float32)
    gap = (_round(factor, name) if loss else factor.astype(np.float64)) - 1
    sums = []
    for rounded in (backward, forward):
        per_rank = []
        for values in inputs:
            x, signs = values[f"x/{name}"], values[f"s/{name}"].astype(np.float64)
            x = _round(x, name) if rounded else x.astype(np.float64)
            per_rank.append((signs * x).sum(axis=0) * float(gap) / (2 * BATCH * eps**2))
        sums.append(oracle.mean(per_rank))
    return sums[0], sums[1]


def judge(case: Case) -> list[Finding]:
    """Model and loss run under autocast, backward does not, and the parameters stay float32."""
    findings: list[Finding] = []
    inputs = list(case.inputs)
    start = [inputs[0]["v"].ravel().astype(np.float64), inputs[0]["w"].ravel().astype(np.float64)]
    for rank, answer in enumerate(case.answers):
        for name in NAMES:
            got = [_flat(answer.get(f"p/{name}/{i}")) for i in range(2)]
            dtypes = [str(answer.get(f"dtype/{name}/{i}")) for i in range(2)]
            if dtypes != ["float32"] * 2:
                findings.append(
                    Finding(
                        f"dtype={name}: the parameters are {dtypes[0]} and {dtypes[1]} after "
                        "training. They have to stay float32: autocast rounds copies of them.",
                        rank,
                    )
                )
                continue
            hint = "Is autocast's dtype the one that was asked for?"
            for places, reason in MISTAKES.items():
                if not _compare(rank, name, got, start, _gradients(inputs, name, places), ""):
                    hint = reason
            right = _gradients(inputs, name, (True, True, False))
            findings += _compare(rank, name, got, start, right, hint)
    return findings


def _flat(got: Any) -> Any:
    return got.ravel() if isinstance(got, np.ndarray) else got


def _compare(
    rank: int,
    name: str,
    got: list[Any],
    start: list[np.ndarray],
    gradients: tuple[np.ndarray, np.ndarray],
    hint: str,
) -> list[Finding]:
    whats = ("of the block that insists on float32", "of the layer under autocast")
    found = (
        change_differs(
            rank,
            f"the weight {what} (dtype={name})",
            value,
            before - gradient,
            before,
            RTOL,
            hint,
        )
        for what, value, before, gradient in zip(whats, got, start, gradients, strict=True)
    )
    return [finding for finding in found if finding]
