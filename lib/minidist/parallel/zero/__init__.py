"""ZeRO from scratch (arXiv 1910.02054): N ranks together hold one copy instead of N copies.

    stage   sharded                            class                 file
    1       optimiser state                    ShardedOptimizer      stage1.py
    2       + gradients                        Zero2Optimizer        stage2.py
    3       + parameters                       Zero3                 stage3.py, unit.py, flat.py

Read partition.py (which rank owns what) and exchange.py (how rows move) first; both are short.
"""

from __future__ import annotations

from minidist.parallel.zero.clip import clip_by_global_norm
from minidist.parallel.zero.memory import Bytes, count_bytes, formula_bytes, memory_limit
from minidist.parallel.zero.stage1 import ShardedOptimizer
from minidist.parallel.zero.stage2 import Zero2Optimizer
from minidist.parallel.zero.stage3 import Zero3
from minidist.parallel.zero.state import merge_optimizer_parts, merge_parts

__all__ = [
    "Bytes",
    "ShardedOptimizer",
    "Zero2Optimizer",
    "Zero3",
    "clip_by_global_norm",
    "count_bytes",
    "formula_bytes",
    "memory_limit",
    "merge_optimizer_parts",
    "merge_parts",
]
