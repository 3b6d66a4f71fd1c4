"""Muon, LAMB, Shampoo, ... over the pieces of a Zero3 model: each parameter is whole on one rank.

    pieces on all ranks        owner of the parameter              pieces on all ranks
    weights, gradients    ->   both whole; a step, state here  ->  new weights

Stage 3 cuts parameters by element, but these optimisers look at rows, norms or singular values. So
each parameter has an owner, as in stage 1. Three all-to-alls per bucket move its elements: each
element goes to one rank and back, whereas an all-gather would send it to all of them.

Example, Muon for the matrices and AdamW for the rest::

    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]   # before: pieces are 1-D
    zero = Zero3(model, units=model.blocks)
    muon = WholeOptimizer(zero, matrices, torch.optim.Muon, lr=0.02)
    others = {p for p in model.parameters()} - set(matrices)
    adam = torch.optim.AdamW([p for p in model.parameters() if p in others], lr=1e-3)
    loss(model(x)).backward(); zero.clip_grad_norm_(1.0); muon.step(); adam.step()

Memory per rank: the optimiser's state / N; in a step, two times the largest bucket, and what the
rank owns (weights and gradients) / N. Distributed Muon: arXiv 2502.16982, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.errors import named_rank
from minidist.parallel.zero.buckets import ShardedBucket
from minidist.parallel.zero.exchange import GradientBucket
from minidist.parallel.zero.partition import Layout
from minidist.parallel.zero.stage1 import ShardedOptimizer
from minidist.parallel.zero.stage3 import Zero3
from minidist.precision.clip import clip_by_global_norm


class WholeOptimizer(ShardedOptimizer):
    """An optimiser that needs whole parameters, over some or all pieces of a `Zero3` model.

    Clipping, scaling, schedules and `zero.save_sharded(folder, optimizer)` work as with an
    optimiser over the pieces; its state dicts are those of `ShardedOptimizer`.

    Args:
        zero: the sharded model.
        params: pieces (the model's parameters), or groups of them; the same on every rank.
        optimizer_class: e.g. torch.optim.Muon, or whatever makes an optimiser from parameters. It
            gets tensors of the original shapes, and must treat every parameter by itself.
        bucket_bytes: parameters travel in buckets of at most this size; a larger one alone.
        **kwargs: arguments of `optimizer_class`.

    Raises:
        ValueError: parameters that are no pieces of the model, or an optimiser whose step for one
            parameter depends on the others.
    """

    elementwise = True  # it may have pieces, since it makes them whole (elementwise.py asks)

    def __init__(
        self,
        zero: Zero3,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        bucket_bytes: int = 25 << 20,
        **kwargs: Any,
    ) -> None:
        self._zero = zero
        self._routes: list[_Route] = []  # one per bucket
        super().__init__(params, optimizer_class, zero.group, bucket_bytes=bucket_bytes, **kwargs)

    # -- ownership -----------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add pieces, also after training has begun; every rank must add the same."""
        super().add_param_group(param_group)
        self._free()

    def _form(self, param: Tensor) -> Tensor:
        cuts = self._zero.cuts_of(param)
        if cuts is None:
            raise ValueError(
                f"WholeOptimizer: a parameter of shape {tuple(param.shape)} is not a piece of this "
                f"model on {named_rank()}; give it parameters of the model of Zero3"
            )
        form = torch.empty(cuts[0].shape, dtype=param.dtype, device="meta")
        return form.requires_grad_(param.requires_grad)

    def _make_bucket(self, params: list[Tensor], layout: Layout) -> ShardedBucket:
        mine = layout.rows[self.rank]
        line = params[0].new_empty(layout.sizes[self.rank], device=self._zero.device)
        owned: list[Tensor] = [
            line[p.offset : p.offset + p.numel].view(self._form(params[p.index]).shape)
            for p in mine
        ]
        pieces = [params[p.index] for p in mine]
        outgoing = GradientBucket(layout, self.group, line.device, line.dtype, line.dtype)
        bucket = ShardedBucket(params, layout, pieces, owned, outgoing)
        route = self._route(params, layout, line)
        route.to_owners(line, params)  # an optimiser may read the parameters when it gets them
        self._routes.append(route)
        return bucket

    def _route(self, params: list[Tensor], layout: Layout, line: Tensor) -> _Route:
        cuts = [self._zero.cuts_of(param) or [] for param in params]
        where = [
            [
                slice(whole.offset + cut.begin, whole.offset + cut.end)
                for whole in layout.rows[self.rank]
                for cut in [cuts[whole.index][rank]]
            ]
            for rank in range(self.world_size)
        ]
        return _Route(
            line,
            order=[whole.index for row in layout.rows for whole in row],
            where=[each for some in where for each in some],
            held=[sum(params[whole.index].numel() for whole in row) for row in layout.rows],
            owned=[sum(each.stop - each.start for each in some) for some in where],
            group=self.group,
        )

    # -- a step --------------------------------------------------------------------------------

    def prepare_gradients(self) -> None:
        """Does nothing: Zero3's backward has averaged, and the gradients are those of pieces."""

    @property
    def shards_gradients(self) -> bool:
        return self.world_size > 1

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale these gradients so that their norm is at most `max_norm`; collective.

        `zero.clip_grad_norm_` takes the norm over the whole model.
        """
        pieces = [p for group in self.param_groups for p in group["params"]]
        return clip_by_global_norm(pieces, max_norm, norm_type, self.group)

    def _follow_parameters(self) -> None:
        """Weights and gradients go to the owners."""
        every = [p for bucket in self.buckets for p in bucket.params]
        # A rank whose piece is empty does not know whether the parameter has a gradient.
        used = torch.tensor([p.grad is not None for p in every], dtype=torch.int32)
        used = used.to(self._zero.device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)
        has_gradient = dict(zip(every, used.tolist(), strict=True))
        for bucket, route in zip(self.buckets, self._routes, strict=True):
            route.allocate()
            route.to_owners(route.line, bucket.params)
            gradients = torch.empty_like(route.line)
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.params]
            route.to_owners(gradients, parts)
            rows = bucket.layout.rows[self.rank]
            for cut, piece, whole in zip(rows, bucket.pieces, bucket.owned, strict=True):
                part = gradients[cut.offset : cut.offset + cut.numel].view(whole.shape)
                whole.grad = part if has_gradient[piece] else None

    def _gather_parameters(self) -> None:
        """New weights go back to the pieces."""
        for bucket, route in zip(self.buckets, self._routes, strict=True):
            route.back_to_pieces(bucket.params)
        self._free()

    def _free(self) -> None:
        for bucket, route in zip(self.buckets, self._routes, strict=True):
            route.line.untyped_storage().resize_(0)
            for whole in bucket.owned:
                whole.grad = None


@dataclass
class _Route:
    """How the elements of a bucket go from the pieces to the owners and back."""

    line: Tensor  # this rank's whole parameters, one after the other; empty between steps
    order: list[int]  # indices of the bucket's parameters, owner by owner
    where: list[slice]  # where in `line` the pieces of rank 0, of rank 1, ... lie
    held: list[int]  # elements of this rank's pieces, per owner
    owned: list[int]  # elements of this rank's parameters, per rank that has their pieces
    group: dist.ProcessGroup

    def allocate(self) -> None:
        self.line.untyped_storage().resize_(self.line.numel() * self.line.element_size())

    def to_owners(self, line: Tensor, pieces: list[Tensor]) -> None:
        """Fill `line` with what all ranks hold of the parameters that this rank owns."""
        sent = torch.cat([pieces[i].detach().flatten() for i in self.order]).to(line.device)
        received = line.new_empty(sum(self.owned))
        dist.all_to_all_single(received, sent, self.owned, self.held, group=self.group)
        sizes = [where.stop - where.start for where in self.where]
        for where, part in zip(self.where, received.split(sizes), strict=True):
            line[where] = part

    def back_to_pieces(self, pieces: list[Tensor]) -> None:
        """Send the elements of `line` to the ranks that hold them."""
        sent = torch.cat([self.line.new_empty(0), *(self.line[where] for where in self.where)])
        received = self.line.new_empty(sum(self.held))
        dist.all_to_all_single(received, sent, self.held, self.owned, group=self.group)
        targets = [pieces[i].detach() for i in self.order]
        for target, part in zip(targets, received.split([t.numel() for t in targets]), strict=True):
            target.copy_(part.view(target.shape))
