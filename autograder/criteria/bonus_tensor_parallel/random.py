"""Criteria for dropout inside and outside the parallel region."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from autograder.criteria.bonus_tensor_parallel.model import (
    draw_block,
    fill_parts,
    layers_of,
    numbers,
    other_block,
    solve,
    tensor,
)
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import described, is_floats, read_tensor, returned
from autograder.criteria.common.places import hashing_as
from autograder.criteria.common.pretending import in_world_of
from autograder.criteria.common.virtual_gpu import GpuGenerator, VirtualGpus
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

COUNT, P = 200, 0.5


def draw(source: Draw) -> list[Values]:
    """Four different random seeds and 0, the same on all ranks."""
    rng = source.shared()
    names = ("common", "elsewhere", "seed", "other seed")
    seeds = {name: int(rng.integers(1, 10**6)) * 10 + i for i, name in enumerate(names)}
    return [seeds | {"seed zero": 0} for _ in range(source.world_size)]


def _mask(context: Context) -> np.ndarray:
    return numbers(F.dropout(torch.ones(COUNT, device=context.device), P)) > 0


@contextmanager
def _among_more(make_stream: Any, context: Context) -> Iterator[None]:
    """Inside, the notebook believes that there is one rank more."""
    n = context.world_size + 1
    with (
        mock.patch.object(dist, "get_world_size", return_value=n),
        in_world_of(make_stream, n),
    ):
        yield


def _forked(stream: Any) -> Any:
    """What fork() has returned, if a `with` takes it."""
    fork = returned(stream.fork(), "fork()")
    if not hasattr(fork, "__enter__"):
        raise TypeError(f"fork() returned {described(fork)}, which `with` does not take")
    return fork


def observe_inside(make_stream: Any, inputs: Values, context: Context) -> Values:
    """Masks inside fork(): two of one stream, and one of each of four others.

    "again" has the first seed in a new process, "more" has the first seed among more ranks. The
    other two have different seeds, one of them 0.
    """
    answer: Values = {}
    torch.manual_seed(inputs["common"])
    stream = make_stream(inputs["seed"])
    for name in ("first", "second"):
        with _forked(stream):
            answer[name] = _mask(context)
    torch.manual_seed(inputs["elsewhere"])
    _mask(context)
    for name, seed in (("again", "seed"), ("other", "other seed"), ("zero", "seed zero")):
        with hashing_as(1, make_stream), _forked(make_stream(inputs[seed])):
            answer[name] = _mask(context)
    with _among_more(make_stream, context), _forked(make_stream(inputs["seed"])):
        answer["more"] = _mask(context)
    masks = {name: mask.astype(np.int64) for name, mask in answer.items()}
    return masks | _observe_gpu(make_stream, inputs)


def _observe_gpu(make_stream: Any, inputs: Values) -> Values:
    """Numbers of this rank's GPU before, inside, between, inside and after two fork().

    They are left out if the stream needs more of a GPU than `VirtualGpus` has.
    """
    gpus, answer = VirtualGpus(), {}
    gpus.generator.manual_seed(inputs["common"])
    numbers = [gpus.generator.draw(3)]
    with suppress(Exception), gpus.found_by(make_stream):
        stream = make_stream(inputs["seed"])
        for _ in range(2):
            with _forked(stream):
                numbers.append(gpus.generator.draw(3))
            numbers.append(gpus.generator.draw(3))
        answer = {"gpu": np.array(numbers)}
    return answer | {"gpu refused": gpus.refused}


def _masks(case: Case, name: str) -> list[np.ndarray] | None:
    masks = [answer.get(name) for answer in case.answers]
    if all(
        isinstance(m, np.ndarray)
        and m.shape == (COUNT,)
        and m.dtype.kind == "i"
        and 0.2 < np.mean(m == 1) < 0.8
        and set(np.unique(m)) == {0, 1}
        for m in masks
    ):
        return [np.asarray(m) for m in masks]
    return None


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return float(np.mean(a == b)) > 0.9  # independent masks agree in about half of the places


def judge_inside(case: Case) -> Iterator[Finding]:
    """Requires masks that differ by rank, fork() and seed, and repeat if the seed is the same.

    How seed and rank make a stream does not matter.
    """
    names = ("first", "second", "again", "other", "zero", "more")
    found = {name: _masks(case, name) for name in names}
    masks = {name: each for name, each in found.items() if each is not None}
    if len(masks) < len(names):
        yield Finding("F.dropout inside fork() did not draw masks.")
        return
    for name, seed in (("first", ""), ("zero", " with seed 0")):
        for a, b in itertools.combinations(range(case.world_size), 2):
            if _same(masks[name][a], masks[name][b]):
                yield Finding(
                    f"inside fork(){seed} ranks {a} and {b} drop the same places. They hold "
                    "different features there, and the masks have to differ."
                )
                return
    for rank in range(case.world_size):
        if _same(masks["first"][rank], masks["second"][rank]):
            yield Finding(
                "the second fork() begins where the first one began: the same mask, layer after "
                "layer and step after step. The stream goes on.",
                rank,
            )
        elif not np.array_equal(masks["first"][rank], masks["again"][rank]):
            yield Finding(
                "a second stream with the same seed gives a different mask: no run can be "
                "repeated. It depends on the seed and the rank alone: not on torch's generator, "
                "nor on hash() of a text, which is another one in each process.",
                rank,
            )
        elif _same(masks["first"][rank], masks["other"][rank]):
            yield Finding("a different seed gives the same mask.", rank)
        elif not np.array_equal(masks["first"][rank], masks["more"][rank]):
            n = case.world_size
            yield Finding(
                f"among {n + 1} ranks in place of {n} the same seed gives this rank a different "
                "mask: it depends on the seed and the rank, on nothing else.",
                rank,
            )
        else:
            yield from _judge_gpu(case, rank)


def _judge_gpu(case: Case, rank: int) -> Iterator[Finding]:
    where = "where DEVICE is a GPU (torch.cuda is a stand-in here),"
    told = (answer.get("gpu") for answer in case.answers)
    found = [numbers for numbers in told if is_floats(numbers, (5, 3))]
    if refused := case.answers[rank].get("gpu refused"):
        yield Finding(f"{where} fork() fails: {str(refused)[:200]}.", rank)
    elif len(found) == case.world_size:
        common = GpuGenerator().manual_seed(case.inputs[rank]["common"])
        inside = [tuple(numbers[1]) for numbers in found]
        if not np.array_equal(found[rank][::2], [common.draw(3) for _ in range(3)]):
            yield Finding(
                f"{where} fork() moves the GPU's common generator: torch.get_rng_state() and "
                "torch.set_rng_state() are the CPU's.",
                rank,
            )
        elif inside.count(inside[rank]) > 1 or inside[rank] == tuple(found[rank][3]):
            yield Finding(
                f"{where} ranks, or two fork() of one rank, draw the same numbers inside.", rank
            )


def observe_outside(make_stream: Any, inputs: Values, context: Context) -> Values:
    """Masks outside fork(): first without a stream, then with a stream used between the masks."""
    answer: Values = {}
    torch.manual_seed(inputs["common"])
    plain = [_mask(context) for _ in range(4)]
    torch.manual_seed(inputs["common"])
    stream = make_stream(inputs["seed"])
    masks = [_mask(context)]
    with _forked(stream):
        answer["begun"] = _mask(context).astype(np.int64)
        for _ in range(context.rank):
            _mask(context)
    masks.append(_mask(context))
    with _forked(stream):
        answer["gone on"] = _mask(context).astype(np.int64)
    masks.append(_mask(context))
    try:
        with _forked(stream):
            answer["failed"] = _mask(context).astype(np.int64)
            raise KeyError("an error inside")
    except KeyError:
        masks.append(_mask(context))
    with _forked(stream):
        answer["next"] = _mask(context).astype(np.int64)
    for i, (a, b) in enumerate(zip(plain, masks, strict=True)):
        answer |= {f"plain{i}": a.astype(np.int64), f"used{i}": b.astype(np.int64)}
    return answer


def judge_outside(case: Case) -> list[Finding]:
    """Requires the same masks on all ranks, whatever happened inside fork(), also an error.

    After the error, the stream itself goes on.
    """
    found = [(_masks(case, f"plain{i}"), _masks(case, f"used{i}")) for i in range(4)]
    for i, (plain, used) in enumerate(found):
        if plain is None or used is None:
            return [Finding("F.dropout outside fork() did not draw masks.")]
        for rank in range(case.world_size):
            if not np.array_equal(used[rank], plain[rank]):
                after = ("making the stream", "fork()", "a second fork()", "an error inside fork()")
                return [
                    Finding(
                        f"after {after[i]} torch's own generator is not where it was: the mask is "
                        "not the one that comes without it, and ranks may draw different ones.",
                        rank,
                    )
                ]
            if not np.array_equal(used[rank], used[0]):
                return [Finding("the masks outside differ from rank 0's.", rank)]
    begun, gone_on, failed, following = (
        _masks(case, name) for name in ("begun", "gone on", "failed", "next")
    )
    if begun is None or gone_on is None or failed is None or following is None:
        return [Finding("F.dropout inside fork() did not draw masks.")]
    for rank in range(case.world_size):
        if _same(begun[rank], gone_on[rank]):
            continue  # the stream restarts in each fork(): `judge_inside` says so
        if _same(failed[rank], following[rank]):
            return [
                Finding(
                    "an error left a fork() after it had drawn a mask, and the next fork() draws "
                    "the same one: the stream goes on where the last fork() stopped.",
                    rank,
                )
            ]
    return []


# --- dropout in the block ------------------------------------------------------------------------

ROWS = 16


def draw_block_case(source: Draw) -> list[Values]:
    """A block with an input of one token, and the seeds."""
    inputs = draw_block(source, sequences=1, tokens=1)
    return [a | b for a, b in zip(inputs, draw(source), strict=True)]


def observe_block(subject: Any, inputs: Values, context: Context) -> Values:
    """Results with dropout, in eval mode, and with weights that make every mask visible."""
    build, make_stream = subject
    torch.manual_seed(inputs["common"])
    full = other_block(inputs, context)
    torch.manual_seed(inputs["common"])
    block = build(full, P, make_stream(inputs["seed"]))
    layers = layers_of(block, ("norm1", "norm2", "qkv", "out", "up", "down"))
    fill_parts(layers, inputs, context)
    y = read_tensor(block(tensor(inputs["x"], context, grad=True)), "the block")
    y.backward(tensor(inputs["gy"], context))
    answer = {"y": numbers(y), "hidden": numbers(layers["up"].bias.grad)}
    answer["down"] = numbers(layers["down"].weight.grad)
    with torch.no_grad():
        block.eval()
        answer["eval"] = numbers(block(tensor(inputs["x"], context)))
        # With zero weights and a constant bias, attention or the MLP adds a constant to x.
        x = tensor(inputs["x"], context).expand(ROWS, -1, -1)
        for name, other in (("out", "down"), ("down", "out")):
            for each, value in ((name, 3.0), (other, 0.0)):
                layers[each].weight.zero_()
                layers[each].bias.fill_(value)
            for training in (False, True):
                block.train(training)
                answer[f"{name} {training}"] = numbers(block(x) - x)
        layers["up"].weight.zero_()
        for each, value in (("out", 3.0), ("down", 7.0)):
            layers[each].bias.fill_(value)
        answer["both True"] = numbers(block(x) - x)
        # All hidden features have the same value, and each output number is their sum.
        layers["down"].weight.fill_(1.0)
        for each, value in (("up", 1.0), ("out", 0.0), ("down", 0.0)):
            layers[each].bias.fill_(value)
        answer["inside True"] = numbers(block(x) - x)
    return answer


def judge_block(case: Case) -> Iterator[Finding]:
    """Requires per-rank masks of hidden features, equal outputs, and no dropout in eval mode."""
    n, width = case.world_size, case.inputs[0]["width"]
    hidden = [answer.get("hidden") for answer in case.answers]
    if not all(is_floats(h, (4 * width // n,)) and np.isfinite(h).all() for h in hidden):
        yield Finding("mlp.up.bias has no finite gradient of its shape after a backward pass.")
        return
    if not all(is_floats(a.get("down"), (width, 4 * width // n)) for a in case.answers):
        yield Finding("mlp.down.weight has no gradient of its shape after a backward pass.")
        return
    right = solve(case.inputs[0])["y"]
    dropped = [np.asarray(h) == 0 for h in hidden]
    for rank in range(n):
        yield from _judge_block_of(case, rank, right, dropped)


def _judge_block_of(
    case: Case, rank: int, right: np.ndarray, dropped: list[np.ndarray]
) -> Iterator[Finding]:
    answer, y0 = case.answers[rank], case.answers[0].get("y")
    if wrong := oracle.differs(
        rank,
        "eval mode: output",
        answer.get("eval"),
        right,
        dtype="float64",
        hint="In eval mode nothing is dropped, and it is the layer of the check before.",
    ):
        yield wrong
    elif not 0.1 < dropped[rank].mean() < 0.9:
        yield Finding(
            f"{int(dropped[rank].sum())} of {dropped[rank].size} hidden features of the MLP were "
            f"dropped, expected about half (p = {P}).",
            rank,
        )
    elif any(_same(dropped[rank], mask) for other, mask in enumerate(dropped) if other != rank):
        yield Finding(
            "another rank dropped the same places of its hidden features: inside the parallel "
            "region dropout draws from the stream.",
            rank,
        )
    elif not np.array_equal(dropped[rank], (answer["down"] == 0).all(0)):
        yield Finding(
            "the gradient of mlp.down.weight has zeros for other hidden features than the gradient "
            "of mlp.up.bias: what is dropped forward and backward has to be the same.",
            rank,
        )
    elif not is_floats(y0):
        yield Finding("training mode: no output.", rank)
    elif wrong := oracle.differs(
        rank,
        "training mode: output, against rank 0's",
        answer.get("y"),
        y0.astype(np.float64),
        dtype="float64",
        hint="Outside the parallel region all ranks drop the same places: torch's own generator.",
    ):
        yield wrong
    else:
        yield from _judge_what_is_dropped(answer, rank)


def _judge_what_is_dropped(answer: Values, rank: int) -> Iterator[Finding]:
    for what, name in (("attention", "out"), ("the MLP", "down")):
        if not _is_dropped(answer.get(f"{name} False"), answer.get(f"{name} True")):
            yield Finding(
                f"what {what} returns is not dropped in training mode (in one place of two, "
                "the rest doubled) before it is added to x.",
                rank,
            )
            return
    if not _counts_doubled(answer.get("inside True")):
        yield Finding(
            "hidden features that were not dropped are not 1 / (1 - p) times what GELU gives: "
            "dropout comes after GELU, as F.dropout does it.",
            rank,
        )
        return
    both = answer.get("both True")
    if not is_floats(both) or len(np.unique(np.round(both))) < 4:
        yield Finding(
            "what attention returns and what the MLP returns were dropped in the same places: "
            "each has a mask of its own.",
            rank,
        )


def _counts_doubled(sums: Any) -> bool:
    """Whether all `sums` are whole multiples of GELU(1), dropped twice with p = 1/2."""
    gelu = float(F.gelu(torch.ones((), dtype=torch.float64)))
    counts = sums * (1 - P) ** 2 / gelu if is_floats(sums) else np.full(1, 0.5)
    return bool(np.isclose(counts, np.round(counts), rtol=0, atol=1e-6).all())


def _is_dropped(whole: Any, dropped: Any) -> bool:
    """Whether `dropped` is `whole` after dropout with p = 1/2: some zeros, the rest doubled."""
    if not all(is_floats(a) for a in (whole, dropped)):
        return False
    if whole.shape != dropped.shape or not (np.isfinite(whole) & (np.abs(whole) > 0.1)).all():
        return False
    share = dropped * (1 - P) / whole
    kept = np.isclose(share, 1)
    return bool((kept | np.isclose(share, 0)).all()) and 0.2 < kept.mean() < 0.8
