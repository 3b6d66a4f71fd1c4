"""Hybrid parallelism: data, pipeline, context and tensor parallelism of one GPT at the same time.

Read in this order:

- `stage`    what a rank holds: layers split (tp), sequences split (cp), blocks distributed (pp)
- `trainer`  a training step over all axes: forward and backward, gradients, clipping, update
- `state`    which elements a rank holds, and which of them count on this rank; the whole model
             again from all ranks
- `experts`  a model with experts, which dp ranks share (ep)
- `parts`    boxes: which elements of which tensor
- `native`   two axes with torch alone: DTensor and FSDP2 (not imported here)

How the axes share the work of one step:

    axis   what is split                what is sent                            when
    tp     every layer                  activations (all-reduce)                in every block
    cp     every sequence               keys and values (ring)                  in every block
    pp     the list of blocks           activations (to the next stage)         per micro-batch
    dp     the batch                    gradients (all-reduce, reduce-scatter)  once per step
    ep     the experts, over dp ranks   tokens to experts and back (all-to-all) in every block

So tp needs the fastest links, while dp can use the slowest. The axes of the mesh have this order.
Papers: Megatron-LM (arXiv 2104.04473, 3D parallelism), Llama 3 (arXiv 2407.21783, section 3.3.2).
"""

from minidist.parallel.hybrid.experts import ExpertTrainer
from minidist.parallel.hybrid.parts import Part, boxes_of_range
from minidist.parallel.hybrid.stage import HybridStage, build_stages
from minidist.parallel.hybrid.trainer import HybridTrainer

__all__ = [
    "ExpertTrainer",
    "HybridStage",
    "HybridTrainer",
    "Part",
    "boxes_of_range",
    "build_stages",
]
