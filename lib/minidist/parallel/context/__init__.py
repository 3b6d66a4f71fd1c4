"""Context parallelism: one sequence over several ranks, for contexts that one rank cannot hold.

Read in this order:

- `layout`   which tokens a rank holds; why zig-zag
- `ring`     ring attention, forward and backward
- `ulysses`  the alternative: exchange tokens for heads
- `gpt`      a GPT on split sequences: positions, loss, gradients
- `traffic`  formulas for the bytes that both methods send
- `native`   context parallelism with torch alone (not imported here)

Papers: Ring Attention (arXiv 2310.01889), DeepSpeed Ulysses (arXiv 2309.14509).
"""

from minidist.parallel.context.gpt import (
    ContextParallelGPT,
    context_parallel_gpt,
    make_attention,
    mean_over_ranks,
    sum_gradients,
)
from minidist.parallel.context.layout import (
    Layout,
    causal_work,
    positions,
    shard_sequence,
    unshard_sequence,
)
from minidist.parallel.context.ring import ring_attention
from minidist.parallel.context.traffic import Sent, ring_bytes, ulysses_bytes
from minidist.parallel.context.ulysses import ulysses_attention

__all__ = [
    "ContextParallelGPT",
    "Layout",
    "Sent",
    "causal_work",
    "context_parallel_gpt",
    "make_attention",
    "mean_over_ranks",
    "positions",
    "ring_attention",
    "ring_bytes",
    "shard_sequence",
    "sum_gradients",
    "ulysses_attention",
    "ulysses_bytes",
    "unshard_sequence",
]
