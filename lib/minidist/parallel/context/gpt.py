"""A GPT whose sequences are split over ranks.

All layers except attention work on each token alone, so they run unchanged on a rank's own tokens.
Besides attention, three things need care: the position of each token, the mean of the loss over the
tokens of all ranks, and the sum of the gradients (every rank holds the whole model, but has seen
only its own tokens).

Example, on each rank of a group of 2::

    model = context_parallel_gpt(GPT(config), mesh)            # shares the GPT's parameters
    tokens_BT = shard_sequence(tokens_BT, group=model.group)   # (B, T / 2), zig-zag
    targets_BT = shard_sequence(targets_BT, group=model.group)
    loss = model.loss(tokens_BT, targets_BT)                   # the mean over all tokens
    loss.backward()
    sum_gradients(model, model.group)                          # the sum, not the mean

Dropout: ranks hold different tokens, so seed each rank differently (after making the model).
Papers: Ring Attention (arXiv 2310.01889), DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.device import all_gather_single, by_dtype_and_device
from minidist.errors import MismatchError, named_rank
from minidist.mesh import Mesh
from minidist.packing import PACKED
from minidist.parallel.context.layout import Layout, positions
from minidist.parallel.context.ring import ring_attention
from minidist.parallel.context.ulysses import check_heads, ulysses_attention
from minidist.replaced import check_parts, refuse_options

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Method = Literal["ring", "ulysses"]


def context_parallel_gpt(
    model: Any,
    mesh_or_group: Mesh | dist.ProcessGroup | None = None,
    *,
    method: Method = "ring",
    layout: Layout = "zigzag",
) -> ContextParallelGPT:
    """A GPT for sequences that are split over the context-parallel ranks.

    Args:
        model: a `minidist.model.GPT`, the same on all ranks. The result shares its parameters. The
            model itself does not change, and still works on whole sequences.
        mesh_or_group: a mesh (its axis "cp"), a group, or None for the default group.

    Raises:
        ValueError: an unknown method or layout, heads that "ulysses" cannot split, or a model with
            parts or options that the result would lose.
    """
    group = mesh_or_group.group("cp") if isinstance(mesh_or_group, Mesh) else mesh_or_group
    attend = make_attention(group, method=method, layout=layout)
    if method == "ulysses":
        check_heads("context_parallel_gpt", model.config.num_heads, group)
    return ContextParallelGPT(model, group, attend, layout)


def make_attention(
    group: dist.ProcessGroup | None, *, method: Method = "ring", layout: Layout = "zigzag"
) -> Attend:
    """Causal attention (B, H, T / n, K) to (B, H, T / n, K) over the ranks of a group.

    Works in any model whose attention can be replaced, including a tensor-parallel model.
    """
    if method not in get_args(Method):
        raise ValueError(f"make_attention: method is one of {get_args(Method)}, got {method!r}")
    if layout not in get_args(Layout):
        raise ValueError(f"make_attention: layout is one of {get_args(Layout)}, got {layout!r}")
    attention = ring_attention if method == "ring" else ulysses_attention
    return partial(attention, group=group, causal=True, layout=layout)


class ContextParallelGPT(nn.Module):
    """A GPT on this rank's tokens. It shares a GPT's parameters, under the same names."""

    def __init__(
        self, full: Any, group: dist.ProcessGroup | None, attend: Attend, layout: Layout
    ) -> None:
        super().__init__()
        parts = ("token_embedding", "position_embedding", "blocks", "norm", "head")
        check_parts("ContextParallelGPT", full, parts)
        for embedding in (full.token_embedding, full.position_embedding):
            why = "each rank looks up its own tokens only, and the copies would differ"
            names = ("max_norm", "scale_grad_by_freq", "sparse")
            refuse_options("ContextParallelGPT", embedding, names, why)
        self.config = full.config
        self.training = full.training
        self.group = group
        self.layout: Layout = layout
        self.token_embedding = full.token_embedding
        self.position_embedding = full.position_embedding
        self.blocks = nn.ModuleList(ContextParallelBlock(block, attend) for block in full.blocks)
        self.norm = full.norm
        self.head = full.head
        self._inputs_checked = dist.get_world_size(group) == 1

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Logits of this rank's tokens, (B, T / n, V).

        Args:
            tokens_BT: the result of `shard_sequence`, (B, T / n) int64.

        Raises:
            ValueError: the whole sequence is longer than the context.
            MismatchError: in the first call, if a rank's shape differs from that of rank 0 of the
                group.
        """
        if documents_BT is not None:
            raise PACKED.error(f"got documents_BT on {named_rank()}", where="ContextParallelGPT")
        if not self._inputs_checked:
            _check_same_shapes(tokens_BT, self.group)
            self._inputs_checked = True
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Token plus position embedding of this rank's tokens."""
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        num_tokens = tokens_BT.shape[1] * size
        if num_tokens > self.config.context:
            raise ValueError(
                f"[rank {dist.get_rank()}] ContextParallelGPT: {size} ranks x "
                f"{tokens_BT.shape[1]} tokens = {num_tokens}, but the context is "
                f"{self.config.context}"
            )
        own_T = positions(num_tokens, rank, size, self.layout, tokens_BT.device)
        return self.token_embedding(tokens_BT) + self.position_embedding(own_T)

    def loss(
        self, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy over the tokens of all ranks; targets of -100 are left out."""
        logits_BTV = self(tokens_BT, documents_BT)
        total = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        return mean_over_ranks(total, (targets_BT != -100).sum(), self.group)


class ContextParallelBlock(nn.Module):
    """A pre-norm block that shares its layers with an unsplit block."""

    def __init__(self, full: Any, attend: Attend) -> None:
        super().__init__()
        check_parts("ContextParallelBlock", full, ("norm1", "attention", "norm2", "mlp"))
        self.training = full.training
        self.norm1 = full.norm1
        self.attention = ContextParallelAttention(full.attention, attend)
        self.norm2 = full.norm2
        self.mlp = full.mlp

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class ContextParallelAttention(nn.Module):
    """Self-attention of this rank's tokens to the tokens of all ranks."""

    def __init__(self, full: Any, attend: Attend) -> None:
        super().__init__()
        parts = ("query", "key", "value", "out", "dropout")
        check_parts("ContextParallelAttention", full, parts)
        self.training = full.training
        self.num_heads = full.num_heads
        self.attend = attend
        self.query, self.key, self.value = full.query, full.key, full.value
        self.out = full.out
        self.dropout = full.dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        query_BHTK, key_BHTK, value_BHTK = (
            layer(x_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y_BHTK = self.attend(query_BHTK, key_BHTK, value_BHTK)
        return self.dropout(self.out(y_BHTK.transpose(1, 2).flatten(2)))


def mean_over_ranks(total: Tensor, count: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """A mean over all ranks, from each rank's sum and count; the same value on all ranks.

    Its gradient is the gradient of this rank's share, total / (count of all ranks), so gradients
    must be summed over the ranks, not averaged.
    """
    sums = torch.stack([torch.where(count > 0, total.detach().double(), 0), count.double()])
    dist.all_reduce(sums, group=group)
    # A rank that counts nothing adds a gradient of zeros, also if its sum is nan.
    own = torch.where(count > 0, total, 0) / sums[1].to(total.dtype)
    # The value of all ranks, with the gradient of this rank's share: the bracket's value is zero.
    return (sums[0] / sums[1]).to(total.dtype) + (own - own.detach())


@torch.no_grad()
def sum_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients over the ranks: one all-reduce per dtype.

    A trainable parameter without a gradient counts as zero, so that all ranks send messages of the
    same size. If something averages over these ranks instead (DDP over data and context
    parallelism), multiply the loss by the group's size.
    """
    held: list[Tensor] = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            held.append(parameter.grad)
    for grads in by_dtype_and_device(held):
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))


def _check_same_shapes(tokens_BT: Tensor, group: dist.ProcessGroup | None) -> None:
    own = torch.tensor(tokens_BT.shape, device=tokens_BT.device)
    gathered = own.new_empty(dist.get_world_size(group) * 2)
    all_gather_single(gathered, own, group=group)
    shapes = [tuple(shape) for shape in gathered.view(-1, 2).tolist()]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise MismatchError(
                f"ContextParallelGPT: rank {number} of the context-parallel group got tokens of "
                f"shape {shape}, expected {shapes[0]} as on its rank 0; shard_sequence makes equal "
                "parts",
                rank=dist.get_rank(),
            )
