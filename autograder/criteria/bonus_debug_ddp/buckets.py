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

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

ROWS = 3  # of each gradient


def _draw_buckets(
    draw: Draw, columns: Sequence[Sequence[int]], bucket_columns: int, dtype: str
) -> list[Values]:
    """Gradients with so many columns, those of each bucket in a list of their own."""
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

    The others fill each bucket exactly, also the last one: it does not matter whether a bucket is
    closed when it is full or before the gradient that would take it beyond.
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
    with _noted_calls(gradients) as calls:
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

    Where gradients are used between two of these, it gets one "gradient".

    The trace of the emulated cluster does not tell: there, whoever takes a future waits at once.
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


def _judge_buckets(case: Case, hint: str, *, any_scale: bool) -> Iterator[Finding]:
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
            why = oracle.explain_gradient(got, expected, own, case.world_size)
            what = f"gradient {i} of {case.inputs[0]['count']}"
            if wrong := oracle.differs(rank, what, got, expected, dtype=dtype, hint=why or hint):
                yield wrong
                break


def judge_tail(case: Case) -> Iterator[Finding]:
    """The gradients in the last bucket are reduced although the bucket is not full.

    A sum in place of the mean costs only `debug_bucket_wait`.
    """
    return _judge_buckets(
        case, "Here all gradients together do not fill one bucket.", any_scale=True
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
        if got not in (expected, expected[::-1]):  # from the last gradient on is fine, too
            yield Finding(
                f"gradients of {sizes} bytes, of {inputs['dtype']}, with "
                f"bucket_bytes={inputs['bucket_bytes']}: expected all-reduces of {expected} "
                f"numbers, got {got}. A bucket is full when it holds bucket_bytes or more.",
                rank,
            )
        elif not _packs_while_sending(told(case.answers[rank], "calls")):
            yield Finding(
                "between the first all-reduce and the first wait() no gradient was packed. A "
                "bucket travels while the next one is packed: send it when it is full, with "
                "async_op=True, and wait for it later.",
                rank,
            )


def _packs_while_sending(calls: Any) -> bool:
    """Whether gradients are used between the first "send" and the first "wait"."""
    if not isinstance(calls, list) or "send" not in calls:
        return False
    after = calls[calls.index("send") :]
    return "gradient" in (after[: after.index("wait")] if "wait" in after else after)
