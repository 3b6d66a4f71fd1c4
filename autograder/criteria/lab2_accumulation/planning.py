"""Criteria for batch arithmetic and for comparing runs at the same global batch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import item_of, number_or_none, told
from autograder.criteria.common.resumed import own_random_numbers
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

# --- arithmetic ----------------------------------------------------------------------------------


def draw_batch_size(draw: Draw) -> list[Values]:
    """Micro-batch sizes, numbers of micro-batches and ranks; some global batches do not divide."""
    rng = draw.shared()
    rows = []
    for number in range(6):
        micro, k, ranks = (int(v) for v in rng.integers(2, 17, size=3))
        rows.append([micro, k, ranks, 0 if number < 4 else int(rng.integers(1, micro * ranks))])
    # Just above and just below a multiple, exactly one round, and less than that.
    for k, rest in ((3, 1), (3, -1), (1, 0), (1, -1)):
        micro, ranks = (int(v) for v in rng.integers(2, 17, size=2))
        rows.append([micro, k, ranks, rest])
    # So many samples a round that one more or less is lost in a quotient.
    for rest in (1, -1):
        micro, ranks = (int(v) for v in rng.integers(500, 1000, size=2))
        rows.append([micro, 2, ranks, rest])
    # A batch that is a multiple of the micro-batch and of the ranks, but not of their product.
    common, a, b = (int(v) for v in rng.integers(2, 5, size=3))
    rows.append([common * a, 2, common * b, common * a * b])
    rates = [
        [
            round(float(rng.uniform(0.001, 1)), 4),
            int(rng.integers(1, 9)) * 32,
            int(rng.integers(1, 100)) * 32,
        ]
        for _ in range(4)
    ]
    # A batch more than 1,000 times as large, and a smaller one.
    rates[-2][1:] = [32, int(rng.integers(1000, 2000)) * 32]
    rates[-1][1:] = [int(rng.integers(5, 9)) * 32, int(rng.integers(1, 5)) * 32]
    return [{"rows": rows, "rates": rates} for _ in range(draw.world_size)]


def observe_batch_size(subject: Any, inputs: Values, context: Context) -> Values:
    """Calls the three functions; a ValueError of the second function counts as its answer."""
    effective_batch_size, accumulation_steps_for, scaled_lr = subject
    answer: Values = {"sizes": [], "steps": [], "rates": []}
    for micro, k, ranks, rest in inputs["rows"]:
        answer["sizes"].append(_plain(effective_batch_size(micro, k, ranks)))
        try:
            answer["steps"].append(
                _plain(accumulation_steps_for(micro * k * ranks + rest, micro, ranks))
            )
        except ValueError:
            answer["steps"].append("ValueError")
    for rate, base, size in inputs["rates"]:
        answer["rates"].append(_plain(scaled_lr(rate, base, size)))
    return answer


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    return value if isinstance(value, int | float) else repr(value)[:80]


def judge_batch_size(case: Case) -> Iterator[Finding]:
    """micro-batch x k x ranks; its inverse, or a ValueError; lr proportional to the batch size."""
    for rank, answer in enumerate(case.answers):
        inputs = case.inputs[rank]
        for name, number, call, expected in _expected_arithmetic(inputs):
            said = told(answer, name)
            got = item_of(said, number)
            right = got == expected
            if isinstance(expected, float):
                right = isinstance(got, float | int) and bool(np.isclose(got, expected, rtol=1e-6))
            elif isinstance(expected, int):
                right = right and isinstance(got, int) and not isinstance(got, bool)
            if not right:
                yield Finding(f"{call}: expected {expected}, got {got}.", rank)
                break


def _expected_arithmetic(inputs: Values):
    for i, (micro, k, ranks, rest) in enumerate(inputs["rows"]):
        size = micro * k * ranks
        yield "sizes", i, f"effective_batch_size({micro}, {k}, {ranks})", size
        what = f"accumulation_steps_for({size + rest}, {micro}, {ranks})"
        yield "steps", i, what, "ValueError" if rest else k
    for i, (rate, base, size) in enumerate(inputs["rates"]):
        yield "rates", i, f"scaled_lr({rate}, {base}, {size})", rate * size / base


# --- convergence ---------------------------------------------------------------------------------

SIZES = (4, 8, 1)
KS, NUM_STEPS, LR = (1, 2, 3, 8), 4, 0.3


def draw_convergence(draw: Draw) -> list[Values]:
    """Data and weights, the same on all ranks; the values of k in a random order."""
    rng = draw.shared()
    batch = 24 * draw.world_size * int(rng.integers(1, 3))
    ks = [int(k) for k in rng.permutation(KS)]
    values = oracle.draw_parameters(rng, SIZES) | {"global_batch": batch, "ks": ks}
    values |= oracle.draw_batch(rng, batch * (NUM_STEPS + 1), SIZES)  # more than is needed
    return [dict(values) for _ in range(draw.world_size)]


def observe_convergence(compare_convergence: Any, inputs: Values, context: Context) -> Values:
    """`_observe_convergence`, with different states of the default generators on each rank."""
    with own_random_numbers():
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(context.rank)
        return _observe_convergence(compare_convergence, inputs, context)


def _observe_convergence(compare_convergence: Any, inputs: Values, context: Context) -> Values:
    """Curves made with our own training step, and the sizes of the micro-batches that it got."""
    sizes: list[list[int]] = []

    def make_model() -> nn.Module:
        return oracle.mlp(inputs).to(context.device)

    def train_step(model: nn.Module, micro_batches: Any) -> float:
        if not isinstance(micro_batches, Sequence):
            raise TypeError(
                "train_step(model, micro_batches): expected a list of pairs (x, y), got "
                f"{type(micro_batches).__name__}"
            )
        if len(sizes) < 4 * len(inputs["ks"]) * NUM_STEPS:
            sizes.append([len(x) for x, _ in micro_batches])
        return _train_step(model, list(micro_batches))

    x, y = (torch.from_numpy(inputs[n]).to(context.device) for n in "xy")
    curves = compare_convergence(
        make_model,
        train_step,
        x,
        y,
        global_batch_size=inputs["global_batch"],
        num_steps=NUM_STEPS,
        accumulation_steps=tuple(inputs["ks"]),
        rank=context.rank,
        world_size=context.world_size,
    )
    if not isinstance(curves, dict):
        raise TypeError(
            f"compare_convergence: expected a dict k -> losses, got {type(curves).__name__}"
        )
    answer: Values = {"sizes": sizes}
    for k in inputs["ks"]:
        losses = [number_or_none(loss) for loss in curves.get(k, ())]
        answer[f"curve/{k}"] = np.array([np.nan if v is None else v for v in losses])
    return answer


def _train_step(model: nn.Module, micro_batches: list[Any]) -> float:
    """One SGD step with the mean gradient over all ranks' samples; returns the mean loss before."""
    first = micro_batches[0][0]
    count = sum(len(x) for x, _ in micro_batches)
    totals = torch.zeros(2, dtype=torch.float64, device=first.device)
    model.zero_grad()
    for x, y in micro_batches:
        loss = oracle.mse(model(x), y) * len(x)
        loss.backward()
        totals += torch.stack([loss.detach().double(), torch.tensor(len(x)).to(totals)])
    assert count > 0
    dist.all_reduce(totals)
    for p in model.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
        with torch.no_grad():
            p -= LR * p.grad / totals[1].to(p.dtype)
    return (totals[0] / totals[1]).item()


def judge_convergence(case: Case) -> Iterator[Finding]:
    """Each k gives k equal micro-batches per rank and step, and the curve of one large batch.

    Which sample is on which rank and in which micro-batch is free, and so is the order of the runs.
    """
    for rank, answer in enumerate(case.answers):
        inputs = case.inputs[rank]
        if message := _sizes_problem(inputs, told(answer, "sizes"), case.world_size):
            yield Finding(message, rank)
            continue
        batch = inputs["global_batch"]
        steps = [
            [(inputs["x"][i : i + batch], inputs["y"][i : i + batch])]
            for i in range(0, batch * NUM_STEPS, batch)
        ]
        _, losses = oracle.train(inputs, steps, LR)
        expected = np.array(losses)[:, 0]
        for k in inputs["ks"]:
            got = answer.get(f"curve/{k}")
            hint = "Step s takes samples s·G to (s+1)·G, each on one rank and once."
            begun = got[0] if isinstance(got, np.ndarray) and got.shape == expected.shape else None
            if begun is not None and not np.isclose(begun, expected[0], rtol=1e-3):
                hint = (
                    "It is wrong from the first step: does every k begin with a new make_model(), "
                    "and with the first samples, each on one rank only?"
                )
            if wrong := oracle.differs(rank, f"curve of k={k}", got, expected, hint=hint):
                yield wrong
                break


def _sizes_problem(inputs: Values, sizes: Any, world_size: int) -> str:
    """What is wrong with the micro-batches that the training step got; "" if nothing."""
    given = [s for s in sizes if isinstance(s, list)] if isinstance(sizes, list) else []
    found = Counter(tuple(s) for s in given if all(isinstance(n, int) for n in s))
    for k in inputs["ks"]:
        wanted = (inputs["global_batch"] // (world_size * k),) * k
        if found[wanted] != NUM_STEPS:
            if found[wanted]:
                return (
                    f"global batch {inputs['global_batch']}, {world_size} ranks, k={k}: expected "
                    f"{NUM_STEPS} steps with micro-batches of {list(wanted)} samples on each rank, "
                    f"got {found[wanted]}: make num_steps steps, however many samples there are."
                )
            return (
                f"global batch {inputs['global_batch']}, {world_size} ranks, k={k}: expected "
                f"{NUM_STEPS} steps with micro-batches of {list(wanted)} samples on each rank; "
                f"the training step was given {[list(s) for s in found][:6]}."
            )
    return ""
