"""Criteria for what a ring all-reduce computes, on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import same_array, told
from autograder.criteria.common.places import alone
from autograder.criteria.common.pretending import in_world_of
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs

LARGE = 600_000  # numbers: far more than a socket accepts while no receiver reads


# --- the exchange --------------------------------------------------------------------------------

EXCHANGES = ("0", "1", "2", "3")


def draw_exchange(draw: Draw) -> list[Values]:
    """Private tensors: a large one and three small ones of several dtypes.

    The last one has a different size on each rank, and on every second rank a different dtype.
    """
    sizes = [int(draw.shared().integers(4, 9)) + 2 * rank for rank in range(draw.world_size)]
    sizes[int(draw.shared("empty").integers(draw.world_size))] = 0
    dtypes = [("float64", "float32")[rank % 2] for rank in range(draw.world_size)]
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        inputs.append(
            {
                "0": rng.normal(size=LARGE).astype(np.float32),
                "1": rng.normal(size=3),
                "2": rng.integers(0, 1000, size=7),
                "3": rng.normal(size=sizes[rank]).astype(dtypes[rank]),
                "comes": [sizes[rank - 1], dtypes[rank - 1]],
            }
        )
    return inputs


def observe_exchange(exchange: Any, inputs: Values, context: Context) -> Values:
    """The content of `incoming` and of `outgoing` after each exchange."""
    answer: Values = {}
    for name in EXCHANGES:
        outgoing = torch.from_numpy(inputs[name].copy()).to(context.device)
        size, dtype = inputs["comes"] if name == "3" else (len(outgoing), inputs[name].dtype.name)
        incoming = outgoing.new_full((size,), -1, dtype=getattr(torch, dtype))
        exchange(outgoing, incoming)
        answer[name] = incoming.cpu().numpy()
        answer[f"sent/{name}"] = outgoing.cpu().numpy()
    outgoing = torch.from_numpy(inputs["1"].copy()).to(context.device)
    incoming = torch.full_like(outgoing, -1)
    with alone(context), in_world_of(exchange, 1, rank=0):
        exchange(outgoing, incoming)
    answer["same memory"] = incoming.data_ptr() == outgoing.data_ptr()
    outgoing.zero_()  # a copy in `incoming` does not change
    answer["alone"] = incoming.cpu().numpy()
    return answer


def judge_exchange(case: Case) -> Iterator[Finding]:
    """Requires that each rank receives the tensor of the rank before it and keeps its own.

    Handles, a batch or a thread will do, and an empty tensor may travel or not.
    """
    for rank, answer in enumerate(case.answers):
        before = (rank - 1) % case.world_size
        for name in EXCHANGES:
            expected = case.inputs[before][name]
            what = f"incoming, {expected.size} numbers"
            hint = f"It should be what rank {before} sends, complete when exchange returns."
            after, got = (rank + 1) % case.world_size, answer.get(name)
            if after != before and same_array(got, case.inputs[after][name]):
                hint = f"That is what rank {after} sends: send to rank + 1, receive from rank - 1."
            if wrong := differs(
                rank, what, answer.get(name), expected, rtol=0.0, atol=0.0, hint=hint
            ) or differs(
                rank,
                "outgoing after the exchange",
                answer.get(f"sent/{name}"),
                case.inputs[rank][name],
                rtol=0.0,
                atol=0.0,
            ):
                yield wrong
                break
        else:
            if wrong := differs(
                rank,
                "incoming, where there is one rank",
                answer.get("alone"),
                case.inputs[rank]["1"],
                rtol=0.0,
                atol=0.0,
                hint="incoming has outgoing's memory, and changed with it afterwards: copy."
                if told(answer, "same memory") is True
                else "There is nobody to talk to, so it gets a copy of outgoing.",
            ):
                yield wrong


# --- the all-reduce ------------------------------------------------------------------------------


def _draw(draw: Draw, cases: list[tuple[tuple[int, ...], str, str]]) -> list[Values]:
    """Private tensors, one for each case (shape, dtype, operation)."""
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        values: Values = {"cases": [[list(shape), dtype, op] for shape, dtype, op in cases]}
        for number, (shape, dtype, _) in enumerate(cases):
            x = rng.normal(size=shape) * 10
            values[str(number)] = x.astype(dtype)
        inputs.append(values)
    return inputs


def draw_sum(draw: Draw) -> list[Values]:
    """Sizes that divide evenly and that do not, a matrix, three dtypes, a large tensor.

    Chunks of different dtypes differ in length: `ring_small` has equally long ones.
    """
    rng, n = draw.shared(), draw.world_size
    return _draw(
        draw,
        [
            ((n * int(rng.integers(5, 9)),), "float32", "sum"),
            ((n * int(rng.integers(30, 60)) + 1,), "float64", "sum"),
            ((n * int(rng.integers(20, 31)) - 1,), "int64", "sum"),
            ((int(rng.integers(3, 6)), int(rng.integers(7, 12))), "float32", "sum"),
            ((LARGE + int(rng.integers(1, max(2, n))),), "float32", "sum"),
        ],
    )


def draw_ops(draw: Draw) -> list[Values]:
    """Cases for mean and max; no chunk is as long as one of a different dtype in `draw_sum`."""
    rng, n = draw.shared(), draw.world_size
    ranges = ((4, 19), (30, 60), (30, 60))
    sizes = [(n * int(rng.integers(*each)) + 1,) for each in ranges]
    return _draw(
        draw,
        [
            (sizes[0], "float32", "mean"),
            (sizes[1], "float64", "max"),
            (sizes[2], "float64", "mean"),
        ],
    )


def draw_small(draw: Draw) -> list[Values]:
    """Tensors with fewer numbers than ranks."""
    n = draw.world_size
    return _draw(
        draw,
        [
            ((1,), "float32", "sum"),
            ((1, max(1, n - 1)), "float64", "sum"),
            ((0,), "float32", "sum"),
            ((), "float64", "sum"),
        ],
    )


def observe(ring_all_reduce: Any, inputs: Values, context: Context) -> Values:
    """The content of each tensor after the all-reduce, and what was returned."""
    answer: Values = {}
    for number, (_, _, op) in enumerate(inputs["cases"]):
        tensor = torch.from_numpy(np.array(inputs[str(number)])).to(context.device)
        returned = ring_all_reduce(tensor, op)
        answer[str(number)] = tensor.cpu().numpy()
        answer[f"is/{number}"] = (
            isinstance(returned, torch.Tensor)
            and returned.shape == tensor.shape
            and returned.data_ptr() == tensor.data_ptr()
        )
        answer[f"shape/{number}"] = list(getattr(returned, "shape", ()))
        if isinstance(returned, torch.Tensor) and returned is not tensor:
            answer[f"returned/{number}"] = returned.cpu().numpy()
    return answer


def judge_sum(case: Case) -> Iterator[Finding]:
    """Requires in each tensor the result that one process computes in float64."""
    return _judge(case, in_place=True)


def judge(case: Case) -> Iterator[Finding]:
    """As `judge_sum`, but a result may be returned only, which costs `judge_sum` alone.

    A mean may be divided before the first step, between the halves or at the end.
    """
    return _judge(case, in_place=False)


def _judge(case: Case, *, in_place: bool) -> Iterator[Finding]:
    for rank, answer in enumerate(case.answers):
        for number in range(len(case.inputs[0]["cases"])):
            wrong = _problem(case, rank, number, answer.get(str(number)))
            elsewhere = answer.get(f"returned/{number}")
            if in_place and not wrong and answer.get(f"is/{number}") is not True:
                shape = case.inputs[0]["cases"][number][0]
                text = f"the sum is in the tensor of shape {shape}, but the tensor is not returned."
                if elsewhere is not None and told(answer, f"shape/{number}") != list(shape):
                    text += f" What is returned has the shape {told(answer, f'shape/{number}')}."
                wrong = Finding(text, rank)
            if wrong and not in_place and elsewhere is not None:
                wrong = _problem(case, rank, number, elsewhere)
            if not wrong and not in_place:
                wrong = _not_as_it_was(case, rank, number)
            if wrong:
                yield wrong
                break


def _not_as_it_was(case: Case, rank: int, number: int) -> Finding | None:
    """A finding if only the tensor without dimensions, or without numbers, came back wrongly."""
    answer, shapes = case.answers[rank], [shape for shape, _, _ in case.inputs[0]["cases"]]
    others = [answer.get(f"is/{k}") for k in range(len(shapes)) if k != number]
    came = told(answer, f"shape/{number}")
    if not all(is_right is True for is_right in others):
        return None
    if not shapes[number] and came != []:
        return Finding(f"a tensor without dimensions came back in the shape {came}.", rank)
    if 0 in shapes[number] and answer.get(f"is/{number}") is not True:
        return Finding("a tensor without numbers is not returned.", rank)
    return None


def _problem(case: Case, rank: int, number: int, got: Any) -> Finding | None:
    reduce = {"sum": np.sum, "mean": np.mean, "max": np.max}
    shape, dtype, op = case.inputs[0]["cases"][number]
    everyone = np.stack([i[str(number)].astype(np.float64) for i in case.inputs])
    expected = reduce[op](everyone, axis=0)
    return oracle.differs(
        rank,
        f"{op} of {dtype} {shape}",
        got,
        expected,
        dtype="float64" if dtype != "float32" else dtype,
        hint=_why(got, expected, everyone, rank, op),
        terms=list(everyone),
    )


def _is_divided_each_time(got: np.ndarray, everyone: np.ndarray) -> bool:
    """Whether each value is a sum along the ring, from any rank on, divided after each step."""
    n = len(everyone)
    found = np.zeros(got.shape, bool)
    for start in range(n):
        for direction in (1, -1):
            value = everyone[start]
            for step in range(1, n):
                value = (value + everyone[(start + direction * step) % n]) / n
            found |= np.isclose(got, value, rtol=1e-3)
    return bool(found.all())


def _why(got: Any, expected: np.ndarray, everyone: np.ndarray, rank: int, op: str) -> str:
    if not isinstance(got, np.ndarray) or got.shape != expected.shape or not expected.size:
        return ""
    if got.dtype.kind not in "fiu":
        return ""
    if np.allclose(got, everyone[rank]):
        return "The tensor is as it was: the result has to be written into it."
    total, n = everyone.sum(axis=0), len(everyone)
    if op != "sum" and np.allclose(got, total, rtol=1e-3):
        return "That is the sum."
    if op == "mean" and n > 2 and np.allclose(got * (n - 1), total, rtol=1e-3):
        return (
            f"That is the sum divided by {n - 1}: is a number written into the code, or "
            "LOCAL_WORLD_SIZE taken for WORLD_SIZE?"
        )
    if op == "mean" and n > 1 and _is_divided_each_time(got, everyone):
        return f"It was divided by {n} in every step: divide once, at the end."
    if op != "max" and n > 1:
        twice = np.isclose(got * (n if op == "mean" else 1), total + everyone[rank], rtol=1e-3)
        if twice.sum() >= max(1, got.size // n):
            return (
                "Part of it has this rank's own numbers twice: in the second half what comes "
                "replaces what is there."
            )
    wrong = np.flatnonzero(~np.isclose(got.ravel(), expected.ravel(), rtol=1e-3))
    if got.size > 2 * len(everyone) and wrong.size and wrong[0] >= got.size - len(everyone):
        return "Only the end is wrong: is the last, odd part in a chunk?"
    return ""
