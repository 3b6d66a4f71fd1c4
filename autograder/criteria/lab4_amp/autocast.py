"""Criterion for where autocast begins and ends, judged by how numbers were rounded.

Three places of the model and the loss are built so that rounding changes a gradient by tens of
percent, each place in a different way:

- The inputs are 1 + a few eps of the 16-bit format, with signs that cancel the 1. The gradient of a
  layer under autocast is computed from the rounded inputs.
- The same inputs go through a block that switches autocast off. The gradient of this block is
  computed from the exact inputs, unless *backward* runs under autocast.
- A matrix product inside the loss has two factors that differ by 0.6 eps. They differ by a whole
  eps if the loss is computed under autocast.

So the criterion does not rely on anything that the process reports about itself. All ranks get the
same batch, twice, and the first step counts: a loop that does not reduce its gradients, or drops a
batch, loses a different criterion.

With dtype=None all three places have to be exact. One more step has a tensor that says it is on a
device of a different type, because all of the grader's tensors may be on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common.answers import told
from autograder.criteria.common.training import wrap
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs
from autograder.criteria.lab4_amp.formats import DTYPES
from autograder.criteria.lab4_amp.recorded import NEVER, GivenScaler, Recorder

FULL = "None"  # dtype=None; its inputs are made for bf16, which is autocast's default on CPUs
FORMATS = {"float16": "float16", "bfloat16": "bfloat16", FULL: "bfloat16"}
NAMES = tuple(FORMATS)
BATCH, FEATURES, SCALE = 8, 6, 1024.0
ELSEWHERE = "xpu"  # a device type that torch knows everywhere, and that no course uses
GAP = 0.6  # eps between the factors in the loss
RTOL, LR = 0.04, 0.1  # relative to the largest update

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

WHATS = ("the block that insists on float32", "the layer under autocast")


def right_places(name: str) -> tuple[bool, bool, bool]:
    """Where autocast has to be on: forward, loss, backward."""
    return (False, False, False) if name == FULL else (True, True, False)


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
            second = x.float() @ self.sensitive.float()
        return first.float() + second


def draw(source: Draw) -> list[Values]:
    """One batch per dtype for all ranks, drawn again until every mistake changes the result."""
    shared = source.shared("start")
    values: Values = {
        "w": shared.normal(size=(1, FEATURES)).astype(np.float32),
        "v": shared.normal(size=(FEATURES, 1)).astype(np.float32),
        "order": [NAMES[i] for i in shared.permutation(len(NAMES))],
    }
    for name, half in FORMATS.items():
        eps = float(torch.finfo(DTYPES[half]).eps)
        for attempt in range(100):
            rng = source.shared(f"{name} {attempt}")
            x = 1 + eps * rng.uniform(0.1, 8, (BATCH, FEATURES))
            signs = rng.permutation(np.repeat([1.0, -1.0], BATCH // 2))
            values[f"x/{name}"] = x.astype(np.float32)
            values[f"s/{name}"] = signs.astype(np.float32)[:, None]
            if all(
                _differ(_gradients(values, name, right_places(name)), _gradients(values, name, p))
                for p in places_of(name)
            ):
                break
    return [dict(values) for _ in range(source.world_size)]


def places_of(name: str) -> list[tuple[bool, bool, bool]]:
    """Where autocast may be on by mistake."""
    return [p for p in (*MISTAKES, (True, True, False)) if p != right_places(name)]


def _differ(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> bool:
    """Whether two results differ clearly in at least one of the two parameters."""
    return any(
        np.abs(mine - other).max() > 5 * RTOL * np.abs(mine).max()
        for mine, other in zip(a, b, strict=True)
    )


def observe(train_amp: Any, inputs: Values, context: Context) -> Values:
    """Trains with each dtype; the parameters before and after the first step."""
    answer: Values = {}
    for name in inputs["order"]:
        eps, device = float(torch.finfo(DTYPES[FORMATS[name]]).eps), context.device
        module = TwoBlocks(inputs["w"], inputs["v"]).to(device)
        optimizer = torch.optim.SGD(module.parameters(), lr=1 / eps**2)
        scaler = GivenScaler(device.type, init_scale=SCALE, growth_interval=NEVER)
        factors = torch.tensor([[1 + GAP * eps, 1.0]], device=device)
        batch = tuple(torch.from_numpy(inputs[f"{k}/{name}"]).to(device) for k in "xs")
        recorder = Recorder(module, optimizer, scaler, [batch])

        def loss_fn(
            prediction: torch.Tensor, signs: torch.Tensor, factors: torch.Tensor = factors
        ) -> torch.Tensor:
            return ((prediction @ factors) * torch.cat([signs, -signs], dim=1)).mean()

        dtype = None if name == FULL else DTYPES[name]
        train_amp(wrap(module, context), [batch] * 2, loss_fn, optimizer, scaler, dtype=dtype)
        kinds = [str(p.dtype).removeprefix("torch.") for p in module.parameters()]
        answer[f"dtypes/{name}"] = sorted(set(kinds))
        if recorder.after:
            answer[f"change/{name}"] = recorder.after[0] - recorder.before[0]
    return answer | {"elsewhere": _autocast_elsewhere(train_amp)}


class _Elsewhere(torch.Tensor):
    """A tensor that says it is on a device of a different type."""

    device = property(lambda _: torch.device(ELSEWHERE, 0))  # type: ignore[assignment]


class _Asks(nn.Module):
    """Notes for which type of device autocast is on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.is_autocast_enabled(ELSEWHERE))
        return x.as_subclass(torch.Tensor) * self.weight

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """As DDP has it."""
        return contextlib.nullcontext()


def _autocast_elsewhere(train_amp: Any) -> list[bool]:
    """Whether autocast was on for x's device type, in each forward.

    A loop that fails on such a tensor is not judged by this.
    """
    model = _Asks()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = GivenScaler("cpu", init_scale=SCALE, growth_interval=NEVER)
    x = torch.ones(2, 1).as_subclass(_Elsewhere)
    with contextlib.suppress(Exception):
        train_amp(
            model,
            [(x, torch.ones(2, 1))] * 2,
            lambda prediction, target: (prediction - target).square().mean(),
            optimizer,
            scaler,
            dtype=torch.bfloat16,
        )
    return model.seen


def _round(values: np.ndarray, name: str) -> np.ndarray:
    return torch.from_numpy(np.asarray(values, np.float32)).to(DTYPES[name]).double().numpy()


def _gradients(
    inputs: Values, name: str, autocast: tuple[bool, bool, bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of `sensitive` and of the layer, times 1/eps², for autocast in the given places."""
    forward, loss, backward = autocast
    half = FORMATS[name]
    eps = float(torch.finfo(DTYPES[half]).eps)
    factor = np.asarray(1 + GAP * eps, np.float32)
    gap = (_round(factor, half) if loss else factor.astype(np.float64)) - 1
    x, signs = inputs[f"x/{name}"], inputs[f"s/{name}"].astype(np.float64)

    def gradient(rounded: bool) -> np.ndarray:
        seen = _round(x, half) if rounded else x.astype(np.float64)
        return (signs * seen).sum(axis=0) * float(gap) / (2 * BATCH * eps**2)

    return gradient(backward), gradient(forward)


def judge(case: Case) -> Iterator[Finding]:
    """Model and loss run under autocast, backward does not, and the parameters stay float32."""
    inputs = case.inputs[0]
    for rank, answer in enumerate(case.answers):
        for name in NAMES:
            if told(answer, f"dtypes/{name}") != ["float32"]:
                yield Finding(
                    f"dtype={name}: the parameters are {told(answer, f'dtypes/{name}')} after "
                    "training. They have to stay float32: autocast rounds copies of them.",
                    rank,
                )
                continue
            change = answer.get(f"change/{name}")
            if not isinstance(change, np.ndarray) or change.shape != (2 * FEATURES,):
                yield Finding(f"dtype={name}: two batches, and no optimizer step was taken.", rank)
                continue
            got = (change[:FEATURES], change[FEATURES:])
            right = _gradients(inputs, name, right_places(name))
            findings = _compare(rank, name, got, right)
            # A sum instead of a mean, or a mean divided once more, costs `amp_loop_fp16` only.
            for factor in (case.world_size, 1 / case.world_size):
                if not _compare(rank, name, got, (factor * right[0], factor * right[1])):
                    findings = []
            if findings:
                yield Finding(f"{findings[0].message} {_explain(name, got, inputs)}", rank)
        seen = told(answer, "elsewhere")
        if isinstance(seen, list) and seen and not all(on is True for on in seen):
            yield Finding(
                f"autocast was not on for a batch whose x.device.type is {ELSEWHERE!r}: give it "
                "the device type of x.",
                rank,
            )


def _explain(name: str, got: tuple[np.ndarray, np.ndarray], inputs: Values) -> str:
    for places in places_of(name):
        if not _compare(0, name, got, _gradients(inputs, name, places)):
            if name == FULL:
                return (
                    "dtype=None means full precision, and autocast was on: without a dtype it "
                    "takes its default. Switch it off, with enabled=dtype is not None, say."
                )
            return MISTAKES[places]
    return "Is autocast's dtype the one that was asked for?" if name != FULL else ""


def _compare(
    rank: int,
    name: str,
    got: tuple[np.ndarray, np.ndarray],
    gradients: tuple[np.ndarray, np.ndarray],
) -> list[Finding]:
    found = (
        differs(
            rank,
            f"dtype={name}: the change of the weight of {what} by a step",
            value,
            -gradient,
            rtol=RTOL,
            atol=RTOL * float(np.abs(gradient).max()),
        )
        for what, value, gradient in zip(WHATS, got, gradients, strict=True)
    )
    return [finding for finding in found if finding]
