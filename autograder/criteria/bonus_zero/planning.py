"""Criteria for what ZeRO costs, and for a training step with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import item_of, read, read_number, short, unit_hint
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, integer, per_rank

# --- formulas ------------------------------------------------------------------------------------

Share = Callable[[list[int], int], Any]  # (sizes, ranks) -> numbers that a rank has


@per_rank
def draw_planning(rng: np.random.Generator) -> Values:
    """Groups of very different sizes, for every stage."""
    cases: list[Any] = []
    for stage in (0, 1, 2, 3, 0, 1, 2, 3):
        count = int(rng.integers(1, 6))
        sizes = [int(10 ** rng.uniform(0, 9)) for _ in range(count)]
        cases.append(
            {
                "sizes": [*sizes, 1],
                "ranks": int(rng.integers(3, 70)),
                "stage": stage,
                "micro": int(rng.integers(2, 9)),
            }
        )
    cases.append({"sizes": [2**54 + 1], "ranks": 2, "stage": 2, "micro": 1})
    cases.append({"sizes": [100, 7], "ranks": 1, "stage": 1, "micro": 3})
    return {"cases": cases}


def observe_memory(memory_per_rank: Any, inputs: Values, context: Context) -> Values:
    """The three numbers of `memory_per_rank` for every case."""
    told = []
    for each in inputs["cases"]:
        numbers = memory_per_rank(list(each["sizes"]), each["ranks"], each["stage"])
        numbers = read(numbers, list, "memory_per_rank", "three ints")
        told.append([integer(number, "memory_per_rank") for number in numbers])
    return {"told": told}


def _share(sizes: list[int], ranks: int) -> int:
    return sum((size + ranks - 1) // ranks for size in sizes)


# Known wrong shares of a rank, and the hint for each.
_WRONG_SHARES = (
    (
        lambda sizes, ranks: sum(math.ceil(size / ranks) for size in sizes),
        "S is rounded to a float here: it stays exact with // alone",
    ),
    (lambda sizes, ranks: sum(size // ranks for size in sizes), "S is rounded down here, not up"),
    (lambda sizes, ranks: sum(sizes) // ranks, "S is rounded down here, not up"),
    (
        lambda sizes, ranks: _share([sum(sizes)], ranks),
        "S is rounded once here, for all groups together; each group has a padding of its own",
    ),
)


def _memory(each: Values, share_of: Share = _share) -> list[Any]:
    whole, share, stage = sum(each["sizes"]), share_of(each["sizes"], each["ranks"]), each["stage"]
    state = {0: 8 * whole, 1: 12 * share, 2: 12 * share, 3: 8 * share}[stage]
    return [4 * (share if stage > 2 else whole), 4 * (share if stage > 1 else whole), state]


def judge_memory(case: Case) -> Iterator[Finding]:
    """Requires exactly the numbers of the formula."""
    return _judge_exactly(case, "memory_per_rank", _memory, ("sizes", "ranks", "stage"))


def observe_bytes(bytes_sent: Any, inputs: Values, context: Context) -> Values:
    """The bytes for every case; a count of one micro-batch is left to the default."""
    told = []
    for each in inputs["cases"]:
        arguments = [list(each["sizes"]), each["ranks"], each["stage"]]
        if each["micro"] > 1:
            arguments.append(each["micro"])
        told.append(integer(bytes_sent(*arguments), "bytes_sent"))
    return {"told": told}


def _bytes(each: Values, share_of: Share = _share) -> Any:
    once = 4 * (each["ranks"] - 1) * share_of(each["sizes"], each["ranks"])
    times = {0: 2, 1: 2 + 1, 2: each["micro"] + 1, 3: 3 * each["micro"]}
    return once * times[each["stage"]]


def judge_bytes(case: Case) -> Iterator[Finding]:
    """Requires exactly the number of the formula."""
    return _judge_exactly(case, "bytes_sent", _bytes, ("sizes", "ranks", "stage", "micro"))


def _judge_exactly(case: Case, name: str, formula: Any, arguments: Any) -> Iterator[Finding]:
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        told = answer.get("told")
        for number, each in enumerate(inputs["cases"]):
            got = item_of(told, number)
            expected = formula(each)
            if type(got) is not type(expected) or got != expected:
                call = ", ".join(str(each[argument]) for argument in arguments)
                said = f"{name}({call}): expected {expected}, got {str(got)[:80]}."
                why = (f"{text}." for other, text in _WRONG_SHARES if formula(each, other) == got)
                hint = next(why, "") or unit_hint(got, expected)
                yield Finding(f"{said} {hint}".rstrip(), rank)
                break


# --- a training step -----------------------------------------------------------------------------

SIZES, LR = (6, 8, 3), 0.5
# Samples of the micro-batches of a call. Each batch counts the same, whatever its size.
BATCHES = (4, 9, 2)
CALLS = (3, 1, 2)  # micro-batches of each call
FACTORS = (0.5, 3.0, 0.7)  # the clipping limit of each call, relative to the norm


def draw_train(draw: Draw) -> list[Values]:
    """One model, private micro-batches of unequal sizes, limits above and below the norm."""
    start = oracle.draw_parameters(draw.shared(), SIZES)
    inputs = []
    for rank in range(draw.world_size):
        rng, values = draw.private(rank), dict(start)
        for call, count in enumerate(CALLS):
            for micro in range(count):
                batch = oracle.draw_batch(rng, BATCHES[micro], SIZES)
                values |= {f"{name}{call}/{micro}": batch[name] for name in "xy"}
        inputs.append(values)
    limits: list[float] = []
    _reference(inputs, limits)
    return [values | {"limits": limits} for values in inputs]


def _reference(
    inputs: list[Values], limits: list[float], *, by_size: bool = False
) -> tuple[list[Any], Any, list[float]]:
    """Final parameters, losses per call and rank, norms, in float64. Fills in missing limits.

    Args:
        by_size: the wrong mean, in which a micro-batch counts as much as it has samples.
    """
    model = oracle.mlp(inputs[0], torch.float64)
    losses, norms = [], []
    for call, count in enumerate(CALLS):
        model.zero_grad()
        per_rank = []
        for values in inputs:
            pairs = [
                [torch.from_numpy(values[f"{n}{call}/{m}"]).double() for n in "xy"]
                for m in range(count)
            ]
            each = torch.stack([oracle.mse(model(x), y) for x, y in pairs])
            weights = torch.tensor([float(len(x)) if by_size else 1.0 for x, _ in pairs])
            per_rank.append((each * weights).sum() / weights.sum())
        torch.stack(per_rank).mean().backward()
        losses.append([loss.item() for loss in per_rank])
        gradients = [oracle.grad_of(p) for p in model.parameters()]
        norms.append(float(np.sqrt(sum(np.square(g).sum() for g in gradients))))
        if len(limits) <= call:
            limits.append(norms[-1] * FACTORS[call])
        factor = min(1.0, limits[call] / norms[-1])
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= LR * factor * torch.from_numpy(gradient)
    return [p.detach().numpy() for p in model.parameters()], losses, norms


class StandIn:
    """An optimiser with the methods of `ZeRO2` that shards nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = list(model.parameters())
        self.sums = [torch.zeros_like(w) for w in self.weights]

    def guard(self, *_: Any) -> None:
        """Raises an error before a forward pass if reduce() did not follow the last backward."""
        if any(w.grad is not None for w in self.weights):
            raise RuntimeError("reduce() was not called after the last backward")

    def reduce(self) -> None:
        """Adds the means over ranks to the sums."""
        for total, w in zip(self.sums, self.weights, strict=True):
            if w.grad is not None:
                dist.all_reduce(w.grad)
                total.add_(w.grad, alpha=1 / dist.get_world_size())
                w.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """The whole sums."""
        return self.sums

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clips the sums, which are the same on all ranks; returns the norm before clipping."""
        norm = float(torch.linalg.vector_norm(torch.stack([s.norm() for s in self.sums])))
        for total in self.sums:
            total.mul_(min(1.0, max_norm / max(norm, 1e-12)))
        return norm

    def step(self) -> None:
        """Plain SGD."""
        with torch.no_grad():
            for total, w in zip(self.sums, self.weights, strict=True):
                w.sub_(total, alpha=LR)

    def zero_grad(self) -> None:
        """Forgets the sums."""
        for total in self.sums:
            total.zero_()
        for w in self.weights:
            w.grad = None


def observe_train(train_step: Any, inputs: Values, context: Context) -> Values:
    """Three calls with a stand-in for the optimiser."""
    model = oracle.mlp(inputs).to(context.device)
    optimizer = StandIn(model)
    model.register_forward_pre_hook(optimizer.guard)
    answer: Values = {"told": [], "forgotten": []}
    for call, count in enumerate(CALLS):
        pairs = [
            tuple(torch.from_numpy(inputs[f"{n}{call}/{m}"]).to(context.device) for n in "xy")
            for m in range(count)
        ]
        told = train_step(model, optimizer, pairs, oracle.mse, inputs["limits"][call])
        told = read(told, list, "train_step", "a loss and a norm")
        answer["told"].append([read_number(number, "train_step") for number in told])
        answer["forgotten"].append(not any(total.any() for total in optimizer.sums))
    for i, parameter in enumerate(model.parameters()):
        answer[f"p{i}"] = parameter.detach().cpu().numpy()
    return answer


def judge_train(case: Case) -> list[Finding]:
    """Requires the losses, norms and parameters that one process computes.

    A loss or norm may be a float or a tensor of one number. The mean over micro-batches may be
    taken of losses or of the shards' gradients.
    """
    findings: list[Finding] = []
    final, losses, norms = _reference(list(case.inputs), list(case.inputs[0]["limits"]))
    for rank, answer in enumerate(case.answers):
        told = answer.get("told")
        for call, count in enumerate(CALLS):
            pair = item_of(told, call)
            expected = (losses[call][rank], norms[call])
            if not isinstance(pair, list) or len(pair) != 2:
                findings.append(Finding("expected a pair (loss, norm).", rank))
                break
            for what, got, right in zip(("loss", "norm"), pair, expected, strict=True):
                if not isinstance(got, float) or not abs(got - right) <= 1e-3 * abs(right):
                    findings.append(
                        Finding(
                            f"call {call + 1}, {count} micro-batches: expected a {what} of "
                            f"{right:.6g}, got "
                            f"{short(got)[:30]}.{_why(case, rank, call, what, got, right)}",
                            rank,
                        )
                    )
                    break
            if findings and findings[-1].rank == rank:
                break
            if item_of(answer.get("forgotten"), call) is not True:
                when = f"call {call + 1}, {count} micro-batches"
                findings.append(Finding(f"{when}: gradients of the step are left behind.", rank))
                break
        else:
            for i, value in enumerate(final):
                hint = "Losses and norms were right: clipped before the step?"
                if wrong := oracle.differs(
                    rank,
                    f"parameter {i} after all calls",
                    answer.get(f"p{i}"),
                    value,
                    hint=hint,
                ):
                    findings.append(wrong)
                    break
    return findings


def _why(case: Case, rank: int, call: int, what: str, got: Any, right: float) -> str:
    if not isinstance(got, float) or not np.isfinite(got):
        return ""
    count, limits = CALLS[call], list(case.inputs[0]["limits"])
    _, losses, norms = _reference(list(case.inputs), limits, by_size=True)
    by_size = losses[call][rank] if what == "loss" else norms[call]
    if abs(got - by_size) <= 1e-3 * abs(by_size):
        return (
            f" Presumably its {count} micro-batches, of {BATCHES[:count]} samples, were weighed by "
            "their sizes: each counts the same."
        )
    for factor, why in (
        (count, "the mean over micro-batches was not taken"),
        (1 / count, "it was divided by the number of micro-batches twice"),
        (1 / case.world_size, "it was divided by the number of ranks once more"),
    ):
        if factor != 1 and count == case.world_size and factor < 1:
            why = "it was divided by the number of micro-batches twice, or by that of ranks"
        if factor != 1 and abs(got - factor * right) <= 1e-3 * abs(factor * right):
            return f" Presumably {why}."
    if what == "norm":
        return " Do gradients of an earlier call remain?"
    return " Until then losses and norms were right: clipped before the step?" if call else ""
