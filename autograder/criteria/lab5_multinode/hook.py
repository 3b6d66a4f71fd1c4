"""Criterion for task 7 of lab 5: the hierarchical all-reduce as a hook of torch's DDP."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import told
from autograder.criteria.common.comm_hooks import as_future
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs

HOOK_SIZES, HOOK_BATCH, HOOK_STEPS = (6, 40, 3), 5, 2
HOOK_CAP_MB = 6e-4  # several buckets: the hook is called for each


def draw_hook(draw: Draw) -> list[Values]:
    """The same model on all ranks, and private batches for two steps."""
    start = oracle.draw_parameters(draw.shared(), HOOK_SIZES)
    return oracle.private_batches(draw, start, [(HOOK_BATCH,)] * HOOK_STEPS, HOOK_SIZES)


class _Counting:
    """The all-reduce for the hook: sums in place, and counts the elements that it sums."""

    def __init__(self) -> None:
        self.numel = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self.numel += tensor.numel()
        dist.all_reduce(tensor)
        return tensor


def observe_hook(hook: Any, inputs: Values, context: Context) -> Values:
    """Gradients of the second step of torch's DDP with the student's hook."""
    model: nn.Module = oracle.mlp(inputs).to(context.device)
    ids = [context.device] if context.device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=HOOK_CAP_MB)
    counting = _Counting()
    names = list(inspect.signature(hook).parameters)
    if len(names) != 2 or names[1] != "bucket":
        raise TypeError(
            f"all_reduce_hook({', '.join(names)}): a hook has two arguments, and DDP wants the "
            "second one to be called bucket"
        )

    buckets: list[list[int]] = []  # parameter numbers per bucket of the last step
    number_of = {id(parameter): i for i, parameter in enumerate(model.parameters())}

    def checked(state: Any, bucket: Any) -> Any:
        buckets.append([number_of.get(id(p), -1) for p in bucket.parameters()])
        return as_future(hook(state, bucket), "all_reduce_hook")

    checked.__annotations__.clear()  # strings here, which DDP would compare with types
    ddp.register_comm_hook(counting, checked)
    for step in range(HOOK_STEPS):
        x, y = (torch.from_numpy(inputs[f"{k}/{step}"]).to(context.device) for k in "xy")
        ddp.zero_grad()
        buckets.clear()
        oracle.mse(ddp(x), y).backward()
    answer: Values = {f"g{i}": oracle.grad_of(p) for i, p in enumerate(model.parameters())}
    return answer | {"numel": counting.numel, "buckets": buckets}


def judge_hook(case: Case) -> Iterator[Finding]:
    """Gradients are the mean over ranks, and the hook summed them with the given all-reduce.

    The hook may divide before or after the sum, in the bucket's tensor or in a new one.
    """
    last = HOOK_STEPS - 1
    local = [oracle.gradients(i, i[f"x/{last}"], i[f"y/{last}"]) for i in case.inputs]
    count = HOOK_STEPS * sum(grad.size for grad in local[0])
    means = [oracle.mean(grads) for grads in zip(*local, strict=True)]
    for rank, answer in enumerate(case.answers):
        off = {i for i, m in enumerate(means) if not oracle.agrees(answer.get(f"g{i}"), m)}
        if off:
            i, where = _first_off(told(answer, "buckets"), off)
            got = answer.get(f"g{i}")
            hint = oracle.explain_gradient(got, means[i], local[rank][i], case.world_size)
            if wrong := oracle.differs(rank, f"gradient {i}{where}", got, means[i], hint=hint):
                yield wrong
        else:
            numel = answer.get("numel")
            if wrong := differs(
                rank,
                "numbers that went through the given all-reduce",
                np.asarray(numel if isinstance(numel, int | float) else np.nan),
                np.asarray(count),
                rtol=0.02,
                atol=0.0,
                hint="The hook's first argument is the all-reduce to use.",
            ):
                yield wrong


def _first_off(buckets: Any, off: set[int]) -> tuple[int, str]:
    """The first wrong gradient in the order of the buckets, and words for its place."""
    buckets = buckets if isinstance(buckets, list) else []
    wrong = [[i for i in off if i in b] if isinstance(b, list) else [] for b in buckets]
    for number, numbers in enumerate(wrong):
        if numbers:
            count = sum(map(bool, wrong))
            return min(numbers), f", in bucket {number} ({count} of {len(wrong)} buckets are wrong)"
    return min(off), ""
