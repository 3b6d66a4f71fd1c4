"""Criterion for measuring the bytes that a training step keeps in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import described, item_of, told, unit_hint
from autograder.criteria.criterion import Case, Context, Finding, Values, per_rank

KEYS = ("parameters", "gradients", "optimizer", "saved")
LOSS_WEIGHTS = 7  # numbers in the parameter that is not the model's
LR = 0.1  # large enough that a step changes bf16 parameters, too


PLAIN: Values = {"frozen": None} | dict.fromkeys(
    ("left out", "recomputed", "slice", "spare", "gated", "part", "loss weight"), False
)
# How each network differs from PLAIN. Each difference shows whether one of the four numbers comes
# from the right tensors, so that no report is right by luck.
MEMORY_CASES: tuple[Values, ...] = (
    {"precision": "float32"},
    {"precision": "autocast"},
    {"precision": "bfloat16"},
    {"precision": "autocast", "frozen": 0},
    {"precision": "float32", "frozen": 1},  # its weight is saved: it is a parameter all the same
    {"precision": "float32", "left out": True},  # the optimizer lacks the first layer's parameters
    {"precision": "float32", "recomputed": True},  # backward saves tensors of its own
    {"precision": "float32", "slice": True},  # x is a part of a larger storage
    {"precision": "float32", "spare": True},  # parameters without a gradient, though not frozen
    {"precision": "float32", "gated": True},  # a buffer is saved: it is no parameter
    # A weight lies in the middle of a larger storage, and forward uses it in halves.
    {"precision": "float32", "part": True},
    # The optimizer has a state for a parameter that is not the model's (and has no gradient now).
    {"precision": "float32", "loss weight": True, "optimizer": "AdamW"},
)


@per_rank
def draw_memory(rng: np.random.Generator) -> Values:
    """Networks of private sizes, in three precisions; frozen layers, recomputation, slices."""
    # Each kind of optimizer comes in each draw, so that no report is right by luck.
    optimizers = rng.permutation(["AdamW"] * 5 + ["SGD"] * 4 + ["plain SGD"] * 3)
    cases = [
        PLAIN
        | {
            "sizes": [int(rng.integers(4, 24)) * 2 for _ in range(4)],
            "batch": int(rng.integers(10, 40)),
            "optimizer": str(optimizers[number]),
        }
        | special
        for number, special in enumerate(MEMORY_CASES)
    ]
    return {"cases": [cases[i] for i in rng.permutation(len(cases))]}


class _Net(nn.Module):
    """Three linear layers; the second one and its tanh may be recomputed in backward.

    It may also have a layer that forward does not use, and a factor of the first layer's output.
    """

    gate: torch.Tensor

    def __init__(self, case: Values) -> None:
        super().__init__()
        sizes = case["sizes"]
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in pairwise(sizes))
        self.register_buffer("gate", torch.ones(sizes[1]))  # a buffer is no parameter
        self.spare = nn.Linear(sizes[0], 1) if case["spare"] else None
        self.recomputed, self.gated, self.halved = case["recomputed"], case["gated"], case["part"]

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        """What backward may compute again."""
        layer: Any = self.layers[1]
        if self.halved:
            halves = [x @ half.t() for half in layer.weight.chunk(2)]
            return torch.tanh(torch.cat(halves, dim=1) + layer.bias)
        return torch.tanh(layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs."""
        x = torch.relu(self.layers[0](x))
        if self.gated:
            x = x * self.gate
        middle = partial(checkpoint, self.middle, use_reentrant=True) if self.recomputed else None
        return self.layers[2]((middle or self.middle)(x))


def _loss_of(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    """A loss that saves two halves of one storage, and integers."""
    left, right = model(x).float().chunk(2, dim=1)
    return oracle.mse((left * right)[order], y)


def _move(layer: Any) -> None:
    """Moves the weight of a layer into the middle of a larger storage."""
    flat = torch.cat([torch.zeros_like(layer.bias), layer.weight.detach().flatten()])
    layer.weight = nn.Parameter(flat[layer.bias.numel() :].view_as(layer.weight))


def _make_optimizer(
    case: Values, held: list[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer of a case; for a weight of the loss, if it has one, it has made a step."""
    extra = [nn.Parameter(torch.ones(LOSS_WEIGHTS, device=device))] * case["loss weight"]
    if case["optimizer"] == "AdamW":
        optimizer = torch.optim.AdamW([*held, *extra], lr=LR, foreach=False)
    else:
        momentum = 0.9 if case["optimizer"] == "SGD" else 0.0
        optimizer = torch.optim.SGD([*held, *extra], lr=LR, momentum=momentum)
    for p in extra:
        p.grad = torch.ones_like(p)
        optimizer.step()
        p.grad = None
    return optimizer


def observe_memory(memory_report: Any, inputs: Values, context: Context) -> Values:
    """The report on each case, and whether a correct step was made in every case."""
    reports, counts, stepped = [], [], True
    for case in inputs["cases"]:
        a, *_, d = case["sizes"]
        batch, device = case["batch"], context.device
        model = _Net(case).to(device)
        if case["frozen"] is not None:
            model.layers[case["frozen"]].requires_grad_(False)
        x = torch.randn(2 * batch if case["slice"] else batch, a, device=device)[-batch:]
        y = torch.randn(batch, d // 2, device=device)
        order = torch.randperm(batch, device=device)
        if case["precision"] == "bfloat16":
            model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
        if case["part"]:
            _move(model.layers[1])
        trained = [p for p in model.parameters() if p.requires_grad]
        spare = set() if model.spare is None else set(model.spare.parameters())
        held = trained[2:] if case["left out"] else trained
        optimizer = _make_optimizer(case, held, device)
        calls = {"compute_loss": 0, "optimizer.step": 0}
        optimizer.register_step_post_hook(lambda *_, of=calls: _count(of, "optimizer.step"))
        before = [p.detach().clone() for p in held]
        for p in held:  # stale gradients: a step with them gives nan
            if p not in spare:
                p.grad = torch.full_like(p, torch.nan)
        autocast = torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=case["precision"] == "autocast"
        )

        def compute_loss(
            of: dict[str, int] = calls, on: Any = autocast, given: Any = (model, x, y, order)
        ) -> torch.Tensor:
            _count(of, "compute_loss")
            with on:
                return _loss_of(*given)

        report = memory_report(model, optimizer, compute_loss)
        if isinstance(report, dict):
            reports.append({key: described_integer(report.get(key)) for key in KEYS})
        else:
            reports.append(described(report))
        counts.append(calls)
        stepped &= all(bool(torch.isfinite(p).all()) for p in held)
        stepped &= not all(torch.equal(p, b) for p, b in zip(held, before, strict=True))
    return {"reports": reports, "calls": counts, "stepped": stepped}


def _count(calls: dict[str, int], what: str) -> None:
    calls[what] += 1


def described_integer(value: Any) -> Any:
    """A number as it is, anything else in words."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return int(value) if is_integer else described(value)


def _counters(num_layers: int) -> int:
    """Bytes of AdamW's step counters: a float32 for each weight and bias."""
    return 2 * num_layers * 4


def expected_bytes(case: Values) -> dict[str, int]:
    """Bytes of each part."""
    a, b, c, d = case["sizes"]
    batch, frozen, precision = case["batch"], case["frozen"], case["precision"]
    width = 2 if precision == "bfloat16" else 4
    layers = [m * n + n for m, n in ((a, b), (b, c), (c, d))]
    trained = [numel for i, numel in enumerate(layers) if frozen != i]
    held = trained[1:] if case["left out"] else trained
    states = {"AdamW": 2, "SGD": 1, "plain SGD": 0}[case["optimizer"]]
    counters = _counters(len(held)) if case["optimizer"] == "AdamW" else 0
    others = (states * LOSS_WEIGHTS + 1) * 4 if case["loss weight"] else 0  # with its counter
    # Each linear layer saves its input if its weight is trained, and its weight if its input needs
    # a gradient. A saved parameter does not count as "saved", but autocast's 16-bit copy of a
    # parameter does. ReLU and tanh save their output, which is the input of the next layer and so
    # counts once. The loss saves both halves of one float32 storage, an index of 8 bytes a row,
    # and the float32 difference that it squares.
    activations = batch * (b + c + (0 if frozen == 0 else a * (2 if case["slice"] else 1)))
    copies = c * d + (0 if frozen == 0 else b * c)
    saved = batch * (d * 4 + 8 + d // 2 * 4)
    saved += activations * (4 if precision == "float32" else 2)
    saved += 2 * copies if precision == "autocast" else 0
    # A product with a buffer saves the buffer, and the next layer its result.
    saved += 4 * (b + batch * b) if case["gated"] else 0
    return {
        "parameters": (sum(layers) + (a + 1 if case["spare"] else 0)) * width,
        "gradients": sum(trained) * width,
        "optimizer": sum(held) * width * states + counters + others,
        "saved": saved,
    }


_HINTS = {
    "parameters": "numel × element_size of every parameter, frozen ones as well.",
    "gradients": "Those that there are after backward; what is frozen or not used has none.",
    "optimizer": "All tensors in optimizer.state, after a step.",
    "saved": "What autograd packs during compute_loss(), whatever its dtype: each storage once, in "
    "full, and none that belongs to a parameter, frozen ones included.",
}


def _explain(net: Values, key: str, expected: int, got: Any) -> str:
    off = got - expected if isinstance(got, int) else 0
    width = 2 if net["precision"] == "bfloat16" else 4
    if key == "parameters" and net["gated"] and off == net["sizes"][1] * width:
        return "A buffer was counted; it is no parameter."
    held = 3 - (net["frozen"] is not None) - bool(net["left out"])
    if key == "optimizer" and -off in (_counters(held), _counters(held) + 4):
        return "AdamW's step counters are tensors in optimizer.state, too."
    return unit_hint(got, expected) or _HINTS[key]


def judge_memory(case: Case) -> Iterator[Finding]:
    """The reported bytes follow from the sizes, and the optimizer made a correct step.

    The optimizer or the model may clear the gradients; the report may have more entries.
    """
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        reports = told(answer, "reports")
        calls = [item_of(told(answer, "calls"), n) for n in range(len(inputs["cases"]))]
        if wrong := [c for c in calls if c != {"compute_loss": 1, "optimizer.step": 1}]:
            yield Finding(
                f"expected one call each of compute_loss and optimizer.step: {wrong[0]}.", rank
            )
            continue
        if answer.get("stepped") is not True:
            yield Finding(
                "the parameters have not made one step with the gradients of compute_loss() alone: "
                "were older ones cleared?",
                rank,
            )
            continue
        for number, net in enumerate(inputs["cases"]):
            report = item_of(reports, number)
            if not isinstance(report, dict):
                yield Finding(f"expected a dict of bytes, got {report}.", rank)
                break
            off = [
                (key, expected, report.get(key))
                for key, expected in expected_bytes(net).items()
                if not isinstance(report.get(key), int) or report[key] != expected
            ]
            for key, expected, got in off:
                yield Finding(
                    f"{net['precision']}, layers {net['sizes']}, batch {net['batch']}, "
                    f"{net['optimizer']}{_special(net)}: {key!r}: expected {expected} bytes, got "
                    f"{got}. {_explain(net, key, expected, got)}",
                    rank,
                )
            if off:
                break


def _special(net: Values) -> str:
    if net["frozen"] is not None:
        return f", layer {net['frozen']} frozen"
    for key, what in (
        ("left out", ", layer 0 not in the optimizer"),
        ("recomputed", ", layer 1 recomputed in backward"),
        ("slice", ", x a part of a larger storage"),
        ("spare", ", with a layer that is not used"),
        ("gated", ", with a buffer that is saved"),
        ("part", ", layer 1's weight a part of a larger storage"),
        ("loss weight", ", the optimizer also has a state for a parameter that is not the model's"),
    ):
        if net[key]:
            return what
    return ""
