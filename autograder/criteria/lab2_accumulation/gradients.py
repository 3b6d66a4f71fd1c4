"""Criteria for accumulating on one device, without communication: gradient, loss and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import number_or_none, told
from autograder.criteria.common.weights import (
    Gradient,
    are_close,
    batch_gradients,
    collect,
    present,
    show,
    weights_of,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab2_accumulation.memory import (
    MEMORY_LIMIT,
    EmulatedMemory,
    compared,
    too_much_memory,
)

SIZES = (5, 8, 8, 2)
NUM_PARAMETERS = 6
EQUAL = 3  # samples of a micro-batch


# --- draw and observe ----------------------------------------------------------------------------


def _draw(
    draw: Draw, sizes: list[list[int]], lengths: Mapping[int, list[int]] = MappingProxyType({})
) -> list[Values]:
    """One private model per rank, and for each group micro-batches of these numbers of samples.

    Args:
        lengths: for groups whose samples are sequences, their length in each micro-batch.
    """
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        values: Values = oracle.draw_parameters(rng, SIZES) | {"sizes": sizes}
        for group, counts in enumerate(sizes):
            for i, count in enumerate(counts):
                shape = (count, lengths[group][i]) if group in lengths else (count,)
                batch = oracle.draw_batch(rng, int(np.prod(shape)), SIZES)
                values |= {f"{n}/{group}/{i}": batch[n].reshape(*shape, -1) for n in "xy"}
        inputs.append(values)
    return inputs


def draw_equal(draw: Draw) -> list[Values]:
    """Three groups of equal micro-batches; each group has a different number of micro-batches."""
    ks = draw.shared().permutation(np.arange(2, 8))[:3]
    return _draw(draw, [[EQUAL] * int(k) for k in ks])


def draw_unequal(draw: Draw) -> list[Values]:
    """One group of equal micro-batches, then three groups of micro-batches that differ in size.

    In the last of them a sample is a sequence, longer in some micro-batches, to find code that
    counts numbers instead of samples. Then a group to find mistakes of code that writes p.grad by
    hand: two layers share a bias, and a third layer's bias is frozen. The group `again` has the
    model of the group before.
    """
    rng = draw.shared("sequences")
    sequences, (long, short) = (
        [int(n) for n in rng.permutation(of)] for of in ([1, 2, 3, 5], [7, 2])
    )
    sizes = [[EQUAL] * 3, *_unequal(draw), sequences, [EQUAL] * 4]
    inputs = _draw(draw, sizes, {len(sizes) - 2: [long, long, short, short]})
    return [values | {"shares": len(sizes) - 1, "again": 2} for values in inputs]


def draw_loss(draw: Draw) -> list[Values]:
    """Two groups of equal micro-batches, and one group of micro-batches that differ in size."""
    return _draw(draw, [[EQUAL] * 2, [EQUAL] * 5, *_unequal(draw)[:1]])


def _unequal(draw: Draw) -> list[list[int]]:
    rng = draw.shared()
    first, second = ([int(n) for n in rng.permutation([1, 2, 4, 7, 9])[:k]] for k in (3, 4))
    # The last one is smaller than the first, as at the end of a dataset, or larger.
    first[0], first[-1] = max(first[0], first[-1]), min(first[0], first[-1])
    second[0], second[-1] = min(second[0], second[-1]), max(second[0], second[-1])
    return [first, second]


def batches_of(inputs: Values, group: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The micro-batches of a group, as arrays."""
    count = len(inputs["sizes"][group])
    return [(inputs[f"x/{group}/{i}"], inputs[f"y/{group}/{i}"]) for i in range(count)]


def model_of(inputs: Values, group: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The model of a group; in the group `shares` two layers share a bias, the last is frozen."""
    model = oracle.mlp(inputs, dtype)
    if group == inputs.get("shares"):
        model[2].bias = model[0].bias
        model[-1].bias.requires_grad_(False)  # type: ignore[union-attr]
    return model


def observe_together(accumulate_gradients: Any, inputs: Values, context: Context) -> Values:
    """Like `observe`, after a barrier of all ranks.

    This is the lab's first check. On a student's machine, all ranks must have connected to the
    practice referee before any rank answers.
    """
    dist.barrier()
    return observe(accumulate_gradients, inputs, context)


def observe(accumulate_gradients: Any, inputs: Values, context: Context) -> Values:
    """Gradients and the returned loss of every group.

    Each starts with a new model; only the group `again` goes on with that of the group before.
    """
    answer: Values = {}
    loss_fn, model = oracle.ordered(oracle.mse, answer), nn.Module()
    for group in range(len(inputs["sizes"])):
        if group != inputs.get("again"):
            model = model_of(inputs, group).to(context.device)
        model.zero_grad()
        batches = [
            (torch.from_numpy(x).to(context.device), torch.from_numpy(y).to(context.device))
            for x, y in batches_of(inputs, group)
        ]
        frozen = [p for p in model.parameters() if not p.requires_grad]
        loss = number_or_none(accumulate_gradients(model, batches, loss_fn))
        if loss is not None:
            answer[f"loss/{group}"] = np.array(loss)
        for i, p in enumerate(model.parameters()):
            answer[f"g{group}/{i}"] = oracle.grad_of(p)
        answer[f"filled/{group}"] = any(p.grad is not None for p in frozen)
    return answer


# --- judge ---------------------------------------------------------------------------------------


def judge_scale(case: Case) -> Iterator[Finding]:
    """Each of k equal micro-batches enters with weight 1/k.

    Losses or gradients may be divided; p.grad may be the same tensor or a new one.
    """
    for rank, answer in enumerate(case.answers):
        for group, counts in enumerate(case.inputs[rank]["sizes"]):
            k, basis = len(counts), batch_gradients(case.inputs[rank], _batches(case, rank, group))
            weights = weights_of(basis, collect(answer, f"g{group}", NUM_PARAMETERS))
            if weights is None:
                yield Finding(_no_sum(k), rank)
            elif not are_close(weights, [1 / k] * k):
                yield Finding(
                    f"{k} equal micro-batches entered the gradient with weights "
                    f"{show(weights)}; "
                    f"expected {1 / k:.3g} each. {_why_scale(weights, k)}".strip(),
                    rank,
                )
            else:
                continue
            break


def _why_scale(weights: np.ndarray, k: int) -> str:
    if are_close(weights, [1.0] * k):
        return f"backward() adds up: the loss of each has to be divided by {k} first."
    if are_close(weights, [1 / k**2] * k):
        return "It was divided by their number twice."
    if present(weights) == [k - 1]:
        return "Only the last is left: do not clear the gradients between micro-batches."
    if np.ptp(weights) < 1e-3:
        return "Is the number of micro-batches written into the code?"
    return ""


def judge_unequal(case: Case) -> Iterator[Finding]:
    """Micro-batches of n_i samples enter in proportion to their sizes.

    A factor that is wrong for equal micro-batches, too, is judged by `judge_scale` only.
    """
    for rank, answer in enumerate(case.answers):
        equal = weights_of(
            batch_gradients(case.inputs[rank], _batches(case, rank, 0)),
            collect(answer, "g0", NUM_PARAMETERS),
        )
        factor_is_right = equal is not None and bool(np.isclose(equal.sum(), 1.0, rtol=1e-3))
        for group, counts in enumerate(case.inputs[rank]["sizes"]):
            basis = _basis(case.inputs[rank], group)
            weights = weights_of(basis, collect(answer, f"g{group}", len(basis[0])))
            share, where = np.array(counts) / sum(counts), _where(case.inputs[rank], group)
            if weights is None:
                yield Finding(_no_sum(len(counts)) + where, rank)
                break
            total = float(weights.sum())
            if abs(total) < 1e-6 or not are_close(weights / total, share):
                why = ""
                if np.ptp(weights) < 1e-3:
                    why = (
                        " All have the same weight, so a sample in a small one counts more "
                        "than a sample in a large one."
                    )
                shapes = [x.shape for x, _ in _batches(case, rank, group)]
                if len(shapes[0]) == 3:
                    why = f" The inputs are {[tuple(s) for s in shapes]}: is a sample one row?"
                yield Finding(
                    f"micro-batches of {counts} samples entered the gradient with weights "
                    f"{show(weights)}; expected {show(share)}, a weight for each according to its "
                    f"size.{why}{where}",
                    rank,
                )
                break
            if factor_is_right and not np.isclose(total, 1.0, rtol=1e-3):
                why = f"there are {sum(counts)} samples, and every one of them counts."
                if group == case.inputs[rank].get("again"):
                    why = "the call before was right. Does something of it stay on the model?"
                yield Finding(
                    f"micro-batches of {counts} samples entered with {total:.3g} times the weight "
                    f"that they should have: {why}{where}",
                    rank,
                )
                break
            if told(answer, f"filled/{group}") is True:
                yield Finding(
                    "a frozen parameter has a gradient afterwards: its p.grad stays None. Zeros "
                    "are a gradient, too: with weight decay the optimizer would move it.",
                    rank,
                )
                break


def _where(inputs: Values, group: int) -> str:
    if group == inputs.get("shares"):
        return " (Two layers share a bias here, and another bias is frozen.)"
    if group == inputs.get("again"):
        return " (This was the second call with the same model; its gradients were clear.)"
    return ""


def judge_loss(case: Case) -> Iterator[Finding]:
    """The returned loss is the mean over all samples.

    For micro-batches that differ in size, the mean with the gradient's weights is right, too. The
    loss may be a float or a tensor of one number.
    """
    for rank, answer in enumerate(case.answers):
        if misused := oracle.find_misused_loss(answer, rank):
            yield misused
            continue
        for group, counts in enumerate(case.inputs[rank]["sizes"]):
            losses = _losses(case.inputs[rank], _batches(case, rank, group))
            got, expected, why = answer.get(f"loss/{group}"), np.mean(losses), ""
            if len(set(counts)) > 1:
                basis = batch_gradients(case.inputs[rank], _batches(case, rank, group))
                weights = weights_of(basis, collect(answer, f"g{group}", NUM_PARAMETERS))
                if weights is None or abs(weights.sum()) < 1e-6:
                    continue
                expected = np.dot(losses, weights) / weights.sum()
                by_size = np.dot(losses, counts) / sum(counts)
                if isinstance(got, np.ndarray) and np.allclose(got, by_size, rtol=1e-4):
                    continue
                why = "A smaller or larger micro-batch weighs less or more in the loss, too."
            if isinstance(got, np.ndarray) and got.shape == ():
                if np.isclose(got, expected / len(counts), rtol=1e-3):
                    why = f"That is the mean divided by {len(counts)} once more."
                elif np.isclose(got, losses[-1] / len(counts), rtol=1e-3):
                    why = "That is the scaled loss of the last micro-batch."
                elif np.isclose(got, losses[-1], rtol=1e-3):
                    why = "That is the loss of the last micro-batch."
                elif np.isclose(got, np.sum(losses), rtol=1e-3):
                    why = "That is the sum over micro-batches, not the mean."
            what = f"the returned loss of {len(counts)} micro-batches"
            if wrong := oracle.differs(rank, what, got, np.asarray(expected), hint=why):
                yield wrong
                break


def _losses(inputs: Values, batches: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    model = oracle.mlp(inputs, torch.float64)
    with torch.no_grad():
        return [
            oracle.mse(model(torch.from_numpy(x).double()), torch.from_numpy(y).double()).item()
            for x, y in batches
        ]


def _batches(case: Case, rank: int, group: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return batches_of(case.inputs[rank], group)


def _basis(inputs: Values, group: int) -> list[Gradient]:
    """The gradient of each micro-batch's mean loss, in float64, for the model of this group."""
    gradients = []
    for x, y in batches_of(inputs, group):
        model = model_of(inputs, group, torch.float64)
        oracle.mse(model(torch.from_numpy(x).double()), torch.from_numpy(y).double()).backward()
        gradients.append([oracle.grad_of(p) for p in model.parameters()])
    return gradients


def _no_sum(k: int) -> str:
    return (
        f"p.grad is not a sum of the gradients of the {k} micro-batches: is something in it that "
        "does not belong there, is a gradient missing, or was a part of it scaled twice?"
    )


# --- memory --------------------------------------------------------------------------------------

MEMORY_SAMPLES, MEMORY_K = 64, 8
PREDICTIONS = 3  # may be held at once: two, and one that a variable still refers to


def draw_memory(draw: Draw) -> list[Values]:
    """One group of large micro-batches."""
    return _draw(draw, [[MEMORY_SAMPLES] * MEMORY_K])


def observe_memory(accumulate_gradients: Any, inputs: Values, context: Context) -> Values:
    """Accumulates on a device whose emulated memory holds the activations of 2.5 micro-batches."""
    model = oracle.mlp(inputs).to(context.device)
    batches = [
        (torch.from_numpy(x).to(context.device), torch.from_numpy(y).to(context.device))
        for x, y in batches_of(inputs, 0)
    ]
    one = EmulatedMemory(float("inf"))
    with one.watch():
        oracle.mse(model(batches[0][0]), batches[0][1]).backward()
    model.zero_grad()
    memory = EmulatedMemory(MEMORY_LIMIT * one.peak_bytes)
    held = _count_predictions(model)
    with memory.watch():
        accumulate_gradients(model, batches, oracle.mse)
    answer: Values = {"peak": compared(one, memory), "predictions": max(held, default=0)}
    for i, p in enumerate(model.parameters()):
        answer[f"g0/{i}"] = oracle.grad_of(p)
    return answer


def _count_predictions(model: nn.Module) -> list[int]:
    """Gets, at each forward of `model` from now on, the number of its predictions in memory."""
    memories: list[StorageWeakRef] = []
    held: list[int] = []

    def note(module: Any, arguments: Any, output: torch.Tensor) -> None:
        memories.append(StorageWeakRef(output.untyped_storage()))
        held.append(sum(not memory.expired() for memory in memories))

    model.register_forward_hook(note)
    return held


def judge_memory(case: Case) -> Iterator[Finding]:
    """A gradient was computed with at most 2.5 micro-batches' activations in memory at once.

    A micro-batch may go forward before the backward of the one before it.
    """
    for rank, answer in enumerate(case.answers):
        basis = batch_gradients(case.inputs[rank], _batches(case, rank, 0))
        weights = weights_of(basis, collect(answer, "g0", NUM_PARAMETERS))
        if weights is None or not present(weights):
            yield Finding(_no_sum(MEMORY_K), rank)
        elif problem := too_much_memory(answer.get("peak"), rank):
            yield problem
        elif isinstance(held := told(answer, "predictions"), int) and held > PREDICTIONS:
            yield Finding(
                f"the predictions of {held} micro-batches were in memory at once; at most two "
                "should be, detached ones too: keep of each no more than its loss.",
                rank,
            )
