"""Criteria that enforce a memory limit on a sharded optimiser, with lab 3's fresh processes.

Each group of parameters is one block of the model, so whatever a rank holds for one group at a time
is small. Only what the rank holds for all groups counts: parameters, gradients, state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import memory_limit as limited
from autograder.criteria.criterion import Case, Context, Finding, Values

# Large enough that the memory that libraries need on some processors is small beside the margins on
# both sides of the limit. The smallest margin in grading, which uses three ranks, is that of stage
# 2: a third of PARAMETER_BYTES.
BLOCKS = 2 * limited.BLOCKS
PARAMETER_BYTES = 2 * limited.PARAMETER_BYTES
STEPS, MICRO_BATCHES = 2, 2  # with one micro-batch, stage 1 might keep whole gradients
LR = {1: 1e-3, 2: 1e-2}
draw = limited.draw


def copies(world_size: int, stage: int) -> float:
    """The memory limit as a multiple of the parameters' size.

    The limit is halfway between the needs of a right and of a wrong optimiser, but at least 0.25
    above the needs of the right one.

    Stage 1 (AdamW), while the second micro-batch goes backward: a right optimiser holds parameters,
    gradients, and one share each of both moments, of the shards and of the mean gradient so far; a
    wrong one holds that mean whole, or even both moments. Stage 2 (plain SGD): a right
    optimiser holds parameters, and one share each of the shards and of the gradients; a wrong one
    holds the gradient whole.
    """
    share = 1 / world_size
    needed, wrong = (2 + 4 * share, 3 + 3 * share) if stage == 1 else (1 + 2 * share, 2 + share)
    return needed + max(0.25, (wrong - needed) / 2)


def observe_zero1(zero: Any, inputs: Values, context: Context) -> Values:
    """Two steps of AdamW with two micro-batches each."""
    allowance = _allowance(context, 1)
    return limited.launch_limited(_train_zero1, zero, inputs, context, allowance)


def observe_zero2(zero: Any, inputs: Values, context: Context) -> Values:
    """Two steps of SGD with two micro-batches each."""
    allowance = _allowance(context, 2)
    return limited.launch_limited(_train_zero2, zero, inputs, context, allowance)


def _allowance(context: Context, stage: int) -> int:
    return int(copies(context.world_size, stage) * PARAMETER_BYTES)


def _train_zero1(zero: Any, inputs: Values) -> list[float]:
    return _train(zero, inputs, torch.optim.AdamW, 1)


def _train_zero2(zero: Any, inputs: Values) -> Values:
    """Looks for gradients left after backward first, since these would cause a lack of memory."""
    import torch.distributed as dist

    left = _left_after_backward(zero)
    problem = torch.tensor(float(_left_problem(left) is not None))
    dist.all_reduce(problem, op=dist.ReduceOp.MAX)
    losses = [] if problem.item() else _train(zero, inputs, torch.optim.SGD, 2)
    return {"losses": losses, "left": left}


def _left_after_backward(zero: Any) -> list[int]:
    """How many p.grad there are after backward and before reduce(), if all gradients have come.

    The first group's gradient comes before the last group's, for which it has to wait. The count is
    taken twice; between the two, the first group has no gradient in one backward. If reduce() then
    fails, that costs `zero2_order`, and counts as none left here.
    """
    first, last = (nn.Parameter(torch.ones(7)) for _ in range(2))
    optimizer = zero([{"params": [first]}, {"params": [last]}], torch.optim.SGD, lr=0.1)
    left = []
    for without_first in (False, True, False):
        late, early = (2.0 * last).sum(), (3.0 * first).sum()  # backward begins with what came last
        (late if without_first else late + early).backward()
        if not without_first:
            left.append(sum(p.grad is not None for p in (first, last)))
        try:
            optimizer.reduce()
        except Exception:
            if not without_first:
                raise
            return [*left, 0]
    return left


def _train(zero: Any, inputs: Values, kind: Any, stage: int) -> list[float]:
    """This rank's loss on its first batch, before training and after it."""
    import torch.distributed as dist

    model = limited.build(inputs["seed"], num_blocks=BLOCKS)
    groups = [{"params": list(block.parameters())} for block in model]
    optimizer = zero(groups, kind, lr=LR[stage])
    x, y = (torch.from_numpy(inputs[f"{name}/{dist.get_rank()}"]) for name in "xy")
    losses = [_loss(model, x[0], y[0])]
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            nn.functional.mse_loss(model(x[0] + 0.01 * micro), y[0] + 0.01 * step).backward()
            optimizer.reduce()
        optimizer.step()
        optimizer.zero_grad()
    losses.append(_loss(model, x[0], y[0]))
    return losses


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(x), y))


# --- judge ---------------------------------------------------------------------------------------


def judge_zero1(case: Case) -> Iterator[Finding]:
    """Requires that training ends within the memory limit and changes the loss."""
    return _judge(
        case,
        1,
        (
            "Is the wrapped optimiser given this rank's shard only, a copy that keeps no flat "
            "vector alive? Is its gradient such a copy, too? Are groups reduced and gathered one "
            "after the other, and is p.grad None as soon as its group is reduced?"
        ),
    )


def judge_zero2(case: Case) -> Iterator[Finding]:
    """Requires that training ends within the memory limit and changes the loss.

    If all gradients come in backward, no p.grad may be left after it, in whatever order they come.
    """
    return _judge(
        case,
        2,
        (
            "(With two small groups, no p.grad was left after backward.) Is a shard a copy that "
            "keeps no flat vector alive? Is its gradient such a copy, too? Is each group reduced "
            "and gathered by itself?"
        ),
    )


def _judge(case: Case, stage: int, hint: str) -> Iterator[Finding]:
    results = limited.results_of(case)
    if not results:
        yield Finding("the training left no result.")
        return
    told = [(rank, result) for rank, result in enumerate(results) if "left" in result]
    if problems := [(r, p) for r, result in told if (p := _left_problem(result["left"]))]:
        yield from (Finding(problem, rank) for rank, problem in problems)
        return
    size = PARAMETER_BYTES / limited.MEGABYTE
    if any(limited.is_out_of_memory(result) for result in results):
        places = [str(r.get("where")) for r in results if r.get("where")]
        where = f" (in {places[0][:100]})" if places else ""
        yield Finding(
            f"out of memory{where}: the limit is {copies(case.world_size, stage) * size:.0f} MB "
            f"per rank, of which the parameters take {size:.0f}. {hint}"
        )
        return
    if len(results) != case.world_size:
        yield Finding(f"a process of the training failed: {str(results[0])[-600:]}")
        return
    for rank, result in enumerate(results):
        losses = result.get("losses")
        if result.get("status") != "ok":
            text = str(result.get("text"))[-600:]
            yield Finding(f"a process of the training failed: {text}", rank)
        elif (
            not isinstance(losses, list)
            or len(losses) != 2
            or not all(isinstance(v, float) and np.isfinite(v) for v in losses)
            or losses[1] == losses[0]
        ):
            yield Finding(
                f"the loss of this rank's batch before and after {STEPS} steps: expected two "
                f"numbers that differ, got {str(losses)[:80]}.",
                rank,
            )
        elif stage == 2 and "left" not in result:
            yield Finding("what is left after backward was not counted.", rank)


def _left_problem(left: Any) -> str | None:
    """What `_left_after_backward` has found, or None."""
    if left == [0, 0]:
        return None
    first, later = left if isinstance(left, list) and len(left) == 2 else (left, left)
    count, before = (first, "") if first != 0 else (later, " in the next step")
    why = {
        1: "The first group waits for the last one, and goes at once when that one has gone.",
        2: "Each group is reduced in backward, and then its p.grad are None.",
    }.get(count if type(count) is int else 0, "")
    if before:
        why = (
            "The backward before that gave the first group no gradient: does reduce() make "
            "everything ready for the next backward?"
        )
    return (
        "two groups of one parameter, of which the first has its gradient first: after backward"
        f"{before}, before reduce(), {str(count)[:40]} p.grad are there, expected none. {why}"
    ).rstrip()
