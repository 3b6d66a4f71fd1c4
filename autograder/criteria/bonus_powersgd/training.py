"""Criteria for the bytes and seconds that PowerSGD saves, and for training with PowerSGD."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from autograder.criteria.bonus_powersgd.columns import expected_shape
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import (
    finite_floats,
    is_close,
    is_floats,
    item_of,
    read,
    read_number,
    short,
    unit_hint,
)
from autograder.criteria.criterion import (
    Case,
    Context,
    Draw,
    Finding,
    Values,
    differs,
    integer,
    per_rank,
)

CASES = 6


# --- bytes and seconds ---------------------------------------------------------------------------


@per_rank
def draw_planning(rng: np.random.Generator) -> Values:
    """One model of one matrix, others with all kinds of tensors; networks of all speeds."""
    cases: list[Any] = []
    for number in range(CASES):
        width = int(rng.integers(64, 512))
        shapes = [[3 * width, width], [3 * width], [int(rng.integers(8, 64)), width, 3, 3]]
        shapes += [[width], [2, 3], [], [width, int(rng.integers(100, 4000))]]
        cases.append(
            {
                "shapes": shapes if number else shapes[:1],
                "rank": int(rng.integers(1, 9)),
                "world_size": int(rng.integers(3, 100)),
                "latency_s": float(10 ** rng.uniform(-6, -3)),
                "bandwidth": float(10 ** rng.uniform(8, 11)),
                "compress_s": float(10 ** rng.uniform(-4, -2)),
            }
        )
    return {"cases": cases}


def _shapes(case: Values) -> list[tuple[int, ...]]:
    return [tuple(shape) for shape in case["shapes"]]


def _numbers(case: Values) -> tuple[int, int]:
    """How many numbers the model has, and how many are sent."""
    whole = sent = 0
    for shape in case["shapes"]:
        pair = expected_shape(shape, case["rank"])
        whole += math.prod(shape)
        sent += case["rank"] * sum(pair) if pair else math.prod(shape)
    return whole, sent


def _compressed(case: Values) -> list[list[int]]:
    pairs = [expected_shape(shape, case["rank"]) for shape in case["shapes"]]
    return [pair for pair in pairs if pair]


def observe_numbers(functions: Any, inputs: Values, context: Context) -> Values:
    """Numbers sent and ratio, for every case."""
    numbers_sent, compression_ratio = functions
    arguments = [(_shapes(c), c["rank"]) for c in inputs["cases"]]
    sent = [integer(numbers_sent(*each), "numbers_sent") for each in arguments]
    ratios = [read_number(compression_ratio(*each), "compression_ratio") for each in arguments]
    return {"sent": sent, "ratio": np.array(ratios)}


def judge_numbers(case: Case) -> Iterator[Finding]:
    """Both results follow the formula."""
    for rank, answer in enumerate(case.answers):
        cases = case.inputs[rank]["cases"]
        expected = [_numbers(each)[1] for each in cases]
        said, right = answer.get("sent"), True
        for i, each in enumerate(cases):
            got = item_of(said, i)
            right = got == expected[i]
            if not right:
                thin = sum(each["rank"] * sum(pair) for pair in _compressed(each))
                hint = " Those of P and Q alone; what is not compressed is sent, too."
                yield Finding(
                    f"numbers_sent({_shapes(each)}, {each['rank']}): expected {expected[i]}, got "
                    f"{str(got)[:40]}.{hint * (got == thin)}",
                    rank,
                )
                break
        ratios = np.array([_numbers(each)[0] / _numbers(each)[1] for each in cases])
        if right and (
            wrong := differs(
                rank,
                "compression_ratio",
                answer.get("ratio"),
                ratios,
                rtol=1e-6,
                atol=0.0,
                hint="All numbers of the model over those that are sent.",
            )
        ):
            yield wrong


def _saved(
    case: Values, *, calls: int = 3, item_bytes: int = 4, rounds: int = 2, compress: int = 1
) -> float:
    """Seconds saved; other values than these defaults give known wrong answers."""
    whole, sent = _numbers(case)
    n, steps = case["world_size"], rounds * (case["world_size"] - 1)
    plain = steps * (case["latency_s"] + item_bytes * whole / n / case["bandwidth"])
    thin = steps * (calls * case["latency_s"] + item_bytes * sent / n / case["bandwidth"])
    return plain - thin - compress * case["compress_s"]


def _why_seconds(got: Any, case: Values) -> str:
    """What the number is, if it is a known wrong one."""
    known = (
        (_saved(case, calls=1), "That is with one latency for each step: three all-reduces pay 3."),
        (_saved(case, calls=2), "That is with two all-reduces in a step: there are always three."),
        (_saved(case, compress=0), "That is without compress_s."),
        (_saved(case, compress=-1), "compress_s is added there: it is time that is lost."),
        (_saved(case, item_bytes=1), "That is with 1 byte for each number: float32 has 4."),
        (
            _saved(case, rounds=1),
            "That is with N - 1 steps of a ring; an all-reduce has twice as many.",
        ),
        (-_saved(case), "That has the wrong sign: seconds without PowerSGD minus those with it."),
    )
    for value, why in known:
        if is_close(got, value, rtol=1e-5, atol=1e-12):
            return why
    return unit_hint(got, _saved(case)) or (
        "One all-reduce has 2 (N - 1) latencies, three have three times as many; compress_s counts "
        "too."
    )


def observe_seconds(seconds_saved: Any, inputs: Values, context: Context) -> Values:
    """Seconds saved, for every case."""
    names = ("rank", "world_size", "latency_s", "bandwidth", "compress_s")
    saved = [seconds_saved(_shapes(c), *(c[name] for name in names)) for c in inputs["cases"]]
    return {"saved": np.array([read_number(each, "seconds_saved") for each in saved])}


def judge_seconds(case: Case) -> Iterator[Finding]:
    """One ring all-reduce of all numbers, minus three of the sent numbers and `compress_s`."""
    for rank, answer in enumerate(case.answers):
        saved = answer.get("saved")
        for number, each in enumerate(case.inputs[rank]["cases"]):
            got = float(saved[number]) if is_floats(saved, (CASES,)) else None
            if not is_close(got, _saved(each), rtol=1e-5, atol=1e-12):
                whole, sent = _numbers(each)
                names = ("rank", "world_size", "latency_s", "bandwidth", "compress_s")
                options = ", ".join(f"{name}={each[name]:.4g}" for name in names)
                yield Finding(
                    f"seconds_saved of a model of {whole} numbers, of which {sent} are sent, "
                    f"{options}: expected {_saved(each):.6g} s, got {short(got)} s. "
                    f"{_why_seconds(got, each)}",
                    rank,
                )
                break


# --- the loop ------------------------------------------------------------------------------------

SIZES, BATCH, STEPS, LR = (7, 9, 3), 5, 4, 0.3


def draw_train(draw: Draw) -> list[Values]:
    """The same weights, private batches."""
    start = oracle.draw_parameters(draw.shared(), SIZES)
    return oracle.private_batches(draw, start, [(BATCH,)] * STEPS, SIZES)


class CountingReducer:
    """A stand-in for a single rank, which leaves gradients as they are."""

    calls = 0

    def reduce_gradients(self) -> None:
        """Counts the call."""
        self.calls += 1


class ExactReducer:
    """A stand-in that averages gradients one by one, uncompressed."""

    def __init__(self, parameters: Any) -> None:
        self._held = list(parameters)

    def reduce_gradients(self) -> None:
        """Replaces every gradient by its mean over ranks."""
        for parameter in self._held:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def observe_train(train: Any, inputs: Values, context: Context) -> Values:
    """Losses, and the parameters afterwards; and how a loop goes on after an infinite loss."""
    model = oracle.mlp(inputs).to(context.device)
    batches = [
        tuple(torch.from_numpy(inputs[f"{k}/{step}"]).to(context.device) for k in "xy")
        for step in range(STEPS)
    ]
    losses = train(model, ExactReducer(model.parameters()), iter(batches), LR, oracle.mse)
    losses = read(losses, list, "train", "a list of losses")
    answer: Values = {
        "losses": np.array([read_number(loss, "train, for a loss") for loss in losses]),
        "floats": all(isinstance(loss, float) for loss in losses),
    }
    for i, parameter in enumerate(model.parameters()):
        answer[f"p{i}"] = parameter.detach().cpu().numpy()
    # The stand-in sends nothing: with collectives, a skipped step would make other ranks wait.
    counter, infinite = CountingReducer(), (batches[0][0], batches[0][1] + math.inf)
    other = oracle.mlp(inputs).to(context.device)
    again = train(other, counter, iter([infinite, batches[1]]), LR, oracle.mse)
    return answer | {"reduced": counter.calls, "counted": len(again)}


def _explain_losses(case: Case, rank: int, got: Any) -> str:
    values = case.inputs[rank]
    alone = [[(values[f"x/{s}"], values[f"y/{s}"])] for s in range(STEPS)]
    _, losses = oracle.train(case.inputs[0], alone, LR)
    if case.world_size > 1 and oracle.agrees(got, np.array([step[0] for step in losses])):
        return (
            "These are the losses of updates with this rank's own gradients: reduce_gradients() "
            "belongs between backward and the update."
        )
    return "One per batch, before the update, with fresh gradients for each."


def judge_train(case: Case) -> Iterator[Finding]:
    """Losses and parameters, as one process computes them; no batch is left out.

    Updates may be torch's or by hand, and gradients cleared before backward or after the update.
    """
    batches = [[(v[f"x/{s}"], v[f"y/{s}"]) for v in case.inputs] for s in range(STEPS)]
    final, losses = oracle.train(case.inputs[0], batches, LR)
    for rank, answer in enumerate(case.answers):
        own = np.array([step[rank] for step in losses])
        if wrong := oracle.differs(
            rank,
            "losses of this rank's batches",
            answer.get("losses"),
            own,
            hint=_explain_losses(case, rank, answer.get("losses")),
        ):
            yield wrong
            continue
        if answer.get("floats") is not True:
            yield Finding("expected each loss as a float; a tensor's `item()` gives it.", rank)
            continue
        reduced, counted = answer.get("reduced"), answer.get("counted")
        if (reduced, counted) != (2, 2):
            yield Finding(
                "two batches, the first with an infinite loss: calls of reduce_gradients(): "
                f"{str(reduced)[:40]}, losses: {str(counted)[:40]}; expected 2 and 2. "
                "A rank that leaves out a step lets the others wait for it.",
                rank,
            )
            continue
        for i, expected in enumerate(final):
            if wrong := oracle.differs(
                rank, f"parameter {i} after {STEPS} steps", answer.get(f"p{i}"), expected
            ):
                yield wrong
                break


# --- convergence ---------------------------------------------------------------------------------

DIM, HIDDEN, CLASSES, ROWS, LONG, LONG_LR = 32, 48, 16, 32, 60, 0.3
ENOUGH = 0.08


def draw_converges(draw: Draw) -> list[Values]:
    """Class centres that differ much in some directions, little in others; private batches."""
    rng = draw.shared()
    start = oracle.draw_parameters(rng, (DIM, HIDDEN, CLASSES))
    centres = rng.normal(size=(CLASSES, DIM)) * 10 ** np.linspace(0.3, -0.5, DIM)
    inputs = []
    for rank in range(draw.world_size):
        own = draw.private(rank)
        labels = own.integers(0, CLASSES, size=(LONG, ROWS))
        x = centres[labels] + 0.4 * own.normal(size=(LONG, ROWS, DIM))
        inputs.append(start | {"x": x.astype(np.float32), "labels": labels})
    return inputs


def observe_converges(subject: Any, inputs: Values, context: Context) -> Values:
    """The parameters after sixty steps with compression rank 1."""
    feedback, train = subject
    model = oracle.mlp(inputs).to(context.device)
    x, labels = (torch.from_numpy(inputs[name]).to(context.device) for name in ("x", "labels"))
    batches = list(zip(x, labels, strict=True))
    reducer = feedback(model.parameters(), 1)
    train(model, reducer, batches, LONG_LR, nn.functional.cross_entropy)
    parameters = enumerate(model.parameters())
    return {f"p{i}": parameter.detach().cpu().numpy() for i, parameter in parameters}


def _loss(model: nn.Module, case: Case) -> float:
    """Mean loss over the last ten batches of all ranks."""
    losses = []
    with torch.no_grad():
        for values in case.inputs:
            x = torch.from_numpy(values["x"][-10:]).double().reshape(-1, DIM)
            labels = torch.from_numpy(values["labels"][-10:]).reshape(-1)
            losses.append(nn.functional.cross_entropy(model(x), labels).item())
    return float(np.mean(losses))


def judge_converges(case: Case) -> Iterator[Finding]:
    """Each rank's parameters reach the loss on the data of all ranks, and all ranks agree."""
    start = oracle.mlp(case.inputs[0], torch.float64)
    first = _loss(start, case)
    shapes = [tuple(p.shape) for p in start.parameters()]
    zero = case.answers[0]
    for rank, answer in enumerate(case.answers):
        arrays = [finite_floats(answer.get(f"p{i}"), shape) for i, shape in enumerate(shapes)]
        if any(a is None for a in arrays):
            yield Finding("the parameters after training are not finite.", rank)
            continue
        model = oracle.mlp({f"p{i}": a for i, a in enumerate(arrays)}, torch.float64)
        loss = _loss(model, case)
        if not loss <= ENOUGH * first:
            yield Finding(
                f"after {LONG} steps of rank 1 with error feedback the loss is {loss:.3g}, at "
                f"first it was {first:.3g}; expected at most {ENOUGH * first:.3g}. What one step "
                "does not send has to come in later ones.",
                rank,
            )
        elif any(
            not oracle.agrees(zero.get(f"p{i}"), np.asarray(a, dtype=np.float64))
            for i, a in enumerate(arrays)
        ):
            yield Finding("the parameters differ from rank 0's.", rank)
