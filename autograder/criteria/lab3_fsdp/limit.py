"""Training under a memory limit, with the student's class and with their function: units are freed.

`memory_limit` says how the limit is enforced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common.answers import read, read_tensor, returned
from autograder.criteria.common.memory_limit import (
    BATCHES,
    MEGABYTE,
    PARAMETER_BYTES,
    build,
    draw,
    is_out_of_memory,
    launch_limited,
    results_of,
    says_no_memory,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs

# Allowed beyond the shards, as a fraction of the parameters: for units that are gathered or
# reduced. torch's FSDP and a plain one from scratch take 0.3 to 0.4; all units at once would be 1.
TRANSIENT = 0.75
# The least allowance, in the same unit. On many ranks the shards are small, but the model is whole
# while it is built, and its first shards lie beside it. Units that are never freed take
# 1 + copies / N.
WHOLE = 1.2
# Our own loop runs the class, to judge its memory. The student's function has its own loop and
# runs more steps, so that old gradients and other mistakes of an update show in the later losses.
STEPS = {False: 2, True: BATCHES}  # key: whether AdamW updates the weights
LR = 3e-3
FACTOR = 0.98  # by which our own loop changes every shard, whatever its gradient is
# `draw_uneven` multiplies the batch of each step by its factor, so that gradient clipping changes
# the losses.
SPREAD = (1.0, 0.3, 0.8, 0.4)
# In float32, losses are off by at most 1e-4. Without AdamW's weight decay they are off by 7e-4
# after one step, because the gains of all blocks multiply.
RTOL = 4e-4


def allowance_bytes(world_size: int, copies: int) -> int:
    """Bytes beyond its base that a rank may use to keep its shards of `copies` x the parameters."""
    return int(max(copies / world_size + TRANSIENT, WHOLE) * PARAMETER_BYTES)


# How many tensors as large as all parameters are kept. The class keeps parameters and gradients;
# the function also keeps AdamW's two states.
_CLASS_COPIES, _FUNCTION_COPIES = 2, 4


# --- draw, observe -------------------------------------------------------------------------------


def draw_uneven(source: Draw) -> list[Values]:
    """Like `draw`, with larger numbers in some steps, and fewer samples on odd ranks."""
    first, *rest = draw(source)
    scale = np.array(SPREAD, dtype=np.float32)[:, None, None]
    for rank in range(source.world_size):
        for key in (f"x/{rank}", f"y/{rank}"):
            first[key] = (first[key] * scale)[:, : -1 if rank % 2 else None]
    return [first, *rest]


def observe_class(fsdp_class: Any, inputs: Values, context: Context) -> Values:
    """Trains the large model with the student's FSDP class, in our own loop."""
    allowance = allowance_bytes(context.world_size, _CLASS_COPIES)
    return launch_limited(_train_with_class, fsdp_class, inputs, context, allowance)


def observe_function(train_large: Any, inputs: Values, context: Context) -> Values:
    """Trains the large model with the student's function."""
    allowance = allowance_bytes(context.world_size, _FUNCTION_COPIES)
    return launch_limited(_train_with_function, train_large, inputs, context, allowance)


def _batches(inputs: Values, with_adamw: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    import torch.distributed as dist

    x, y = (torch.from_numpy(inputs[f"{name}/{dist.get_rank()}"]) for name in "xy")
    return list(zip(x, y, strict=True))[: STEPS[with_adamw]]


def _train_with_class(fsdp_class: Any, inputs: Values) -> list[float]:
    """Two steps, after each of which every shard is multiplied by `FACTOR`.

    Gradients are not cleared, so they exist while the second forward runs. Different criteria judge
    whether they are right.
    """
    import torch.distributed as dist

    model = build(inputs["seed"])
    fsdp = fsdp_class(model, list(model))
    losses = []
    for x, y in _batches(inputs, with_adamw=False):
        loss = nn.functional.mse_loss(read_tensor(fsdp(x), "fsdp(x)"), y)
        loss.backward()
        with torch.no_grad():
            for p in returned(fsdp.local_parameters(), "local_parameters"):
                p.mul_(FACTOR)
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def _train_with_function(train_large: Any, inputs: Values) -> Values:
    """The losses; and in words which options of AdamW were not its defaults in some step."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seed, changed = inputs["seed"], set()
    usual = torch.optim.AdamW([torch.zeros(1)]).defaults

    def note(optimizer: Any, *_: Any) -> None:
        if isinstance(optimizer, torch.optim.AdamW):
            for group in optimizer.param_groups:
                differ = (k for k in _OPTIONS if not np.array_equal(group[k], usual[k]))
                changed.update(f"{k}={group[k]}" for k in differ)

    register_optimizer_step_pre_hook(note)
    losses = train_large(lambda: build(seed), _batches(inputs, with_adamw=True), LR)
    told = read(losses, _floats, "train_large", "a list of floats")
    return {"losses": told, "changed": sorted(changed)}


def _floats(losses: Any) -> list[float]:
    if not isinstance(losses, list | tuple):
        raise TypeError
    return [float(loss) for loss in losses]


_OPTIONS = ("betas", "eps", "weight_decay", "amsgrad", "maximize")


# --- judge ---------------------------------------------------------------------------------------


def judge_class(case: Case) -> Iterator[Finding]:
    """The training ends within the limit, with the losses of unsharded training."""
    hint = (
        "Is each module of `units` a unit of its own, and a shard a clone of its own part only (a "
        "slice of a cloned whole keeps it all)? Are units freed after forward and after backward "
        "(the storage, not only p.data), with their whole gradients, and is only the next one "
        "prefetched?"
    )
    return _judge(case, _CLASS_COPIES, hint)


def judge_function(case: Case) -> Iterator[Finding]:
    """The training ends within the limit, with the losses of unsharded training.

    It may use the class of task 3 or torch's, and clear gradients before or after each step.
    """
    hint = (
        "Is every block a unit of its own, are parameters, gradients and AdamW's state sharded, "
        "and is the optimizer made after sharding?"
    )
    return _judge(case, _FUNCTION_COPIES, hint)


def _judge(case: Case, copies: int, hint: str) -> Iterator[Finding]:
    results = results_of(case)
    if not results:
        yield Finding("the training left no result.")
        return
    budget = (
        f"{allowance_bytes(case.world_size, copies) / MEGABYTE:.0f} MB per rank (whole, the "
        f"training state is {copies * PARAMETER_BYTES / MEGABYTE:.0f} MB)"
    )
    out_of_memory = [r for r in results if is_out_of_memory(r)]
    if out_of_memory:
        yield Finding(_used_up(out_of_memory[0], budget, hint))
        return
    if len(results) != case.world_size:
        yield Finding(f"a process of the training failed: {str(results[0].get('text'))[-600:]}")
        return
    expected = np.array(_oracle_losses(case, with_adamw=copies == _FUNCTION_COPIES))
    for rank, result in enumerate(results):
        if result.get("status") != "ok":
            text = str(result.get("text"))[-600:]
            yield Finding(f"a process of the training failed: {text}{_place(result)}", rank)
        elif changed := result.get("changed"):
            why = f"AdamW ran with {str(changed)[:200]}, expected its defaults but for lr."
            yield Finding(why, rank)
        elif wrong := _wrong_losses(case, rank, result.get("losses"), expected, copies):
            yield wrong


def _used_up(result: Values, budget: str, hint: str) -> str:
    """The message for a process that reported a lack of memory, or that a signal has ended."""
    if says_no_memory(result):
        return f"out of memory: the budget is {budget}, and it was used up{_place(result)}. {hint}"
    return (
        f"a process was ended by a signal{_place(result)}. Either memory was used after it was "
        "freed (by a backward whose unit was not gathered again, or by an all-gather that still "
        f"wrote into it), or it ran out: the budget is {budget}. {hint}"
    )


def _place(result: Values) -> str:
    """The student's line at which a process ended, in brackets; "" if it is not known."""
    where = str(result.get("where") or "")[:200]
    return f" (in {where})" if where else ""


def _wrong_losses(
    case: Case, rank: int, losses: Any, expected: np.ndarray, copies: int
) -> Finding | None:
    """A finding unless these are the losses of all ranks; says what they are, if it is known."""
    got = None
    if isinstance(losses, list) and all(isinstance(v, float) for v in losses):
        got = np.array(losses)
    if got is not None and len(got) != len(expected):
        return Finding(f"{len(got)} losses, expected one for each of {len(expected)} steps.", rank)
    why = "Loss per step, mean over ranks, before the update."
    if copies == _CLASS_COPIES:
        # A different criterion judges whether a gather brings the current values.
        same = [_first_loss(case, range(case.world_size), step) for step in range(len(expected))]
        if got is not None and np.allclose(got, same, rtol=RTOL, atol=0.0):
            return None
        why = "Two passes, with other shards in the second. The output is not the whole model's."
    elif got is not None:
        own, everyone = _first_loss(case, [rank]), range(case.world_size)
        same = [_first_loss(case, everyone, step) for step in range(len(expected))]
        num_right = int((~np.isclose(got, expected, rtol=RTOL)).argmax())
        if np.isclose(got[0], expected[0] * case.world_size, rtol=RTOL):
            why = "The first is the sum over ranks, not the mean."
        elif np.isclose(got[0], own, rtol=RTOL):
            why = "The first is this rank's own loss, not the mean over all ranks."
        elif np.isclose(got[0], expected[0], rtol=RTOL):
            why = (
                f"{num_right} of them are right before the first that is not: a step is backward, "
                "one step of AdamW, and gradients cleared; nothing else changes gradients."
            )
            if np.allclose(got, same, rtol=RTOL / 2):
                why = "No step has changed the weights: make the optimizer after sharding."
            plain = np.array(_oracle_losses(case, with_adamw=True, weight_decay=0.0))
            if np.allclose(got, plain, rtol=RTOL / 2):
                why += " They are those without weight decay, of which AdamW's default is 0.01."
    return differs(rank, "losses", got, expected, rtol=RTOL, atol=0.0, hint=why)


def _first_loss(case: Case, ranks: Iterable[int], step: int = 0) -> float:
    """The loss of these ranks' batches of a step, with the weights as they were at first."""
    with torch.no_grad():
        model = build(case.inputs[0]["seed"], torch.float64)
        return _mean_loss(model, case.inputs[0], ranks, step).item()


def _mean_loss(model: nn.Module, inputs: Values, ranks: Iterable[int], step: int) -> torch.Tensor:
    """The mean over ranks of the loss of each rank's batch."""
    losses = []
    for rank in ranks:
        x, y = (torch.from_numpy(inputs[f"{name}/{rank}"][step]).double() for name in "xy")
        losses.append(nn.functional.mse_loss(model(x), y))
    return torch.stack(losses).mean()


def _oracle_losses(case: Case, with_adamw: bool, weight_decay: float = 0.01) -> list[float]:
    """The losses of one process that trains on all ranks' data in float64."""
    inputs = case.inputs[0]
    model = build(inputs["seed"], torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=weight_decay)
    losses, num_steps = [], STEPS[with_adamw]
    for step in range(num_steps):
        loss = _mean_loss(model, inputs, range(case.world_size), step)
        losses.append(loss.item())
        if step + 1 < num_steps:
            loss.backward()
            if with_adamw:
                optimizer.step()
                optimizer.zero_grad()
            else:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(FACTOR)
    return losses
