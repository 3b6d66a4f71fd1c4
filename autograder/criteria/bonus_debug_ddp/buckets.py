"""Criteria for gradients in buckets: what travels, when it is packed, and what is waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autograder.criteria.bonus_debug_ddp.causes import because
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, naming, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

ROWS = 3  # of each gradient


def _draw_buckets(
    draw: Draw, columns: Sequence[Sequence[int]], bucket_columns: int, dtype: str
) -> list[Values]:
    """Gradients with these numbers of columns; each inner list is one bucket."""
    shapes = [(ROWS, n) for bucket in columns for n in bucket]
    values = {
        "count": len(shapes),
        "dtype": dtype,
        "bucket_bytes": ROWS * bucket_columns * np.dtype(dtype).itemsize,
        "numbers": [ROWS * sum(bucket) for bucket in columns],
    }
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        drawn = {f"g{i}": rng.normal(size=s).astype(dtype) for i, s in enumerate(shapes)}
        inputs.append(values | drawn)
    return inputs


def draw_tail(draw: Draw) -> list[Values]:
    """All gradients fit into one bucket and do not fill it; they are equally large."""
    return _draw_buckets(draw, [[4] * int(draw.shared().integers(3, 7))], 40, "float32")


def draw_wait(draw: Draw) -> list[Values]:
    """Several buckets of float64; the first gradient is too large for one, and travels alone.

    The others fill each bucket exactly, also the last one. So two rules give the same buckets:
    close a full bucket, or close a bucket before a gradient that does not fit.
    """
    rng = draw.shared()
    full = int(rng.integers(10, 16))
    columns = [[full + int(rng.integers(1, 6))]]
    for number in range(int(rng.integers(3, 6))):
        # Two or three gradients of different sizes, in turn.
        small = int(rng.integers(1, 3))
        columns.append([small, full - small] if number % 2 else [small, 3, full - small - 3])
    return _draw_buckets(draw, columns, full, "float64")


def observe_buckets(reduce_in_buckets: Any, inputs: Values, context: Context) -> Values:
    """The gradients after one reduction, and the order in which it packed, sent and waited."""
    gradients = [
        torch.from_numpy(inputs[f"g{i}"].copy()).to(context.device) for i in range(inputs["count"])
    ]
    params = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    sizes = [g.nbytes for g in gradients]
    call = f"reduce_in_buckets(params, {inputs['bucket_bytes']}) with gradients of {sizes} bytes"
    with _noted_calls(gradients) as calls, naming(call):
        reduce_in_buckets(params, inputs["bucket_bytes"])
    answer: Values = {"calls": calls}
    return answer | {f"g{i}": oracle.grad_of(p).copy() for i, p in enumerate(params)}


class _Touched(TorchDispatchMode):
    """Adds "gradient" to `calls` when an operation gets one of `gradients`, or a view of it."""

    def __init__(self, gradients: Sequence[torch.Tensor], calls: list[str]) -> None:
        super().__init__()
        self.places = {g.untyped_storage().data_ptr() for g in gradients}
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        if self.calls[-1:] != ["gradient"] and any(
            t.untyped_storage().data_ptr() in self.places for t in tensors
        ):
            self.calls.append("gradient")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _noted_calls(gradients: Sequence[torch.Tensor]) -> Iterator[list[str]]:
    """Yields a list that gets "send" for every all-reduce and "wait" for every wait on a handle.

    If a gradient is used between two of these entries, the list gets one "gradient" there.

    The trace of the emulated cluster cannot show this: there, taking a future waits at once.
    """
    calls: list[str] = []
    all_reduce = dist.all_reduce

    def noted(*args: Any, **options: Any) -> Any:
        calls.append("send")
        work = all_reduce(*args, **options)
        if work is None:  # not asynchronous
            calls.append("wait")
            return None
        wait = work.wait

        def noted_wait(*args: Any, **options: Any) -> Any:
            calls.append("wait")
            return wait(*args, **options)

        work.wait = noted_wait
        return work

    with mock.patch.object(dist, "all_reduce", noted), _Touched(gradients, calls):
        yield calls


def _judge_buckets(
    case: Case, hint: str, *, any_scale: bool, unsent: str = ""
) -> Iterator[Finding]:
    for rank, answer in enumerate(case.answers):
        for i in range(case.inputs[0]["count"]):
            own = case.inputs[rank][f"g{i}"]
            expected = oracle.mean([inputs[f"g{i}"] for inputs in case.inputs])
            got = answer.get(f"g{i}")
            dtype = case.inputs[0]["dtype"]
            if any_scale and is_floats(got, expected.shape):
                scale = float((got * expected).sum() / (expected**2).sum())
                if scale > 0.1 and oracle.agrees(got, scale * expected):
                    continue
            what = f"gradient {i} of {case.inputs[0]['count']}"
            if wrong := oracle.differs(rank, what, got, expected, dtype=dtype):
                why = oracle.explain_gradient(got, expected, own, case.world_size)
                if not any(e.collective == "all_reduce" for e in case.trace.events[rank]):
                    why = f"This rank has sent nothing. {unsent}".rstrip()
                if not why and oracle.agrees(got, expected):
                    why = f"It is right to float32's digits only: what is {dtype} travels in it."
                if not why and is_floats(got, expected.shape) and _are_of(got, case):
                    why = (
                        "These numbers are means, at the wrong places: a gradient's part of the "
                        "bucket is as long as the gradient."
                    )
                yield because(wrong, why or hint)
                break


def _are_of(got: np.ndarray, case: Case) -> bool:
    """Whether every number is in the mean of some gradient, at any place."""
    count = case.inputs[0]["count"]
    means = np.concatenate(
        [oracle.mean([i[f"g{n}"] for i in case.inputs]).ravel() for n in range(count)]
    )
    return bool(all(np.isclose(means, number, rtol=1e-4).any() for number in got.ravel()))


def judge_tail(case: Case) -> Iterator[Finding]:
    """The gradients in the last bucket are reduced although the bucket is not full.

    A sum in place of the mean costs only `debug_bucket_wait`.
    """
    return _judge_buckets(
        case,
        "Here there is one bucket: it may be read only after the wait() of its handle.",
        any_scale=True,
        unsent="Here all gradients together do not fill one bucket: what is left at the end "
        "travels, too.",
    )


def judge_wait(case: Case) -> Iterable[Finding]:
    """The student's code waits for every bucket before it uses the bucket, and not earlier."""
    return list(
        _judge_buckets(
            case,
            "Here there are several buckets: a tensor may be read only after the wait() of its "
            "own handle.",
            any_scale=False,
        )
    ) or list(_judge_traffic(case))


def _judge_traffic(case: Case) -> Iterator[Finding]:
    """Each bucket travels in one all-reduce, the first of them while the second is packed."""
    inputs = case.inputs[0]
    expected = inputs["numbers"]
    sizes = [inputs[f"g{i}"].nbytes for i in range(inputs["count"])]
    for rank, events in enumerate(case.trace.events):
        got = [e.numel for e in events if e.kind == "issue" and e.collective == "all_reduce"]
        if got not in (expected, expected[::-1]):  # the reverse order is fine, too
            yield Finding(
                f"gradients of {sizes} bytes, of {inputs['dtype']}, with "
                f"bucket_bytes={inputs['bucket_bytes']}: expected all-reduces of {expected} "
                f"numbers, got {got}. {_why(got, inputs)}",
                rank,
            )
        elif not _packs_while_sending(calls := told(case.answers[rank], "calls")):
            first = calls.index("send") if isinstance(calls, list) and "send" in calls else 0
            at_once = isinstance(calls, list) and calls[first : first + 2] == ["send", "wait"]
            yield Finding(
                "between the first all-reduce and the first wait() no gradient was packed. "
                + (
                    "The first one was waited for at once: send a bucket with async_op=True, and "
                    "wait for it when the next ones are packed."
                    if at_once
                    else "A bucket travels while the next one is packed: send each when it is "
                    "full, before you pack the next."
                ),
                rank,
            )


def _why(got: list[int], inputs: Values) -> str:
    """Which wrong rule makes all-reduces of so many numbers."""
    sizes = [inputs[f"g{i}"].size for i in range(inputs["count"])]
    limit = inputs["bucket_bytes"] // np.dtype(inputs["dtype"]).itemsize
    doubled = inputs["bucket_bytes"] // 4
    for found, why in (
        (_cut(sizes, limit + 1), "A bucket that holds exactly bucket_bytes is full, too."),
        (_cut(sizes, doubled), f"A {inputs['dtype']} has not 4 bytes: p.grad.nbytes counts them."),
        (
            _cut(sizes, limit, starts_anew=False),
            "After the first bucket each gradient travels alone: a new bucket holds 0 bytes.",
        ),
    ):
        if got == found:
            return why
    return (
        "A bucket is full when it holds bucket_bytes or more, or when the next gradient would take "
        "it beyond, and gradients are in their order, or from the last one on."
    )


def _cut(sizes: list[int], limit: int, *, starts_anew: bool = True) -> list[int]:
    """The numbers in each bucket, if a bucket with `limit` numbers or more is full."""
    buckets, held = [0], 0
    for size in sizes:
        buckets[-1] += size
        held += size
        if held >= limit:
            buckets.append(0)
            held = 0 if starts_anew else held
    return [n for n in buckets if n]


def _packs_while_sending(calls: Any) -> bool:
    """Whether gradients are used between the first "send" and the first "wait"."""
    if not isinstance(calls, list) or "send" not in calls:
        return False
    after = calls[calls.index("send") :]
    return "gradient" in (after[: after.index("wait")] if "wait" in after else after)
