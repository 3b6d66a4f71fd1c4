"""Data parallelism, step 4 of 4: bucketed all-reduces that overlap with backward.

This does in Python what torch's DistributedDataParallel does. As soon as all gradients of a bucket
have arrived, they are copied into it, and it is reduced while backward continues.

    backward:   | layer 3 | layer 2 | layer 1 |
    network:              | bucket 0 | bucket 1 | bucket 2 |
                                                ^ backward() returns here, gradients are means

Phases:
    1. wrap      compare the models, broadcast rank 0's, make buckets, hook the parameters
    2. forward   broadcast buffers, run the module, watch its outputs
    3. begin     the first gradient of an output or a parameter: backward has started
    4. arrive    a parameter's gradient is complete; fill and launch complete buckets, in order
    5. finish    end of backward: fill in missing gradients, launch the rest, wait, deliver

Example::

    ddp = BucketedDDP(model)
    for x, y in loader:                        # each rank has its own x, y
        optimizer.zero_grad()
        loss_fn(ddp(x), y).backward()          # p.grad is the mean over ranks when this returns
        optimizer.step()

Three rules make the result right, even if the ranks' data lead to different paths in the model.
Buckets are launched in one fixed order, because collectives are matched by their order. The
reduction takes the whole value of `p.grad`, so any number of backward passes may come before it. A
parameter whose gradient did not arrive still takes part, with the value of `p.grad` or zero, so no
rank waits for a message that is never sent.

How the loss was made does not matter: from outputs, from gradients of outputs (a gradient penalty),
from sub-modules, from objects that hold tensors, or from parameters alone.

Paper: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(arXiv 2006.15704).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.collectives.buckets import cut_into_buckets
from minidist.collectives.ordered import ordered_all_reduce
from minidist.collectives.replicas import broadcast_tensors, global_rank, raise_on_all
from minidist.errors import MinidistError, named_rank
from minidist.outputs import tensors_in
from minidist.parallel.data.buckets import FlatBucket, Work
from minidist.parallel.data.graph import accumulates, has_python_function, will_accumulate
from minidist.parallel.data.replicas import (
    broadcast_state,
    check_no_new_parameters,
    check_same_model,
    quick_modules,
    refuse_copy,
)
from minidist.unsupported import Unsupported

MIB = 2**20

SPARSE = Unsupported(
    "BucketedDDP", "sparse gradients", instead="use sparse=False in the embedding, or torch's DDP"
)
TWICE = Unsupported(
    "BucketedDDP",
    "parameters that are used both inside and outside of reentrant checkpointing",
    instead="use minidist.parallel.recompute, or checkpoint(..., use_reentrant=False)",
)

# Sums a flat tensor over the ranks, in place. May return before the sum is done, with a handle to
# wait for. All ranks call it with the same buckets in the same order.
Reduce = Callable[[Tensor], Work | None]


class State(Enum):
    """What a rank is doing."""

    IDLE = auto()  # gradients belong to the user
    LOCAL = auto()  # a backward runs whose forward was under no_sync; hooks do nothing
    REDUCING = auto()  # a synchronised backward runs: gradients go into buckets


class BucketedDDP(nn.Module):
    """Data parallelism: after `backward()`, gradients are the mean over the ranks of `group`.

    Args:
        module: the same on every rank in names, shapes and dtypes; values come from rank 0.
        group: the ranks that share the work; None means the default group.
        bucket_bytes: maximum bytes in a bucket. 0 gives every parameter its own bucket.
        first_bucket_bytes: the same for the first bucket, which decides when overlap starts.
        gradient_as_bucket_view: let `p.grad` be a view of its bucket. Saves one copy, and the
            memory of all gradients.
        find_unused: set this if some parameters may get no gradient. Without it, the gradient of
            such a parameter counts as zero. This is right if only some ranks do not use the
            parameter. If no rank uses it, it gets a gradient of zeros, and an optimizer with
            momentum or weight decay still changes it. With it, one more small all-reduce finds the
            parameters that no rank used; these keep their old gradient, usually None. Autograd is
            also asked which gradients this backward brings, so that no bucket waits for one that
            cannot come.
        broadcast_buffers: before each synchronised forward in training mode, overwrite buffers with
            those of rank 0.
        reorder: after the first backward, make new buckets in the order in which gradients came on
            rank 0. Without it, buckets have the reversed order of the parameters.
        reduce: replaces the all-reduce, e.g. by a ring or by compression. Sums in place.
        deterministic: sum in the order of the ranks (`ordered_all_reduce`): the same bits as one
            process that adds the gradients of as many micro-batches, if their number is a power of
            two. Slow: nothing overlaps, and every rank receives all gradients of all ranks.

    Register your own hooks that change gradients before wrapping: a later hook runs when some
    gradients have been copied into their buckets and others have not.

    `.to(dtype)` and `.to(device)` also work after wrapping, on all ranks alike: the next backward
    makes new buckets. A copy or a pickle is refused, because hooks do not travel with it.

    Raises:
        MismatchError: the ranks hold different models.
        ValueError: the module has no parameter to train, or a size is below zero.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
        gradient_as_bucket_view: bool = False,
        find_unused: bool = False,
        broadcast_buffers: bool = True,
        reorder: bool = True,
        reduce: Reduce | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        # Validate: without communication, so that a wrong call raises on every rank.
        if bucket_bytes < 0 or first_bucket_bytes < 0:
            raise ValueError(
                "BucketedDDP: bucket sizes must be at least 0 bytes, got "
                f"bucket_bytes={bucket_bytes}, first_bucket_bytes={first_bucket_bytes}"
            )
        if reduce is not None and deterministic:
            raise ValueError("BucketedDDP: give reduce= or deterministic=True, not both")
        trained = [p for p in module.parameters() if p.requires_grad]
        problem = None if trained else "no parameter of the module requires a gradient"
        raise_on_all(problem, group, "BucketedDDP")
        self.module = module
        self.group = group
        self.num_active = dist.get_world_size(group)  # ranks whose gradients count: see join.py
        self.source = 0  # rank of the group whose buffers and order of gradients count
        self.before_forward: Callable[[bool], None] | None = None  # set by join.py
        self._bucket_bytes = (bucket_bytes, first_bucket_bytes)
        self._as_view = gradient_as_bucket_view
        self._find_unused = find_unused
        self._broadcast_buffers = broadcast_buffers
        in_order = partial(ordered_all_reduce, group=group) if deterministic else None
        self._reduce: Reduce = reduce or in_order or self._all_reduce

        # Derive: every replica becomes equal to rank 0's.
        check_same_model(module, group)
        broadcast_state(module, group)

        # Build.
        self._state = State.IDLE
        self._sync = True
        self._running: weakref.ref[Any] | None = None  # dies with the backward that reduces
        self._task = -1  # autograd's number of this backward
        self._may_reenter = False  # with find_unused: a custom function may start a backward
        self._order_seen: list[Tensor] | None = [] if reorder else None
        self._make_buckets(list(reversed(trained)))
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def _all_reduce(self, flat: Tensor) -> Work | None:
        return dist.all_reduce(flat, group=self.group, async_op=True)

    def _make_buckets(self, order: list[nn.Parameter]) -> None:
        self._order = order
        self._buckets = [
            FlatBucket([order[i] for i in indices])
            for indices in cut_into_buckets(order, *self._bucket_bytes)
        ]
        self._place: dict[Tensor, tuple[FlatBucket, int]] = {
            parameter: (bucket, position)
            for bucket in self._buckets
            for position, parameter in enumerate(bucket.parameters)
        }
        self._num_launched = 0

    @property
    def buckets(self) -> tuple[FlatBucket, ...]:
        """The buckets in their order of launch."""
        return tuple(self._buckets)

    # --- forward ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. With gradients enabled, it prepares a synchronised backward.

        Raises:
            MinidistError: the last backward did not end, so the ranks are out of step.
            ValueError: parameters were unfrozen or added after wrapping.
        """
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._check()
        if self.before_forward is not None:
            self.before_forward(self._sync)
        if self._sync and self.shares_buffers():
            self.broadcast_buffers()
        output = self.module(*args, **kwargs)
        self._watch(output)
        return output

    def shares_buffers(self) -> bool:
        """Whether a synchronised forward would broadcast buffers now."""
        return (
            self._broadcast_buffers
            and self.module.training
            and any(each._buffers for each in quick_modules(self.module))
        )

    def broadcast_buffers(self) -> None:
        """Collective: overwrite buffers with those of rank 0, e.g. before an evaluation."""
        broadcast_tensors(self.module.buffers(), self.group, self.source)

    @property
    def synchronises(self) -> bool:
        """Whether a forward would prepare a synchronised backward now: not under `no_sync`."""
        return self._sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local: inside the block, `p.grad` sums them.

        The forward decides whether its backward is synchronised, so both must be inside the block.
        (A loss that does not come from outputs of a forward is kept local by its backward.) The
        next backward outside the block reduces the sum. Blocks may be nested.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _check(self) -> None:
        if self._state is State.LOCAL and torch._C._current_graph_task_id() == -1:
            self._state = State.IDLE  # the last local backward ended with an error
        self._check_in_step()
        check_no_new_parameters(self.module, self._place, "BucketedDDP")

    def _check_in_step(self) -> None:
        if self._state is State.REDUCING and (self._running is None or self._running() is None):
            raise MinidistError(
                "BucketedDDP: the last backward ended with an error, after it may have sent some "
                "gradients; the ranks are out of step: start again from a checkpoint",
                rank=dist.get_rank(),
            )

    def _watch(self, output: Any) -> None:
        """Let the first gradient that reaches an output begin the reduction.

        The gradients of parameters begin it as well. But on some rank it may happen that no
        parameter gets a gradient, and this rank must take part too.
        """
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if self._find_unused and not self._may_reenter:
            self._may_reenter = has_python_function(outputs)
        for tensor in outputs:
            if tensor not in self._place:  # a hook on a parameter would stay for ever
                tensor.register_hook(self._begin_at_output if self._sync else self._stay_local)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy(self)

    # --- backward -----------------------------------------------------------------------------

    def _stay_local(self, _grad: Tensor) -> None:
        if self._state is State.IDLE:
            self._state = State.LOCAL
            torch.autograd.Variable._execution_engine.queue_callback(self._end_local)

    def _end_local(self) -> None:
        if self._state is State.LOCAL:
            self._state = State.IDLE

    def _begin_at_output(self, _grad: Tensor) -> None:
        # Nothing to reduce in `autograd.grad`, which returns gradients and adds to no `p.grad`.
        if any(map(will_accumulate, self._order)) or accumulates():
            self._begin(fill=not self._may_reenter)

    @torch.no_grad()
    def _begin(self, fill: bool) -> None:
        self._check_in_step()
        if self._state is State.REDUCING:
            return  # a different output of the same backward came first
        finish = partial(self._finish)
        self._running, self._task = weakref.ref(finish), torch._C._current_graph_task_id()
        self._start()
        torch.autograd.Variable._execution_engine.queue_callback(finish)
        if self._find_unused and fill:
            self._fill(lambda parameter: not will_accumulate(parameter))
            self._launch()

    def _start(self) -> None:
        self._state = State.REDUCING
        if any(bucket.is_outdated for bucket in self._buckets):  # .to() after wrapping
            self._make_buckets(self._order)
        self._num_launched = 0
        for bucket in self._buckets:
            bucket.reset()

    def _arrive(self, parameter: Tensor) -> None:
        self._check_in_step()
        if self._state is State.LOCAL or (self._state is State.IDLE and not self._sync):
            return
        if self._state is State.IDLE:  # the loss does not come from outputs of forward
            check_no_new_parameters(self.module, self._place, "BucketedDDP")
            self._begin(fill=False)
        assert parameter.grad is not None
        bucket, position = self._place[parameter]
        if bucket.flat.layout != parameter.grad.layout:
            raise SPARSE.error(
                f"gradients must be dense, got {parameter.grad.layout} for a parameter of shape "
                f"{tuple(parameter.shape)} on {named_rank()}"
            )
        if position not in bucket.waiting:
            raise TWICE.error(
                f"one of shape {tuple(parameter.shape)} got a gradient twice in one backward on "
                f"{named_rank()}",
                MinidistError,
            )
        if torch._C._current_graph_task_id() != self._task:
            return  # in reentrant checkpointing: more may come, so `_finish` takes the sum
        self._take(bucket, position)
        if self._order_seen is not None:
            self._order_seen.append(parameter)
        if not bucket.waiting:
            self._launch()

    def _take(self, bucket: FlatBucket, position: int) -> None:
        bucket.take(position)
        if not bucket.waiting:
            with torch.no_grad():
                bucket.pack(1 / self.num_active, self._as_view)

    def _fill(self, which: Callable[[nn.Parameter], bool]) -> None:
        """Let parameters take part whose gradients do not arrive in this backward."""
        for bucket in self._buckets:
            for position in sorted(bucket.waiting):
                if which(bucket.parameters[position]):
                    self._take(bucket, position)

    @torch.no_grad()
    def _launch(self) -> None:
        """Start the reduction of every complete bucket that is next in the order."""
        while self._num_launched < len(self._buckets):
            bucket = self._buckets[self._num_launched]
            if bucket.waiting:
                return
            self._num_launched += 1
            bucket.work = self._reduce(bucket.flat)

    @torch.no_grad()
    def _finish(self) -> None:
        """Called by autograd at the end of backward: turn all gradients into means."""
        self._fill(lambda parameter: True)
        self._launch()
        used = self._agree_on_used() if self._find_unused else None
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.deliver(used, self._as_view)
        self._end()

    def _end(self) -> None:
        if self._order_seen is not None:
            self._reorder(self._order_seen)
            self._order_seen = None
        self._may_reenter = False
        self._state = State.IDLE

    def _agree_on_used(self, shadow: bool = False) -> set[nn.Parameter]:
        """Parameters that hold a gradient on any rank: the same set on all ranks."""
        bits = [int(p.grad is not None and not shadow) for p in self._order]
        counts = torch.tensor(bits, dtype=torch.int32, device=self._buckets[0].flat.device)
        dist.all_reduce(counts, group=self.group)
        return {p for p, count in zip(self._order, counts.tolist(), strict=True) if count}

    def _reorder(self, seen: list[Tensor]) -> None:
        """Once: rebuild the buckets in the order in which gradients really came on one rank."""
        index: dict[Tensor, int] = {p: i for i, p in enumerate(self._order)}
        order = list(dict.fromkeys([*seen, *self._order]))
        wire = torch.tensor([index[p] for p in order], device=self._buckets[0].flat.device)
        dist.broadcast(wire, src=global_rank(self.group, self.source), group=self.group)
        indices = wire.tolist()
        if indices == sorted(indices):
            return
        old = self._place
        self._make_buckets([self._order[i] for i in indices])
        for parameter, (bucket, position) in self._place.items():
            slot = old[parameter][0].slots[old[parameter][1]]
            if parameter.grad is not None and parameter.grad.data_ptr() == slot.data_ptr():
                bucket.slots[position].copy_(slot)
                parameter.grad = bucket.slots[position].detach()

    @torch.no_grad()
    def shadow_backward(self) -> None:
        """Collective: take part in the other ranks' backward with zeros in every bucket."""
        self._start()
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.waiting.clear()
        self._launch()
        if self._find_unused:
            self._agree_on_used(shadow=True)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
        self._end()
