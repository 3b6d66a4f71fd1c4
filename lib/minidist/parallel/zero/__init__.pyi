from .memory import Bytes, count_bytes, formula_bytes, memory_limit
from .stage1 import ShardedOptimizer
from .stage2 import Zero2Optimizer
from .stage3 import Zero3
from .state import merge_optimizer_parts, merge_parts
from .whole import WholeOptimizer

__all__ = [
    "Bytes",
    "ShardedOptimizer",
    "WholeOptimizer",
    "Zero2Optimizer",
    "Zero3",
    "count_bytes",
    "formula_bytes",
    "memory_limit",
    "merge_optimizer_parts",
    "merge_parts",
]
