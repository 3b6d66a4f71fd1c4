"""What one rank holds of a GPT under tensor, context and pipeline parallelism.

The three split the model in independent ways, so they can be applied one after another:

1. tp   a layer that holds a part replaces every whole layer,
2. cp   ring attention replaces attention; everything else works on each token alone,
3. pp   the blocks are distributed; the first stage also has the embeddings, the last the head.

Example, 4 layers, `pp=2`, `tp=2`: rank 3 has pp 1 and tp 1. It holds the second half of every layer
in blocks 2 and 3, the whole last norm, and the head for the second half of the vocabulary.

Names of parameters stay those of the unsplit GPT.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minidist.cost.parallelism import ParallelismConfig
from minidist.mesh import Mesh
from minidist.parallel.context import make_attention, positions
from minidist.parallel.pipeline import TensorSpec
from minidist.parallel.pipeline.partition import GPTStage
from minidist.parallel.tensor import parallelize_gpt
from minidist.replaced import shared_names
from minidist.unsupported import Unsupported

SHARED = Unsupported(
    "HybridTrainer",
    "shared weights, except for the token embedding and the head",
    instead="use GPTConfig(tied=True) for these two, and for others Zero3 or a PipelineExecutor, "
    "which sum the gradients of all uses",
)


def build_stages(
    model: Any,
    mesh: Mesh,
    config: ParallelismConfig,
    *,
    compute_dtype: torch.dtype | None = None,
) -> list[HybridStage]:
    """This rank's stages, one per chunk (`config.virtual_stages`). Collective along tp.

    Args:
        model: a `minidist.model.GPT` with the same weights on all ranks; not changed. Every rank
            builds the whole model once, so the model must fit into memory.
        compute_dtype: dtype of matrix products (autocast); None means the parameters' dtype.
    """
    check_shared(model)
    # 1. tp: parts of every layer.
    split = parallelize_gpt(model, mesh, sequence_parallel=config.sequence_parallel)
    # 2. cp: attention over the tokens of all ranks.
    if config.cp > 1:
        attend = make_attention(mesh.group("cp"))
        blocks: Any = split.blocks
        for block in blocks:
            block.attention.attend = attend
    # 3. pp: stage s of p ranks lives on rank s % p.
    num_stages = config.pp * config.virtual_stages
    own = range(mesh.coordinate("pp"), num_stages, config.pp)
    return [HybridStage(split, mesh, stage, num_stages, compute_dtype) for stage in own]


def check_shared(model: Any) -> None:
    """A trainer counts each element of the model once, and knows of one shared weight only."""
    tied = ["token_embedding.weight", "head.weight"] if model.config.tied else []
    for names in shared_names(model):
        if names != tied:
            raise SHARED.error(f"{' and '.join(names)} are one parameter")


class HybridStage(GPTStage):
    """Some consecutive blocks of a GPT, on this rank's part of the layers and of the sequence.

    The first stage takes tokens_BT, the others take x_BTD. The last stage returns logits_BTV of
    this rank's part of the vocabulary. T is this rank's part of the sequence (with sequence
    parallelism, x_BTD has 1 / tp of it).

    Args:
        split: a tensor-parallel GPT; its modules are shared.
        stage: which of `num_stages`. All have the same number of blocks.
    """

    def __init__(
        self,
        split: Any,
        mesh: Mesh,
        stage: int,
        num_stages: int,
        compute_dtype: torch.dtype | None,
    ) -> None:
        # Units are the embeddings (0), the blocks (1 to L), and norm with head (L + 1).
        num_units = len(split.blocks) + 2
        each = len(split.blocks) // num_stages
        begin = 1 + stage * each if stage else 0
        end = 1 + (stage + 1) * each if stage + 1 < num_stages else num_units
        super().__init__(split, range(begin, end), num_units)
        self.tp = getattr(split, "tp", None)  # for a split model's `embed`
        self.cp = (mesh.coordinate("cp"), mesh.size("cp"))
        self.compute_dtype = compute_dtype

    def forward(self, x: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """tokens_BT or x_BTD -> x_BTD or logits_BTV."""
        self.refuse_packed(documents_BT)
        # Autocast here and not around the step, because backward must run outside of autocast.
        with torch.autocast(x.device.type, self.compute_dtype, self.compute_dtype is not None):
            if self.is_first:
                x = self._embed(self, x, self.positions(x))
            for block in self.blocks.values():
                x = block(x)
            return self.head(self.norm(x)) if self.is_last else x

    def positions(self, tokens_BT: Tensor) -> Tensor:
        """Positions of this rank's tokens in their sequence; with cp they are not consecutive."""
        rank, size = self.cp
        return positions(tokens_BT.shape[1] * size, rank, size, device=tokens_BT.device)


def output_specs(
    config: ParallelismConfig,
    model_config: Any,
    micro_batch: int,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None,
) -> Sequence[TensorSpec]:
    """Shape and dtype of what each stage of the pipeline returns for a micro-batch.

    With these the pipeline needs no forward pass to find them. Such a pass would draw random
    numbers, which a resumed run would draw at a different point.
    """
    tokens = model_config.context // config.cp
    # Stages exchange the residual stream, which autocast leaves in the parameters' dtype.
    own = tokens // config.tp if config.sequence_parallel else tokens
    between = TensorSpec((micro_batch, own, model_config.width), dtype)
    vocabulary = -(-model_config.vocab_size // config.tp)  # padded to equal parts
    logits = TensorSpec((micro_batch, tokens, vocabulary), compute_dtype or dtype)
    return [between] * (config.pp * config.virtual_stages - 1) + [logits]
