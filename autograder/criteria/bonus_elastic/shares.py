"""Criteria for task 1 of bonus_elastic: shares of a global batch, and the mean over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import finite_floats, item_of, plain, read_number
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs, per_rank

DTYPES = ("float32", "float64")  # of the model in `elastic_idle`

# --- elastic_share -------------------------------------------------------------------------------


@per_rank
def draw_share(rng: np.random.Generator) -> Values:
    """Pairs [batch size, ranks]: all small ones, then some drawn ones, most of them uneven."""
    asked = [[size, ranks] for ranks in range(1, 9) for size in range(1, 65)]
    for ranks in (11, 13, 16):
        asked.append([ranks * int(rng.integers(9, 90)) + int(rng.integers(1, ranks)), ranks])
    return {"asked": asked}


def observe_share(share_of_batch: Any, inputs: Values, context: Context) -> Values:
    """Begin and end of every share."""
    answer = []
    for size, ranks in inputs["asked"]:
        shares = []
        for rank in range(ranks):
            share = share_of_batch(size, ranks, rank)
            if not isinstance(share, slice):
                raise TypeError(f"share_of_batch: expected a slice, got {type(share).__name__}")
            begin, end, stride = share.indices(size)
            shares.append([begin, end] if stride == 1 else [begin, end, stride])
        answer.append(shares)
    return {"shares": answer}


def judge_share(case: Case) -> Iterator[Finding]:
    """Shares follow one another, make up the batch, and differ by one sample at most.

    Any ranks may have the larger ones.
    """
    for rank, answer in enumerate(map(plain, case.answers)):
        for number, (size, ranks) in enumerate(case.inputs[rank]["asked"]):
            shares = item_of(answer.get("shares"), number)
            if problem := _problem(shares, size, ranks):
                text = f"{size} samples on {ranks} ranks, shares {shares}: {problem}"
                yield Finding(text, rank)
                break


def _problem(shares: Any, size: int, ranks: int) -> str:
    right = (
        isinstance(shares, list)
        and len(shares) == ranks
        and all(isinstance(s, list) and len(s) == 2 for s in shares)
        and all(type(number) is int for s in shares for number in s)
    )
    if not right:
        return "expected [begin, end] of every rank."
    sizes = [max(0, end - begin) for begin, end in shares]
    at = 0
    for rank, (begin, end) in enumerate(shares):
        if end > begin and begin != at:
            what = "twice" if begin < at else "by nobody"
            return f"rank {rank} begins at {begin}, expected {at}: samples are taken {what}."
        at = max(at, end)
    if at != size:
        return f"they end at {at} of {size}: the last ones are taken by nobody."
    if max(sizes) - min(sizes) > 1:
        return (
            f"sizes are {sizes}: expected a difference of 1 at most. All ranks wait for the one "
            "that has most."
        )
    return ""


# --- elastic_gradient, elastic_idle --------------------------------------------------------------


def draw_gradient(draw: Draw) -> list[Values]:
    """One model for all ranks, and a different number of rows on every rank."""
    counts = [int(c) for c in draw.shared("counts").permutation(draw.world_size) * 2 + 1]
    return _draw_rows(draw, counts)


def draw_idle(draw: Draw) -> list[Values]:
    """The same number of rows on every rank except one, which has none."""
    rng = draw.shared("counts")
    counts = [int(rng.integers(2, 5))] * draw.world_size
    if draw.world_size > 1:
        counts[int(rng.integers(draw.world_size))] = 0
    return _draw_rows(draw, counts)


def _draw_rows(draw: Draw, counts: list[int]) -> list[Values]:
    rng = draw.shared()
    sizes = (int(rng.integers(3, 6)), int(rng.integers(4, 8)), 2)
    parameters = oracle.draw_parameters(rng, sizes)
    return [
        parameters
        | oracle.draw_batch(draw.private(rank), count, sizes)
        | {"own": count, "all": sum(counts)}
        for rank, count in enumerate(counts)
    ]


def observe_gradient(combine: Any, inputs: Values, context: Context) -> Values:
    """Gradients and loss after `combine`, which gets float64 parameters as an iterator."""
    return _observe(combine, inputs, context, iter, "float64")


def observe_idle(combine: Any, inputs: Values, context: Context) -> Values:
    """As `observe_gradient`, once in each dtype, with a list, which can be iterated twice.

    Uninitialised memory, as of `torch.empty`, is set to nan here: it may hold nan in any run.
    """
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # this fills new memory with nan
    try:
        answers = {dtype: _observe(combine, inputs, context, list, dtype) for dtype in DTYPES}
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
    return {f"{dtype}/{name}": v for dtype, each in answers.items() for name, v in each.items()}


def _observe(
    combine: Any, inputs: Values, context: Context, as_what: Any, dtype_name: str
) -> Values:
    """Calls `combine` after a backward of the mean loss over this rank's rows, if it has any."""
    import torch

    dtype = getattr(torch, dtype_name)
    model = oracle.mlp(inputs, dtype).to(context.device)
    loss = 0.0
    if inputs["own"]:
        x, y = (torch.from_numpy(inputs[name]).to(context.device, dtype) for name in "xy")
        mean = oracle.mse(model(x), y)
        mean.backward()
        loss = mean.item()
    combined = combine(as_what(list(model.parameters())), loss, inputs["own"], inputs["all"])
    answer: Values = {"loss": np.array(read_number(combined, "combine"))}
    return answer | {
        f"g{i}": oracle.grad_of(p) for i, p in enumerate(model.parameters()) if p.grad is not None
    }


def judge_gradient(case: Case) -> Iterator[Finding]:
    """Every rank has the gradient and the loss of one process that has all rows.

    A `p.grad` may be new or changed in place, the loss a float or a tensor of one number.
    """
    given = case.inputs[0]
    x, y = (np.concatenate([values[name] for values in case.inputs]) for name in "xy")
    right, loss = oracle.gradients(given, x, y), _loss(given, x, y)
    local = [
        oracle.gradients(given, values["x"], values["y"]) if values["own"] else None
        for values in case.inputs
    ]
    there = [each for each in local if each is not None]
    plain_mean = [
        np.sum([each[i] for each in there], axis=0) / case.world_size for i in range(len(right))
    ]
    for rank, answer in enumerate(case.answers):
        mine = local[rank]
        for i, expected in enumerate(right):
            got = answer.get(f"g{i}")
            if wrong := oracle.differs(
                rank,
                f"gradient of parameter {i}",
                got,
                expected,
                dtype="float64",
                hint=_hint(got, expected, plain_mean[i], mine[i] if mine else None, case),
            ):
                yield wrong
                break
        else:
            # A loss rounded to float32 would pass oracle's tolerance in one of 25 draws.
            if wrong := differs(
                rank,
                "the loss that combine returns",
                answer.get("loss"),
                np.array(loss),
                rtol=1e-12,
                atol=0.0,
                hint="Losses are weighted like gradients, and nothing is rounded to float32.",
            ):
                yield wrong


def judge_idle(case: Case) -> Iterator[Finding]:
    """All ranks have the same gradient, with the direction of the gradient of all rows.

    `elastic_gradient` checks the exact length.
    """
    for dtype in DTYPES:
        answers = [
            {name.removeprefix(f"{dtype}/"): value for name, value in answer.items()}
            for answer in case.answers
        ]
        yield from _judge_idle(replace(case, answers=answers), dtype)


def _judge_idle(case: Case, dtype: str) -> Iterator[Finding]:
    given = case.inputs[0]
    x, y = (np.concatenate([values[name] for values in case.inputs]) for name in "xy")
    right = np.concatenate([g.ravel() for g in oracle.gradients(given, x, y)])
    story = f"(The model is {dtype}. The ranks have {[v['own'] for v in case.inputs]} samples.)"
    first: np.ndarray | None = None
    told = [finite_floats(answer.get("loss"), ()) for answer in case.answers]
    losses = [np.nan if loss is None else float(loss) for loss in told]
    busy = [loss for loss, values in zip(losses, case.inputs, strict=True) if values["own"]]
    agreed = np.allclose(busy, busy[0], rtol=1e-4)  # if not, `elastic_gradient` says so
    for rank, answer in enumerate(case.answers):
        got = _all_gradients(answer, oracle.parameters_of(given))
        if got is None:
            yield Finding(
                f"{story} p.grad is None, not of the parameter's shape, or has nan or inf: also a "
                "rank without samples needs the gradient of the batch. (Here memory that nobody "
                "has set, as of torch.empty, holds nan, and 0 times nan is nan.)",
                rank,
            )
            continue
        first = got if first is None else first
        scale = float(got @ right / (right @ right))
        along = np.abs(got - scale * right).max() <= 1e-3 * np.abs(right).max()
        if not 0.1 < scale < 2.0 * case.world_size or not along:
            yield Finding(
                f"{story} that is not the gradient of the global batch, on whatever scale.",
                rank,
            )
        elif np.abs(got - first).max() > 1e-5 * np.abs(right).max():
            yield Finding(f"{story} this rank has a different gradient than rank 0.", rank)
        elif agreed and not np.isclose(losses[rank], busy[0], rtol=1e-4):
            yield Finding(
                f"{story} this rank returned a loss of {losses[rank]}, the others {busy[0]:.6g}: "
                "also a rank without samples returns the mean loss of the global batch.",
                rank,
            )


def _all_gradients(answer: Values, parameters: list[np.ndarray]) -> np.ndarray | None:
    """All gradients in one vector; None if a gradient is missing, not finite or misshapen."""
    pieces = []
    for i, parameter in enumerate(parameters):
        gradient = finite_floats(answer.get(f"g{i}"), parameter.shape)
        if gradient is None:
            return None
        pieces.append(gradient.ravel())
    return np.concatenate(pieces)


def _loss(given: Values, x: np.ndarray, y: np.ndarray) -> float:
    import torch

    model = oracle.mlp(given, torch.float64)
    return oracle.mse(model(torch.from_numpy(x).double()), torch.from_numpy(y).double()).item()


def _hint(got: Any, right: np.ndarray, mean: np.ndarray, own: Any, case: Case) -> str:
    counts = [values["own"] for values in case.inputs]
    text = f"(The ranks have {counts} samples.)"
    if oracle.agrees(got, right):
        return "Nearly right: something is rounded to float32 on its way; the model is float64."
    if oracle.agrees(got, mean):
        return (
            f"{text} That is the plain mean over ranks: a sample on a rank that has few counts "
            "for more than one on a rank that has many."
        )
    if own is not None and oracle.agrees(got, own):
        return (
            f"{text} That is this rank's own gradient: it was not reduced, or nothing was written "
            "back. `parameters` may be an iterator, which is used up once."
        )
    if isinstance(got, np.ndarray) and got.shape == right.shape and not got.any():
        return f"{text} That is zero: parameters may be an iterator, which is used up once."
    return f"{text} A rank's mean counts by num_own / num_all, and the sum over ranks is taken."
