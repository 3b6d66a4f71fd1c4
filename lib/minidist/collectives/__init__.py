"""Collectives, built on send and receive.

An algorithm is data: a `Schedule`, a list of steps of (src, dst, chunk, "reduce" or "copy"). The
functions of `algorithms` make the schedules. One executor runs every schedule, the lectures draw
schedules, and `Schedule.time_s` estimates how long a schedule takes.

| read in this order | |
|---|---|
| `schedule`, `algorithms` | the algorithms as data; no torch |
| `executor`, `reduction` | the loop that sends, receives and adds |
| `ring`, `tree`, `halving_doubling`, `direct` | all-reduce, reduce-scatter, all-gather |
| `rooted`, `alltoall`, `hierarchical` | broadcast, reduce, gather, scatter; all-to-all; nodes |
| `async_work`, `issue` | `async_op=True` and what it guarantees; validation |
| `ddp_hooks`, `torch_backend` | DDP communication hooks; the torch.distributed backend "minidist" |
| `log` | which rank called what, how many bytes, which rank waited for which |

Example::

    ring_all_reduce(gradient, "avg")            # in place, on all ranks of the default group
    work = tree_all_reduce(gradient, async_op=True)
    work.wait()

Names that need torch are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minidist.collectives.algorithms import (
    all_to_all_steps,
    broadcast_steps,
    direct_steps,
    double_tree_steps,
    gather_steps,
    halving_doubling_steps,
    hierarchical_steps,
    reduce_steps,
    ring_all_gather_steps,
    ring_reduce_scatter_steps,
    ring_steps,
    scatter_steps,
    tree_steps,
)
from minidist.collectives.schedule import Schedule, Transfer, chunk_offsets, simulate

if TYPE_CHECKING:
    from minidist.collectives.alltoall import all_to_all
    from minidist.collectives.async_work import CollectiveWork
    from minidist.collectives.ddp_hooks import (
        direct_hook,
        double_tree_hook,
        halving_doubling_hook,
        hierarchical_hook,
        make_hook,
        ring_hook,
        tree_hook,
    )
    from minidist.collectives.direct import (
        direct_all_gather,
        direct_all_reduce,
        direct_reduce_scatter,
    )
    from minidist.collectives.executor import Transport, even_chunks, list_chunks, run_steps
    from minidist.collectives.halving_doubling import halving_doubling_all_reduce
    from minidist.collectives.hierarchical import hierarchical_all_reduce, node_groups
    from minidist.collectives.log import CollectiveLog
    from minidist.collectives.records import MergedLog, Record
    from minidist.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
    from minidist.collectives.rooted import broadcast, gather, reduce, scatter
    from minidist.collectives.torch_backend import register
    from minidist.collectives.tree import tree_all_reduce

__all__ = [
    "CollectiveLog",
    "CollectiveWork",
    "MergedLog",
    "Record",
    "Schedule",
    "Transfer",
    "Transport",
    "all_to_all",
    "all_to_all_steps",
    "broadcast",
    "broadcast_steps",
    "chunk_offsets",
    "direct_all_gather",
    "direct_all_reduce",
    "direct_hook",
    "direct_reduce_scatter",
    "direct_steps",
    "double_tree_hook",
    "double_tree_steps",
    "even_chunks",
    "gather",
    "gather_steps",
    "halving_doubling_all_reduce",
    "halving_doubling_hook",
    "halving_doubling_steps",
    "hierarchical_all_reduce",
    "hierarchical_hook",
    "hierarchical_steps",
    "list_chunks",
    "make_hook",
    "node_groups",
    "reduce",
    "reduce_steps",
    "register",
    "ring_all_gather",
    "ring_all_gather_steps",
    "ring_all_reduce",
    "ring_hook",
    "ring_reduce_scatter",
    "ring_reduce_scatter_steps",
    "ring_steps",
    "run_steps",
    "scatter",
    "scatter_steps",
    "simulate",
    "tree_all_reduce",
    "tree_hook",
    "tree_steps",
]

_LAZY = {
    "CollectiveLog": "log",
    "CollectiveWork": "async_work",
    "MergedLog": "records",
    "Record": "records",
    "Transport": "executor",
    "all_to_all": "alltoall",
    "broadcast": "rooted",
    "direct_all_gather": "direct",
    "direct_all_reduce": "direct",
    "direct_hook": "ddp_hooks",
    "direct_reduce_scatter": "direct",
    "double_tree_hook": "ddp_hooks",
    "even_chunks": "executor",
    "gather": "rooted",
    "halving_doubling_all_reduce": "halving_doubling",
    "halving_doubling_hook": "ddp_hooks",
    "hierarchical_all_reduce": "hierarchical",
    "hierarchical_hook": "ddp_hooks",
    "list_chunks": "executor",
    "make_hook": "ddp_hooks",
    "node_groups": "hierarchical",
    "reduce": "rooted",
    "register": "torch_backend",
    "ring_all_gather": "ring",
    "ring_all_reduce": "ring",
    "ring_hook": "ddp_hooks",
    "ring_reduce_scatter": "ring",
    "run_steps": "executor",
    "scatter": "rooted",
    "tree_all_reduce": "tree",
    "tree_hook": "ddp_hooks",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
