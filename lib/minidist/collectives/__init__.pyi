from .algorithms import (
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
from .alltoall import all_to_all
from .async_work import CollectiveWork
from .barrier import monitored_barrier
from .ddp_hooks import (
    direct_hook,
    double_tree_hook,
    halving_doubling_hook,
    hierarchical_hook,
    make_hook,
    ring_hook,
    tree_hook,
)
from .direct import direct_all_gather, direct_all_reduce, direct_reduce_scatter
from .halving_doubling import halving_doubling_all_reduce
from .hierarchical import hierarchical_all_reduce, node_groups
from .log import CollectiveLog
from .ordered import ordered_all_reduce
from .records import MergedLog, Record
from .ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from .rooted import broadcast, gather, reduce, scatter
from .schedule import Schedule, Transfer, chunk_offsets, simulate
from .torch_backend import register
from .transport import Transport, even_chunks, list_chunks, run_steps
from .tree import tree_all_reduce

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
    "monitored_barrier",
    "node_groups",
    "ordered_all_reduce",
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
