"""The torch.distributed backend "minidist": unchanged torch code runs on our collectives.

Example::

    register()
    dist.init_process_group("minidist")
    dist.all_reduce(t)                       # a ring
    DistributedDataParallel(model)           # its buckets travel on rings, in the background

Three layers: `dist.all_reduce` calls `MinidistGroup.allreduce`. This calls `ring_all_reduce` with
the group itself. `transport.run_steps` then calls the group's `send` and `recv`, which call an
inner gloo group.

Known to work: DDP, FSDP2's `fully_shard`, sub-groups, object collectives, send and recv. Known not
to work: communication hooks that call a collective in a callback of a future (PowerSGD), see the
module `async_work`; `split_group`; sparse tensors.
"""

# torch declares overloads for its callers; the methods here accept the arguments of all overloads.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from minidist.collectives.alltoall import all_to_all
from minidist.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from minidist.collectives.rooted import broadcast, gather, reduce, scatter
from minidist.collectives.tree import tree_all_reduce
from minidist.device import NamedGroup

NAME = "minidist"


def register() -> None:
    """Register "minidist" with torch.distributed in this process. A second call does nothing."""
    if NAME.upper() not in dist.Backend._plugins:
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)


def _create(options: Any, _: Any = None) -> MinidistGroup:
    store = dist.PrefixStore("minidist/", options.store)
    rank, size = options.group_rank, options.group_size
    wire = dist.ProcessGroupGloo(store, rank, size, options.timeout)
    return MinidistGroup(wire, str(options.group_id))


class MinidistGroup(NamedGroup):
    """A process group that runs our collectives over gloo's messages.

    Args:
        wire: the gloo group that carries the messages.
        name: name of the group.
    """

    def __init__(self, wire: Any, name: str) -> None:
        super().__init__(wire.rank(), wire.size(), name, NAME)
        self._wire = wire

    def name(self) -> str:
        return NAME

    # ------------------------------------------------------------------ messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return self._wire.send(_list(tensors), dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return self._wire.recv(_list(tensors), src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._wire.recv_anysource(_list(tensors), tag)

    # --------------------------------------------------------------- collectives

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        return _together([ring_all_reduce(t, _op(opts), self, True) for t in _list(tensors)])

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        root = opts if isinstance(opts, int) else opts.rootRank
        return broadcast(_only(tensors), group=self, async_op=True, group_src=root)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        root, op = opts.rootRank, _op(opts)
        return reduce(_only(tensors), op=op, group=self, async_op=True, group_dst=root)

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
        outputs = output_lists[0] if output_lists else None
        return gather(_only(inputs), outputs, group=self, async_op=True, group_dst=opts.rootRank)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None, *_: Any) -> Any:
        inputs = input_lists[0] if input_lists else None
        return scatter(_only(outputs), inputs, group=self, async_op=True, group_src=opts.rootRank)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
        pairs = zip(output_lists, _list(inputs), strict=True)
        return _together([ring_all_gather(outputs, t, self, True) for outputs, t in pairs])

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        # torch passes the outputs per rank, each with one tensor per input.
        per_input = [list(column) for column in zip(*output_lists, strict=True)]
        return self.allgather(per_input, inputs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        return ring_all_gather(output, input, self, True)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return _together([ring_all_gather(o, i, self, True) for o, i in pairs])

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None, *_: Any) -> Any:
        pairs, op = zip(_list(outputs), input_lists, strict=True), _op(opts)
        return _together([ring_reduce_scatter(o, i, op, self, True) for o, i in pairs])

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Any:
        return ring_reduce_scatter(output, input, _op(opts), self, True)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.reduce_scatter(outputs, inputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
        return all_to_all(_list(outputs), _list(inputs), self, True)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        outputs, inputs = (
            list(t.split(list(splits)) if splits else t.chunk(self.size()))
            for t, splits in ((output, output_splits), (input, input_splits))
        )
        return all_to_all(outputs, inputs, self, True)

    def barrier(self, opts: Any = None, *_: Any) -> Any:
        # An all-reduce works as a barrier: no rank has the total before every rank has called.
        return tree_all_reduce(torch.zeros(1), group=self, async_op=True)

    # torch 2.11 calls these names; torch 2.13 calls the names above.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _Together(dist._Work):
    """Several collectives that were called as one."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        return all([work.wait(timeout) for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future:
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: [t for each in done.value() for t in each.value()])


def _together(works: list[Any]) -> Any:
    return works[0] if len(works) == 1 else _Together(works)


def _list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _only(tensors: Any) -> torch.Tensor:
    (tensor,) = _list(tensors)
    return tensor


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
