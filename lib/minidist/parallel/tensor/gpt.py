"""A whole split GPT: built from the unsplit GPT, with the same results.

Example, on each rank of a group of 2::

    torch.manual_seed(0)                          # the same model on all ranks
    model = parallelize_gpt(GPT(config), mesh)    # holds about half of the parameters
    loss = model.loss(tokens_BT, targets_BT)      # the same value on all ranks, and as unsplit
    loss.backward()
    clip_grad_norm(model, 1.0)
    optimizer.step()                              # a plain optimizer over model.parameters()
    state = full_state_dict(model)                # as of the unsplit GPT

Names of parameters are those of the unsplit GPT.
Papers: Megatron-LM (arXiv 1909.08053), sequence parallelism (arXiv 2205.05198).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.errors import MismatchError
from minidist.mesh import Mesh
from minidist.packing import document_mask, document_positions
from minidist.parallel.tensor.block import ParallelBlock
from minidist.parallel.tensor.config import RngTracker, TensorParallel, split_evenly
from minidist.parallel.tensor.layers import ParallelLayerNorm, replicated
from minidist.parallel.tensor.mappings import all_gather, scatter_to
from minidist.parallel.tensor.state import sharded_parameters
from minidist.parallel.tensor.vocab import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)
from minidist.replaced import check_layer, check_parts, refuse_options, shared_names

_OPTIONS = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")


def parallelize_gpt(
    model: Any,
    mesh_or_group: Mesh | dist.ProcessGroup | None = None,
    *,
    sequence_parallel: bool = False,
    overlap: bool = False,
) -> ParallelGPT:
    """Split a GPT over the tensor-parallel ranks. Every rank of the group must call it.

    Args:
        model: a `minidist.model.GPT` with the same weights on all ranks, or on the meta device
            (then load a state with `load_full_state_dict`). It is not changed.
        mesh_or_group: a mesh (its axis "tp"), a group, or None for the default group.
        sequence_parallel, overlap: see `TensorParallel`.

    Raises:
        ValueError: heads, MLP features or (with sequence parallelism) tokens do not divide; or the
            model has parts or options that a split model would lose.
        MismatchError: the weights of a rank differ from those of rank 0 of the group.
    """
    # Validate what needs no communication, with the same result on every rank.
    tp = TensorParallel.of(mesh_or_group, sequence_parallel=sequence_parallel, overlap=overlap)
    tp.split("parallelize_gpt: heads", model.config.num_heads)
    tp.split("parallelize_gpt: features of the MLP", model.config.mlp_ratio * model.config.width)
    device = model.head.weight.device
    # Compare the weights.
    if tp.size > 1 and device.type != "meta":
        _check_same_weights(model, tp)
    # Build.
    if sequence_parallel and model.config.dropout > 0:
        rng = RngTracker(torch.initial_seed() % 2**31, tp.group, device)
        tp = TensorParallel(
            group=tp.group, sequence_parallel=sequence_parallel, overlap=overlap, rng=rng
        )
    return ParallelGPT(model, tp)


class ParallelGPT(nn.Module):
    """A GPT of which each rank holds a part. `parallelize_gpt` makes it.

    `blocks[i].attention.attend` may be replaced (context parallelism does).
    """

    def __init__(self, full: Any, tp: TensorParallel) -> None:
        super().__init__()
        parts = ("token_embedding", "position_embedding", "blocks", "norm", "head")
        check_parts("ParallelGPT", full, parts)
        check_layer("ParallelGPT", full.position_embedding, nn.Embedding)
        why = "positions are looked up on each rank alone"
        refuse_options("ParallelGPT", full.position_embedding, _OPTIONS, why)
        self.config = full.config
        self.training = full.training
        self.tp = tp
        self.token_embedding = VocabParallelEmbedding(full.token_embedding, tp)
        positions = full.position_embedding.weight
        self.position_embedding = nn.Embedding.from_pretrained(
            positions.detach().clone(), freeze=not positions.requires_grad
        )
        self.blocks = nn.ModuleList(ParallelBlock(block, tp) for block in full.blocks)
        self.norm = ParallelLayerNorm(full.norm, tp)
        self.head = VocabParallelHead(full.head, tp)
        _tie_as(full, self)
        self._inputs_checked = tp.size == 1

    def forward(
        self,
        tokens_BT: Tensor,
        positions_T: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Logits of this rank's part of the vocabulary, (B, T, ceil(V / n)).

        The first call compares the tokens (and, with dropout, the random streams) of all ranks.

        Args:
            tokens_BT: int64, the same on all ranks of the group.
            positions_T: position of each token in its sequence, (T,) or (B, T); None counts from 0.
            documents_BT: the document of each token, if rows hold several (`minidist.packing`);
                the same on all ranks of the group.

        Raises:
            ValueError: too many tokens, or T does not divide under sequence parallelism.
            MismatchError: tokens or random stream of a rank differ from rank 0 of the group.
        """
        mask = {}
        if documents_BT is not None:
            positions_T = document_positions(documents_BT)
            mask = {"mask_B1TT": document_mask(documents_BT)}
        if not self._inputs_checked:
            self._check_same_inputs(tokens_BT)
            self._inputs_checked = True
        x_BTD = self.embed(tokens_BT, positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD, **mask)
        return self.head(self.norm(x_BTD))

    def embed(self, tokens_BT: Tensor, positions_T: Tensor | None = None) -> Tensor:
        """Token plus position embedding, (B, T, D).

        With sequence parallelism, this rank's part (B, T / n, D).
        """
        num_tokens = tokens_BT.shape[1]
        if positions_T is None:
            if num_tokens > self.config.context:
                raise ValueError(
                    f"ParallelGPT: sequences of {num_tokens} tokens, but its context is "
                    f"{self.config.context}"
                )
            positions_T = torch.arange(num_tokens, device=tokens_BT.device)
        if self.tp.sequence_parallel:
            what = "ParallelGPT: tokens of a sequence (sequence parallelism)"
            split_evenly(what, num_tokens, self.tp.size, dist.get_rank())
            positions_T = scatter_to(positions_T, positions_T.dim() - 1, self.tp.group)
        weight = replicated(self.position_embedding.weight, self.tp)
        return self.token_embedding(tokens_BT) + F.embedding(positions_T, weight)

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        positions_T: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy per token, the same on all ranks. Targets of -100 are left out."""
        return vocab_parallel_cross_entropy(
            self(tokens_BT, positions_T, documents_BT),
            targets_BT,
            group=self.tp.group,
            vocab_size=self.config.vocab_size,
        )

    def _check_same_inputs(self, tokens_BT: Tensor) -> None:
        flat = tokens_BT.flatten()
        weights = torch.arange(1, len(flat) + 1, device=flat.device)
        # The ranks need the same seed only if they must draw the same dropout mask.
        state = torch.zeros(1, dtype=torch.uint8)
        if self.training and self.config.dropout > 0 and not self.tp.sequence_parallel:
            cpu = flat.device.type == "cpu"
            state = (torch if cpu else torch.get_device_module(flat.device)).get_rng_state()
        seeds = (state.long() * torch.arange(1, len(state) + 1)).sum()
        facts = torch.tensor(
            [tokens_BT.shape[0], tokens_BT.shape[-1], int((flat * weights).sum()), int(seeds)],
            device=flat.device,
        )
        gathered = all_gather(facts, 0, self.tp.group).view(self.tp.size, -1).tolist()
        for number, theirs in enumerate(gathered):
            who = f"rank {number} of the tensor-parallel group"
            if theirs[:3] != gathered[0][:3]:
                raise MismatchError(
                    f"ParallelGPT: {who} got other tokens than its rank 0: expected shape "
                    f"{tuple(gathered[0][:2])} and checksum {gathered[0][2]}, got "
                    f"{tuple(theirs[:2])} and {theirs[2]}; all of them have to read the same batch",
                    rank=dist.get_rank(),
                )
            if theirs[3] != gathered[0][3]:
                raise MismatchError(
                    f"ParallelGPT: {who} would draw other dropout masks than its rank 0; seed the "
                    "default random stream alike within the group",
                    rank=dist.get_rank(),
                )


def _tie_as(full: nn.Module, parallel: nn.Module) -> None:
    """Let the split model share parameters in the same places as the whole model."""
    shards = sharded_parameters(parallel)
    for first, *others in shared_names(full):
        for name in others:
            if shards.get(name) != shards.get(first):
                raise ValueError(
                    f"ParallelGPT: {first} and {name} are one parameter, but they are split "
                    "differently; untie them"
                )
            module, _, leaf = name.rpartition(".")
            setattr(parallel.get_submodule(module), leaf, parallel.get_parameter(first))


def _check_same_weights(model: nn.Module, tp: TensorParallel) -> None:
    named = list(model.named_parameters())
    sums = torch.stack([p.detach().double().sum() for _, p in named])
    gathered = all_gather(sums, 0, tp.group).view(tp.size, -1)
    different = ~torch.isclose(gathered, gathered[:1], rtol=1e-12, atol=0.0, equal_nan=True)
    if different.any():
        number, index = different.nonzero()[0].tolist()
        raise MismatchError(
            f"parallelize_gpt: rank {number} of the tensor-parallel group holds other weights than "
            f"its rank 0: the sum of {named[index][0]} is {gathered[number, index].item():.9g}, "
            f"expected {gathered[0, index].item():.9g}; use the same seed, or broadcast first",
            rank=dist.get_rank(),
        )
