"""ZeRO stage 1: the optimiser's state is sharded; parameters and gradients are whole on every rank.

    every rank     owner of a piece                      every rank
    gradients  ->  average, update with any torch      ->  all-gather the
                   optimiser, state only here               updated parameters

Phases of a step:
1. average    each gradient goes to its owner (reduce-scatter), unless DDP has averaged already
2. update     the wrapped optimiser runs on what this rank owns
3. gather     the owners send the updated parameters to all

Example::

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    DDP(model)(x).backward(); optimizer.step(); schedule.step()

A rank owns whole parameters, not slices. So every optimiser works, including those that use a
parameter's shape or norm, and all state of a parameter is in one place. The disadvantage is the
balance: the rank that owns the largest parameter cannot own less than this parameter. Stage 2 cuts
by element instead.

ZeRO (P_os): arXiv 1910.02054. Memory of mixed-precision Adam in bytes per parameter: 4 + 12/N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.collectives.buckets import cut_into_buckets
from minidist.collectives.replicas import broadcast_tensors, check_same_tensors, raise_on_all
from minidist.errors import named_rank
from minidist.parallel.zero.buckets import ShardedBucket, elements_of
from minidist.parallel.zero.elementwise import why_not_per_parameter
from minidist.parallel.zero.exchange import GradientBucket, Pending, gather_rows, group_or_world
from minidist.parallel.zero.partition import Layout, Piece, by_parameter
from minidist.parallel.zero.state import (
    Cut,
    cut_optimizer_state,
    gather_parts,
    hyperparameters,
    merge_optimizer_parts,
    pack_optimizer_state,
)
from minidist.precision.clip import clip_by_global_norm, refuse_pieces
from minidist.unsupported import Unsupported

TOGETHER = Unsupported(
    "ShardedOptimizer, Zero2Optimizer",
    "optimisers whose step for one parameter depends on the others (LBFGS)",
    instead="use the optimiser itself on every rank, and BucketedDDP",
)
COPIES = Unsupported(
    "ShardedOptimizer, Zero2Optimizer",
    "copies and pickles of the optimiser",
    instead="save state_dict() or full_state_dict()",
)


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimiser whose state is spread over the ranks of a group.

    Use it like the optimiser that it wraps. `param_groups` hold all parameters, so schedulers and
    manual changes of hyperparameters work, and reach the wrapped optimiser at the next step.

    Args:
        params: parameters or groups of parameters, with the same form and order on every rank. If
            gradients are averaged here, rank 0's values are sent to all ranks, so that all ranks
            start equal; otherwise DDP has done this.
        optimizer_class: e.g. torch.optim.AdamW, or whatever makes an optimiser from parameters. It
            must treat every parameter by itself, which is tried out: see elementwise.py.
        group: ranks to shard over; None means all.
        average_gradients: average the gradients over the group, by reduce-scatter, in `step`. Set
            False if something else averages them (DDP).
        master_dtype: for parameters of a different dtype (torch.bfloat16), update copies of this
            dtype (torch.float32), and round the results to the parameters.
        bucket_bytes: parameters are sent in buckets of at most this size; a larger parameter is
            sent alone.
        **kwargs: arguments of `optimizer_class`.

    Raises:
        ValueError: an optimiser that cannot be sharded, or no parameters; at a step or a backward:
            parameters were converted to a different dtype or moved since.
        MismatchError: on every rank, if ranks hold parameters of different form.
        TypeError: the optimiser is copied or pickled.
    """

    # The dtype in which gradients travel; None means that of the parameters.
    reduce_dtype: torch.dtype | None = None

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        *,
        average_gradients: bool = False,
        master_dtype: torch.dtype | None = None,
        bucket_bytes: int = 25 << 20,
        **kwargs: Any,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"{type(self).__name__}: bucket_bytes must be positive")
        self._make_inner = partial(optimizer_class, **kwargs)
        # It has the same groups as this optimiser, but each holds only this rank's part (maybe
        # nothing).
        self.group = group_or_world(group)
        given, self.inner = self._try(
            lambda: (_with_lists(params), self._make_inner([{"params": []}]))
        )
        self.inner.param_groups.clear()
        self._try(lambda: self._check_kind(type(self.inner).__name__, given))
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.average_gradients = average_gradients
        self.master_dtype = master_dtype
        self.bucket_bytes = bucket_bytes
        self.buckets: list[ShardedBucket] = []
        self._loads = [0] * self.world_size
        self._averaged = False
        self._handed_over = False
        super().__init__(given, self.inner.defaults)
        self.state = self.inner.state

    def _try(self, make: Callable[[], Any]) -> Any:
        """What `make` returns; if it fails on any rank, an error on all ranks."""
        made, error = None, None
        try:
            made = make()
        except Exception as raised:
            error = raised
        problem = None if error is None else f"{type(error).__name__}: {error}"
        try:
            raise_on_all(problem, self.group, type(self).__name__)
        except ValueError as told:
            raise (told if error is None else error) from None
        return made

    def _check_kind(self, name: str, params: list[Any]) -> None:
        reason = why_not_per_parameter(self._make_inner, device_of(params))
        if reason is not None:
            raise TOGETHER.error(
                f"{name} needs all parameters in one place: {reason} ({named_rank()})",
                where=type(self).__name__,
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise COPIES.error(
            f"it was to be copied or pickled on {named_rank()}, and its group and its hooks would "
            "stay behind",
            TypeError,
            where=type(self).__name__,
        )

    # -- ownership -----------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also after training has begun; every rank must add the same."""
        # A parameter that is listed twice (manually passed tied weights) is one parameter.
        params = listed(param_group["params"])
        if isinstance(params, list):
            params = list(dict.fromkeys(params))
        super().add_param_group({**param_group, "params": params})
        added = self.param_groups[-1]
        before = sum(len(group["params"]) for group in self.param_groups[:-1])
        refuse_pieces(map(self._form, added["params"]), type(self).__name__)
        named = [(f"parameter {before + i}", self._form(p)) for i, p in enumerate(added["params"])]
        check_same_tensors(named, self.group)
        if self._averages:
            broadcast_tensors(added["params"], self.group)
        owned: list[Tensor] = []
        for params, layout in self._partition(added["params"]):
            bucket = self._make_bucket(params, layout)
            self.buckets.append(bucket)
            owned += bucket.owned
        # Some optimisers make state, or refuse parameters, when they get them.
        problem = None
        try:
            own = self._make_inner([{**hyperparameters(added), "params": owned}])
            self.inner.param_groups += own.param_groups
            self.inner.state.update(own.state)
        except Exception as error:
            problem = str(error)
        raise_on_all(problem, self.group, type(self).__name__)

    def _partition(self, params: list[Tensor]) -> Iterator[tuple[list[Tensor], Layout]]:
        """Cut a group's parameters into buckets, and each bucket into rows."""
        # A bucket has parameters of similar size, so its rows have similar length.
        ordered = sorted(params, key=lambda p: -self._form(p).numel())
        for indices in cut_into_buckets([self._form(p) for p in ordered], self.bucket_bytes):
            some = [ordered[i] for i in indices]
            numels = [self._form(p).numel() for p in some]
            yield some, by_parameter(numels, self.world_size, self._loads)

    def _form(self, param: Tensor) -> Tensor:
        """A tensor with the shape and dtype of the whole parameter."""
        return param

    def _make_bucket(self, params: list[Tensor], layout: Layout) -> ShardedBucket:
        first = params[0]
        pieces = [self._piece_of(params[p.index], p) for p in layout.rows[self.rank]]
        owned = pieces
        if self._needs_master(first):
            owned = [piece.detach().to(self.master_dtype) for piece in pieces]
        wire_dtype = self.reduce_dtype or first.dtype
        outgoing = GradientBucket(layout, self.group, first.device, wire_dtype, first.dtype)
        return ShardedBucket(params, layout, pieces, owned, outgoing)

    def _piece_of(self, param: Tensor, piece: Piece) -> Tensor:
        return param

    def _needs_master(self, param: Tensor) -> bool:
        return self.master_dtype is not None and param.dtype != self.master_dtype

    # -- a step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters on all ranks. Collective: every rank must call it.

        Args:
            closure: computes the loss and the gradients again; called once on every rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # 1. average
        self.prepare_gradients()
        # 2. update
        self._follow_parameters()
        self._copy_hyperparameters(self.param_groups, self.inner.param_groups)
        self.inner.step()
        self._copy_hyperparameters(self.inner.param_groups, self.param_groups)
        # 3. gather
        self._gather_parameters()
        self.drop_gradients()
        return loss

    def drop_gradients(self) -> None:
        """After a step, or a skipped one: the next begins with new gradients."""
        self._averaged = self._handed_over = False

    def _check_unchanged(self) -> None:
        """Raises ValueError if parameters are no longer of the dtype and device of their bucket."""
        known = {id(param) for bucket in self.buckets for param in bucket.params}
        strangers = sum(id(p) not in known for group in self.param_groups for p in group["params"])
        if strangers:
            raise ValueError(
                f"{type(self).__name__}: {strangers} parameters of param_groups were put there "
                f"since the optimizer was made, and no rank owns them ({named_rank()}); use "
                "add_param_group, or make the optimizer again"
            )
        for bucket in self.buckets:
            for param in bucket.params:
                outgoing = bucket.gradients
                if (param.dtype, param.device) != (outgoing.dtype, outgoing.device):
                    raise ValueError(
                        f"{type(self).__name__}: a parameter of shape {tuple(param.shape)} was "
                        "converted or moved since the optimizer was made: expected "
                        f"{outgoing.dtype} on {outgoing.device}, got {param.dtype} on "
                        f"{param.device} on {named_rank()}; make the optimizer after .to()"
                    )

    def _follow_parameters(self) -> None:
        """Parameters may have changed since the last step (load_state_dict): pieces follow."""
        for bucket in self.buckets:
            rows = bucket.layout.rows[self.rank]
            for mine, piece, cut in zip(bucket.owned, bucket.pieces, rows, strict=True):
                now = self._piece_of(bucket.params[cut.index], cut).detach()
                if mine is not piece:  # a master copy: keep elements that round to the parameter's
                    mine.copy_(torch.where(mine.to(now.dtype) == now, mine, now.to(mine.dtype)))
                elif mine.data_ptr() != now.data_ptr():
                    mine.data = now

    @torch.no_grad()
    def prepare_gradients(self) -> None:
        """Phase 1; then copy gradients to the master copies.

        Clipping and a GradScaler change the gradients of `held_parameters`. A second call before
        the step does nothing.
        """
        self._check_unchanged()
        self.reduce_gradients()
        if not self._handed_over:
            self._hand_over_gradients()
            self._handed_over = True

    def held_parameters(self) -> list[Tensor]:
        """The tensors whose `.grad` the step uses, after `prepare_gradients`."""
        if not self._keeps_shards:
            return [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        return [
            mine
            for bucket in self.buckets
            for mine, piece in zip(bucket.owned, bucket.layout.rows[self.rank], strict=True)
            if bucket.params[piece.index].requires_grad
        ]

    @property
    def shards_gradients(self) -> bool:
        """Whether ranks hold different gradients in a step, and so must decide together."""
        return self._keeps_shards and self.world_size > 1

    @property
    def differs_by_rank(self) -> bool:
        """Whether `state_dict` differs between ranks (`Checkpoints` asks)."""
        return self.world_size > 1

    @property
    def _keeps_shards(self) -> bool:
        """Whether the step uses gradients other than those in `.grad` of all parameters."""
        return self._averages or self.master_dtype is not None

    @property
    def _averages(self) -> bool:
        return self.average_gradients

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Phase 1 alone, to inspect or clip averaged gradients before the step.

        Afterwards a rank has only the gradients of its own parameters. All other gradients are
        None, so that no code can read a gradient that is not averaged.
        """
        if not self.average_gradients:
            return
        params = [p for bucket in self.buckets for p in bucket.params]
        if self._averaged:
            owned = {id(p) for bucket in self.buckets for p in bucket.pieces}
            if any(p.grad is not None for p in params if id(p) not in owned):
                raise RuntimeError(
                    f"[rank {self.rank}] backward() ran after the gradients had been averaged; "
                    "call step() or zero_grad() first"
                )
            return
        for bucket in self.buckets:
            for index, param in enumerate(bucket.params):
                if param.grad is not None:
                    bucket.gradients.add(index, param.grad)
                    param.grad = None
            bucket.gradients.launch()
        for bucket in self.buckets:
            row, present = bucket.gradients.finish()
            pieces = bucket.layout.rows[self.rank]
            for piece, param, has_gradient in zip(pieces, bucket.pieces, present, strict=True):
                if has_gradient:
                    gradient = row[piece.offset : piece.offset + piece.numel]
                    param.grad = gradient.view(param.shape)
        self._averaged = True

    def _hand_over_gradients(self) -> None:
        """Copy gradients to the master copies; pieces without a master copy keep their own."""
        for bucket in self.buckets:
            for mine, piece in zip(bucket.owned, bucket.pieces, strict=True):
                if mine is not piece:
                    mine.grad = None if piece.grad is None else piece.grad.to(mine.dtype)

    def _gather_parameters(self) -> None:
        """Send what this rank owns and receive the other parameters, two buckets at a time."""
        started: tuple[ShardedBucket, Pending] | None = None
        for bucket in self.buckets:
            first = bucket.params[0]
            row = first.new_empty(bucket.layout.sizes[self.rank])
            pieces = bucket.layout.rows[self.rank]
            for piece, mine in zip(pieces, bucket.owned, strict=True):
                row[piece.offset : piece.offset + piece.numel].view(mine.shape).copy_(mine)
                if self._needs_master(first):
                    mine.grad = None
            rows = first.new_empty(sum(bucket.layout.sizes))
            pending = gather_rows(rows, row, bucket.layout.sizes, self.group)
            if started is not None:
                self._unpack(*started)
            started = (bucket, pending)
        if started is not None:
            self._unpack(*started)

    def _unpack(self, bucket: ShardedBucket, pending: Pending) -> None:
        rows = pending.wait().split(list(bucket.layout.sizes))
        for row, pieces in zip(rows, bucket.layout.rows, strict=True):
            for piece in pieces:
                new = row[piece.offset : piece.offset + piece.numel]
                param = bucket.params[piece.index].detach()
                if piece.numel == param.numel():
                    param.copy_(new.view(param.shape))
                else:
                    elements_of(param, piece).copy_(new)

    @staticmethod
    def _copy_hyperparameters(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for old, new in zip(source, target, strict=True):
            new.update(hyperparameters(old))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, owned or not."""
        super().zero_grad(set_to_none)
        self._averaged = self._handed_over = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all parameters is at most `max_norm`.

        Collective. Returns the norm before scaling, the same on all ranks. It scales only the
        gradients of this rank's own parameters, because the step uses no others.
        """
        self.prepare_gradients()
        mine = [piece for bucket in self.buckets for piece in bucket.owned]
        return clip_by_global_norm(mine, max_norm, norm_type, self.group)

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard, without communication; save one file per rank.

        `full_state_dict` returns the whole state. `load_state_dict` loads both, but a shard only on
        the same rank of the same number of ranks.
        """
        part = pack_optimizer_state(self.param_groups, self.inner.state, self._cuts())
        return {"rank": self.rank, "world_size": self.world_size, **part}

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The state dict that the wrapped optimiser would have without sharding, on the CPU.

        Collective: every rank must call it; with `rank0_only` the other ranks get an empty dict.
        """
        return gather_parts(self.state_dict(), merge_optimizer_parts, self.group, rank0_only)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load a full state dict, sharded over any number of ranks or not, or this rank's shard.

        Raises:
            ValueError: the shard of a different rank, or groups of different sizes.
        """
        cut_optimizer_state(
            state_dict, self.inner, self.param_groups, self._cuts(), self.rank, self.world_size
        )
        self._copy_hyperparameters(self.inner.param_groups, self.param_groups)
        self.state = self.inner.state

    def _cuts(self) -> dict[Tensor, Cut]:
        """For each tensor of the wrapped optimiser, the cut of a parameter that it holds."""
        params = [p for group in self.param_groups for p in group["params"]]
        number = {id(p): i for i, p in enumerate(params)}
        cuts = {}
        for bucket in self.buckets:
            pieces = bucket.layout.rows[self.rank]
            for piece, mine in zip(pieces, bucket.owned, strict=True):
                param = bucket.params[piece.index]
                master = self._needs_master(param)
                shape = self._form(param).shape
                cuts[mine] = Cut(number[id(param)], shape, piece.begin, piece.end, master)
        return cuts


def _with_lists(params: Iterable[Any]) -> list[Any]:
    """Parameters, or groups that hold lists: an iterator could be looked at only once."""
    return [
        {**each, "params": listed(each["params"])} if isinstance(each, dict) else each
        for each in params
    ]


def listed(params: Any) -> list[Any] | set[Any]:
    """A group's parameters as a list; a set, which has no order, stays a set: torch rejects it."""
    if isinstance(params, set):
        return params
    return [params] if isinstance(params, Tensor) else list(params)


def device_of(params: list[Any]) -> torch.device:
    """The device of the first parameter in a list of parameters, or of groups with lists."""
    first = params[0] if params else None
    if isinstance(first, dict):
        first = next(iter(first["params"]), None)
    first = first[1] if isinstance(first, tuple) else first  # named parameters
    return first.device if isinstance(first, Tensor) else torch.device("cpu")
