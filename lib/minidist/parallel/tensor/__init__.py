"""Tensor and sequence parallelism: every layer split over the ranks of a group.

Read in this order:

- `mappings`  f and g: the operators between replicated and split tensors, forward and backward
- `layers`    column-parallel and row-parallel linear layers, overlap in the backward pass
- `vocab`     embedding, output layer and cross-entropy split along the vocabulary
- `block`     attention, MLP and block, with and without sequence parallelism
- `gpt`       a whole GPT, built from the unsplit GPT
- `state`     full state dicts from parts and back, clipping of gradients
- `traffic`   formulas for the bytes that all of this sends
- `native`    the same GPT split by torch's DTensor (not imported here)
- `config`    the options that the layers share, and the second random stream

Papers: Megatron-LM (arXiv 1909.08053), Reducing Activation Recomputation (arXiv 2205.05198).
"""

from minidist.parallel.tensor.block import ParallelAttention, ParallelBlock, ParallelMLP
from minidist.parallel.tensor.config import RngTracker, TensorParallel
from minidist.parallel.tensor.gpt import ParallelGPT, parallelize_gpt
from minidist.parallel.tensor.layers import (
    ColumnParallelLinear,
    ParallelLayerNorm,
    RowParallelLinear,
    column_parallel,
)
from minidist.parallel.tensor.mappings import (
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
    scatter_to,
)
from minidist.parallel.tensor.state import (
    clip_grad_norm,
    full_state_dict,
    load_full_state_dict,
    sharded_parameters,
)
from minidist.parallel.tensor.traffic import Traffic, block_traffic, wire_bytes
from minidist.parallel.tensor.vocab import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelBlock",
    "ParallelGPT",
    "ParallelLayerNorm",
    "ParallelMLP",
    "RngTracker",
    "RowParallelLinear",
    "TensorParallel",
    "Traffic",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "block_traffic",
    "clip_grad_norm",
    "column_parallel",
    "copy_to",
    "full_state_dict",
    "gather_from",
    "gather_sequence",
    "load_full_state_dict",
    "parallelize_gpt",
    "reduce_from",
    "reduce_scatter_sequence",
    "scatter_to",
    "sharded_parameters",
    "vocab_parallel_cross_entropy",
    "wire_bytes",
]
