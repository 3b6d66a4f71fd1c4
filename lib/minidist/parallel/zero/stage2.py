"""ZeRO stage 2: gradients are sharded too. They are sent and freed during the backward pass.

    backward:   g5  g4 | g3  g2 | g1           gradients appear, last layers first
    wire:          [bucket 0][bucket 1][bucket 2]  each bucket is reduce-scattered when it is full
    kept:          1/N       1/N       1/N      the mean of this rank's elements, nothing else

Phases:
1. collect   a hook copies each new gradient into its bucket and drops it
2. reduce    a full bucket is reduce-scattered, while backward continues
3. keep      at the end of backward each rank adds the mean of its elements to its shard
4. step      as in stage 1: update the rank's own part, all-gather the parameters

Example::

    optimizer = Zero2Optimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    loss(model(x)).backward()         # no DDP: the averaging happens here
    optimizer.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()

A bucket is cut by element, into N equal rows, so that every rank has equal work and keeps 1/N.
Therefore the wrapped optimiser must treat all elements alike: SGD, Adam and similar optimisers do,
optimisers that use the shape of a parameter do not.

ZeRO (P_os+g): arXiv 1910.02054. Memory of mixed-precision Adam in bytes per parameter: 2 + 14/N.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.collectives.buckets import cut_into_buckets
from minidist.collectives.replicas import raise_on_all
from minidist.errors import named_rank
from minidist.parallel.zero.buckets import ShardedBucket, elements_of
from minidist.parallel.zero.elementwise import refuse_whole, why_not_elementwise
from minidist.parallel.zero.partition import Layout, Piece, by_element
from minidist.parallel.zero.stage1 import ShardedOptimizer, device_of, listed
from minidist.unsupported import Unsupported

TWICE = Unsupported(
    "Zero2Optimizer",
    "parameters that are used twice with reentrant checkpointing",
    instead="use minidist.parallel.recompute, or checkpoint(..., use_reentrant=False)",
)


class Zero2Optimizer(ShardedOptimizer):
    """A sharded optimiser that averages and shards the gradients during the backward pass.

    After backward the `grad` of each parameter is None. The gradient shards belong to the tensors
    that the wrapped optimiser `inner` updates. `backward()` is collective.

    Args:
        params, optimizer_class, group, master_dtype, bucket_bytes: as in `ShardedOptimizer`.
        reduce_dtype: dtype in which gradients travel; None means the parameters' dtype.
        **kwargs: arguments of `optimizer_class`.

    Raises:
        ValueError: an optimiser that does not treat elements alike, which is tried out (see
            elementwise.py), or, on all ranks, parameters that are not contiguous on some rank.
        RuntimeError: in a backward, after one that ended with an error.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        *,
        master_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        bucket_bytes: int = 25 << 20,
        **kwargs: Any,
    ) -> None:
        self.reduce_dtype = reduce_dtype
        self._sync = True
        self._used = False  # a step has used the shards of gradients
        self._next = 0  # bucket to send next
        self._missing: dict[int, int] = {}  # bucket -> gradients not seen in this backward
        self._running: weakref.ref[Any] | None = None  # dies with the backward that collects
        super().__init__(
            params,
            optimizer_class,
            group,
            master_dtype=master_dtype,
            bucket_bytes=bucket_bytes,
            **kwargs,
        )

    def _check_kind(self, name: str, params: list[Any]) -> None:
        reason = why_not_elementwise(self._make_inner, device_of(params))
        if reason is not None:
            raise refuse_whole("Zero2Optimizer", name, reason)

    # -- ownership -----------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also after training has begun; every rank must add the same."""
        params = listed(param_group["params"])
        tensors = [each[1] if isinstance(each, tuple) else each for each in params]
        strided = [
            f"a parameter of shape {tuple(p.shape)} with strides {p.stride()} is not contiguous "
            "and cannot be cut by element; make it contiguous, or use ShardedOptimizer"
            for p in tensors
            if isinstance(p, Tensor) and not p.is_contiguous()
        ]
        raise_on_all(strided[0] if strided else None, self.group, "Zero2Optimizer")
        super().add_param_group({**param_group, "params": params})

    def _partition(self, params: list[Tensor]) -> Iterator[tuple[list[Tensor], Layout]]:
        # Backward reaches the last parameters first, so their buckets come first.
        ordered = params[::-1]
        for indices in cut_into_buckets(ordered, self.bucket_bytes):
            some = [ordered[i] for i in indices]
            yield some, by_element([p.numel() for p in some], self.world_size)

    def _piece_of(self, param: Tensor, piece: Piece) -> Tensor:
        return elements_of(param.detach(), piece)

    def _make_bucket(self, params: list[Tensor], layout: Layout) -> ShardedBucket:
        bucket = super()._make_bucket(params, layout)
        number = len(self.buckets)
        for index, param in enumerate(params):
            # torch accepts hooks only on tensors that require a gradient. A frozen parameter may
            # require one later.
            frozen = not param.requires_grad
            param.requires_grad_(True)
            param.register_post_accumulate_grad_hook(self._collector(number, index))
            param.requires_grad_(not frozen)
        return bucket

    # -- backward ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients whole and local in the block; the next backward outside sends the sum.

        This saves communication in accumulation, but meanwhile costs the memory of whole gradients.
        Without it, each backward adds to the shards. Only `backward` must be inside the block.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _collector(self, number: int, index: int) -> Any:
        def collect(param: Tensor) -> None:
            # 1. collect
            if self._missing and (self._running is None or self._running() is None):
                raise RuntimeError(
                    f"[rank {self.rank}] Zero2Optimizer: the last backward() ended with an error; "
                    + (
                        "it had sent some gradients, so the ranks are out of step: start again "
                        "from a checkpoint"
                        if self._next
                        else "call zero_grad() first"
                    )
                )
            if not self._missing:
                self._check_unchanged()
                self._missing = {
                    i: sum(p.requires_grad for p in bucket.params)
                    for i, bucket in enumerate(self.buckets)
                }
                self._next = 0
                end = partial(self._end_backward)
                self._running = weakref.ref(end)
                torch.autograd.Variable._execution_engine.queue_callback(end)
            assert param.grad is not None
            if self._sync and number < self._next:
                raise TWICE.error(
                    f"one of shape {tuple(param.shape)} got another gradient after its bucket was "
                    f"sent on {named_rank()}",
                    RuntimeError,
                )
            self.buckets[number].gradients.add(index, param.grad)
            param.grad = None
            self._missing[number] -= 1
            if self._sync:
                self._send_full_buckets()

        return collect

    def _send_full_buckets(self) -> None:
        # 2. reduce. Always in the order of the buckets, because all ranks must use the same order,
        # and on a rank that does not use a parameter, its bucket is full only at the end.
        while self._next < len(self.buckets) and self._missing[self._next] <= 0:
            self.buckets[self._next].gradients.launch()
            self._next += 1

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._missing = dict.fromkeys(self._missing, 0)
        if self._sync:
            self._send_full_buckets()
            # 3. keep
            if self._used:  # `model.zero_grad()` does not reach the shards
                self._clear_shards()
            for bucket in self.buckets:
                self._keep(bucket)
        self._missing, self._next = {}, 0

    def _keep(self, bucket: ShardedBucket) -> None:
        row, present = bucket.gradients.finish()
        rows = bucket.layout.rows[self.rank]
        for piece, mine, has_gradient in zip(rows, bucket.pieces, present, strict=True):
            if has_gradient:
                gradient = row[piece.offset : piece.offset + piece.numel]
                mine.grad = gradient if mine.grad is None else mine.grad.add_(gradient)

    def drop_gradients(self) -> None:
        """After a step, or a skipped one: the next backward begins new shards."""
        super().drop_gradients()
        self._used = True

    def _clear_shards(self, set_to_none: bool = True) -> None:
        self._used = False
        for bucket in self.buckets:
            for mine in bucket.pieces:
                if set_to_none:
                    mine.grad = None
                elif mine.grad is not None:
                    mine.grad.zero_()

    def reduce_gradients(self) -> None:
        """Does nothing, because backward has reduced; raises if gradients were never averaged."""
        if any(not bucket.gradients.is_empty for bucket in self.buckets):
            raise RuntimeError(
                f"[rank {self.rank}] the last backward() before step() was inside no_sync(), so "
                "its gradients were never averaged"
            )

    @property
    def _averages(self) -> bool:
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradient shards, and the gradients that no_sync() has kept."""
        super().zero_grad(set_to_none)
        if not self._next:  # else a backward that ended with an error may have sent gradients
            self._missing = {}
        for bucket in self.buckets:
            bucket.gradients.clear()
        self._clear_shards(set_to_none)
