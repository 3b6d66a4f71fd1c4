"""Gradient accumulation: one optimizer step from several micro-batches.

A batch that does not fit into memory is cut into micro-batches, and `p.grad` sums their gradients.
Over all ranks and micro-batches, the result must equal what one process gets from the joint batch:

    gradient = sum over ranks r, micro-batches i of weight[r, i] grad(loss[r, i]) / sum of weights

where loss[r, i] is a mean over `weight[r, i]` tokens (or samples). A data-parallel wrapper divides
by the number of ranks W, so each loss is scaled by **weight * W / sum of weights** before backward.
With equal weights and k micro-batches this is the familiar factor 1 / k. If sequences are padded,
the weights differ, and with 1 / k a token of a micro-batch with few tokens would count more than a
token of a full micro-batch.

Phases of a step: agree on the sum of weights; forward and backward of every micro-batch, all but
the last under `no_sync`; unscale; clip; step.

Three common mistakes: `no_sync` around backward only (but forward decides whether to synchronise);
a step at `i % k == 0`, which is true for the first micro-batch; no step for the remaining
micro-batches if k does not divide their number.

Example::

    for group in micro_batch_groups(loader, 4):        # the last may be smaller
        accumulate_step(ddp, group, loss_fn, optimizer, max_norm=1.0)

or with your own loop::

    for micro_batch, is_last in accumulate(group, ddp):
        (loss_fn(ddp, micro_batch) / len(group)).backward()   # is_last: gradients are synchronised
    optimizer.step()

>>> [len(group) for group in micro_batch_groups(range(10), 4)]
[4, 4, 2]

Works with torch's DistributedDataParallel, `parallel.data.BucketedDDP`, and a plain module.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.errors import named_rank
from minidist.outputs import tensors_in
from minidist.precision.clip import is_held_by_zero3
from minidist.precision.training import unscale_clip_step

T = TypeVar("T")


class Scaler(Protocol):
    """The GradScaler methods used here: torch.amp's GradScaler, or any class that has them."""

    def scale(self, outputs: Tensor, /) -> Tensor: ...
    def unscale_(self, optimizer: torch.optim.Optimizer, /) -> Any: ...
    def step(self, optimizer: torch.optim.Optimizer, /) -> Any: ...
    def update(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Step:
    """The report of one step.

    Args:
        loss: this rank's part of the mean loss. The mean of `loss` over the ranks is the mean loss
            over all tokens of all ranks and micro-batches. A detached scalar on the model's device.
        total_weight: sum of the weights of all ranks.
        grad_norm: gradient norm before clipping; None without clipping.
    """

    loss: Tensor
    total_weight: float
    grad_norm: Tensor | None


def micro_batch_groups(batches: Iterable[T], size: int) -> Iterator[list[T]]:
    """Consecutive groups of `size` micro-batches; the last group has the rest.

    Raises:
        ValueError: size is below 1.
    """
    if size < 1:
        raise ValueError(f"micro_batch_groups: size must be at least 1, got {size}")
    return _groups(batches, size)


def _groups(batches: Iterable[T], size: int) -> Iterator[list[T]]:
    group: list[T] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def accumulate(micro_batches: Iterable[T], model: nn.Module) -> Accumulation[T]:
    """Yield (micro-batch, whether it synchronises), where only the last one does. The loop bodies
    of the others run in `no_sync`. In an outer `no_sync` or `accumulate`, none synchronises.

    Forward **and** backward must be in the loop body. Any iterable works: the loop reads one
    micro-batch ahead to know which is the last. If the loop ends early, by `break` or an exception,
    `no_sync` ends with it, and a warning says what `p.grad` holds. If only some ranks leave early,
    the others wait in their last backward: `all_reduce` a flag to decide on all ranks.
    """
    return Accumulation(micro_batches, model)


class Accumulation(Generic[T]):
    """The iterable that `accumulate` returns.

    Only the loop holds the generator. So it is closed when the loop ends, even if this object
    lives on in a variable.
    """

    def __init__(self, micro_batches: Iterable[T], model: nn.Module) -> None:
        self._micro_batches, self._model = micro_batches, model
        self._stepped: Iterator[tuple[T, bool]] | None = None  # by next(), without a loop

    def __next__(self) -> tuple[T, bool]:
        self._stepped = self._stepped or iter(self)
        return next(self._stepped)

    def close(self) -> None:
        """End `no_sync` after calls of `next`. (A loop ends it by itself.)"""
        if isinstance(self._stepped, Generator):
            self._stepped.close()

    def __iter__(self) -> Iterator[tuple[T, bool]]:
        model = self._model
        no_sync: Callable[[], AbstractContextManager[Any]] = getattr(model, "no_sync", nullcontext)
        iterator = iter(self._micro_batches)
        try:
            current = next(iterator)
        except StopIteration:
            return
        for number, following in enumerate(iterator):
            try:
                with no_sync():
                    yield current, False
            except GeneratorExit:
                _warn_of_early_end(model, number)
                raise
            current = following
        yield current, synchronises(model)


def _warn_of_early_end(model: nn.Module, number: int) -> None:
    if hasattr(model, "no_sync"):
        warnings.warn(
            f"accumulate: the loop ended at micro-batch {number}, not the last one, so p.grad "
            f"holds the sums of {named_rank()} alone: call zero_grad() on every rank before the "
            "next step, or run one more backward outside of accumulate, which averages them",
            stacklevel=3,
        )


def synchronises(model: nn.Module) -> bool:
    """Whether a backward would average gradients now: False in a `no_sync` of ours or torch's DDP.

    True for a module without `no_sync`.
    """
    given = getattr(model, "synchronises", None)  # ours
    return bool(getattr(model, "require_backward_grad_sync", True) if given is None else given)


def accumulate_step(
    model: nn.Module,
    micro_batches: Iterable[T],
    loss_fn: Callable[[nn.Module, T], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    weights: Sequence[float] | None = None,
    scaler: Scaler | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    max_norm: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Step:
    """Collective: one optimizer step from all micro-batches of all ranks.

    Args:
        model: a data-parallel wrapper over `group` whose gradients are means over ranks, or a plain
            module in a single process.
        micro_batches: this rank's micro-batches, at least one; their number may differ by rank.
        loss_fn: model, micro-batch -> mean loss, a scalar.
        weights: the number of tokens (or samples) behind each micro-batch's mean. One small
            all-reduce sums them over the ranks. None means that all micro-batches weigh the same.
        scaler: for fp16. It unscales the gradients before clipping, and may skip the step.
        autocast: makes the context of forward, e.g.
            `lambda: torch.autocast("cuda", torch.bfloat16)`.
        max_norm: limit for the norm of the whole gradient, after the sum and the synchronisation.
        group: the data-parallel ranks; None means the default group.

    A micro-batch of weight 0 adds nothing to the gradients, even if its loss is nan or inf.

    Raises:
        ValueError: on every rank, if a rank has no micro-batch or weights that do not fit, or if
            all weights add up to 0; or in a `no_sync` block, where every rank would take a step
            with gradients of its own.
    """
    if not synchronises(model):
        raise ValueError(
            f"accumulate_step: called inside no_sync() on {named_rank(group)}, so that each rank "
            "would take a step with its own gradients; it calls no_sync() itself: call it outside"
        )
    # Agree on the sum of weights.
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    micro_batches = list(micro_batches)
    weights = [1.0] * len(micro_batches) if weights is None else weights
    device = next(model.parameters()).device
    total = _total_weight(len(micro_batches), weights, device, world_size, group)

    # Forward and backward.
    optimizer.zero_grad()
    loss_sum: Tensor | None = None
    for (micro_batch, _), weight in zip(accumulate(micro_batches, model), weights, strict=True):
        if weight == 0:
            scaled = _backward_of_nothing(model, micro_batch, loss_fn, scaler, autocast)
        else:
            with autocast():
                loss = loss_fn(model, micro_batch)
            scaled = loss * (weight * world_size / total)
            (scaled if scaler is None else scaler.scale(scaled)).backward()
        loss_sum = scaled.detach() + (0 if loss_sum is None else loss_sum)
    assert loss_sum is not None

    grad_norm = unscale_clip_step(model, optimizer, scaler=scaler, max_norm=max_norm)
    return Step(loss=loss_sum, total_weight=total, grad_norm=grad_norm)


def _backward_of_nothing(
    model: nn.Module,
    micro_batch: T,
    loss_fn: Callable[[nn.Module, T], Tensor],
    scaler: Scaler | None,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """Forward and backward of a micro-batch that must not count; returns a loss of 0.

    Its loss may be nan (a mean over no token), and 0 * nan is nan. So backward does not begin at
    the loss but at the model's outputs, with a gradient of 0. If the mean over nothing is inside
    the model, nan still arrives at a parameter, and 0 replaces it there. Backward must run, because
    ranks synchronise in it, and with SyncBatchNorm the losses of other ranks pass through it.
    """
    outputs: list[Any] = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    handles = [model.register_forward_hook(lambda _module, _args, output: outputs.append(output))]
    handles += [p.register_hook(_without_nan) for p in parameters if not is_held_by_zero3(p)]
    try:
        with autocast():
            loss = loss_fn(model, micro_batch)
        found = [x for x in tensors_in(outputs) if x.requires_grad]
        # The sum of no elements: its gradient is 0 for every element.
        nothing = torch.stack([x.reshape(-1)[:0].sum().float() for x in found or parameters]).sum()
        (nothing if scaler is None else scaler.scale(nothing)).backward()
    finally:
        for handle in handles:
            handle.remove()
    return torch.zeros_like(loss.detach())


def _without_nan(gradient: Tensor) -> Tensor:
    return torch.where(torch.isfinite(gradient), gradient, torch.zeros_like(gradient))


def _total_weight(
    num_micro_batches: int,
    weights: Sequence[float],
    device: torch.device,
    world_size: int,
    group: dist.ProcessGroup | None,
) -> float:
    """Collective: the sum of all weights, or an error on every rank."""
    fits = num_micro_batches == len(weights) > 0 and all(0 <= w < math.inf for w in weights)
    own = [float(sum(weights)) if fits else 0.0, 0.0 if fits else 1.0]
    sums = torch.tensor(own, dtype=torch.float64, device=device)
    if world_size > 1:
        dist.all_reduce(sums, group=group)
    total, num_wrong = sums.tolist()
    if num_wrong or total <= 0:
        raise ValueError(
            f"accumulate_step: {num_wrong:.0f} ranks have no micro-batches or weights that do not "
            f"fit, and all weights add up to {total:g}; expected on each rank as many weights >= 0 "
            f"as micro-batches, at least one, {named_rank(group)} has {num_micro_batches} "
            f"micro-batches and weights {list(weights)}"
        )
    return total


def train_epoch_native(
    model: nn.parallel.DistributedDataParallel,
    loader: Iterable[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    num_accumulate: int,
) -> int:
    """Accumulation with torch alone: every sample of a step weighs the same.

    All ranks need equally many batches; the last group and the last batch may be smaller. `loss_fn`
    is a mean over samples.

    Returns:
        The number of optimizer steps.
    """
    num_steps = 0
    for group in micro_batch_groups(loader, num_accumulate):
        num_samples = torch.tensor(sum(len(targets) for _, targets in group), device=model.device)
        dist.all_reduce(num_samples, group=model.process_group)
        world_size = dist.get_world_size(model.process_group)
        for i, (inputs, targets) in enumerate(group):
            weight = len(targets) * world_size / num_samples.item()  # DDP divides by world_size
            with nullcontext() if i == len(group) - 1 else model.no_sync():
                (loss_fn(model(inputs), targets) * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
    return num_steps
