"""Our all-reduces as communication hooks of DistributedDataParallel.

DDP passes a hook one bucket of gradients at a time, as soon as the bucket is full, while backward
continues. The hook returns a future of the averaged bucket. Our hooks start an asynchronous
all-reduce: the channel's thread sends the bucket while backward computes the next gradients.

Example::

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, ring_hook)                       # state: a group, None = default
    ddp.register_comm_hook((local, cross), hierarchical_hook)     # state: from node_groups
    ddp.register_comm_hook(None, make_hook(tree_all_reduce, num_chunks=8))

Torch's own: `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook`.
DDP: Li et al., "PyTorch Distributed", arXiv:2006.15704.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidist.collectives.direct import direct_all_reduce
from minidist.collectives.halving_doubling import halving_doubling_all_reduce
from minidist.collectives.hierarchical import hierarchical_all_reduce
from minidist.collectives.ring import ring_all_reduce
from minidist.collectives.tree import tree_all_reduce

# Hooks have no annotations: DDP compares annotations with classes, but in this module
# (`from __future__ import annotations`) they would be strings.
Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


def make_hook(all_reduce: Callable[..., Any], **options: Any) -> Hook:
    """A hook that averages each bucket by one of our all-reduces.

    Args:
        all_reduce: `ring_all_reduce` or a different function with the same arguments.
        options: passed on to it, e.g. `num_segments=2` or `accumulate_dtype=torch.float32`.

    Returns:
        `hook(state, bucket)`; state is the process group, None for the default group.
    """

    def hook(state, bucket):
        work = all_reduce(bucket.buffer(), "avg", state, async_op=True, **options)
        return _first(work.get_future())

    hook.__name__ = hook.__qualname__ = f"{all_reduce.__name__}_hook"
    return hook


ring_hook = make_hook(ring_all_reduce)
tree_hook = make_hook(tree_all_reduce)
double_tree_hook = make_hook(tree_all_reduce, double=True)
halving_doubling_hook = make_hook(halving_doubling_all_reduce)
direct_hook = make_hook(direct_all_reduce)


def hierarchical_hook(state, bucket):
    """Averages each bucket by a hierarchical all-reduce; state is (local_group, cross_group)."""
    local_group, cross_group = state
    groups = {"local_group": local_group, "cross_group": cross_group}
    work = hierarchical_all_reduce(bucket.buffer(), "avg", async_op=True, **groups)
    return _first(work.get_future())


def _first(future: torch.futures.Future) -> torch.futures.Future:
    """The future of one tensor, as DDP wants it; a collective's future holds a list of tensors."""
    return future.then(lambda done: done.value()[0])
