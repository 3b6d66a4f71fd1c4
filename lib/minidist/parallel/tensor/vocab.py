"""Embedding and output layer of a language model, split along the vocabulary, and the loss.

Each rank holds the rows of `V / n` consecutive tokens. If n does not divide the vocabulary, it is
padded at the end with tokens that never occur; each rank then holds `ceil(V / n)` rows.

- Embedding: a rank looks up the tokens it owns, and writes zeros for the other tokens; the sum over
  the ranks is the embedding.
- Output layer: a rank computes the logits of its own tokens.
- Loss: the logits stay on their ranks. Only three numbers per token travel, instead of V:

      loss = log(sum_v exp z_v) - z_target = m + log(sum_v exp(z_v - m)) - z_target,  m = max_v z_v

Phases of the loss, forward:
1. the maximum over the vocabulary: all-reduce (max),
2. the sum of exponentials and the target's logit: one all-reduce (sum),
3. the loss of each token; the softmax of this rank's columns is kept.
Backward: softmax minus one-hot, on this rank's columns, without communication.

Example, on each rank of a group of 2::

    embedding = VocabParallelEmbedding(nn.Embedding(50, 32), tp)  # holds 25 rows
    head = VocabParallelHead(nn.Linear(32, 50, bias=False), tp)   # holds 25 rows
    logits_BTV = head(embedding(tokens_BT))                       # (B, T, 25): the own columns
    loss = vocab_parallel_cross_entropy(logits_BTV, targets_BT, vocab_size=50, group=tp.group)

Paper: Megatron-LM (arXiv 1909.08053, section 3). Label smoothing: arXiv 1512.00567, section 7.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.parallel.tensor.config import TensorParallel
from minidist.parallel.tensor.layers import ShardedModule, column_parallel, parameter_like
from minidist.parallel.tensor.mappings import gather_from, reduce_from, reduce_scatter_sequence
from minidist.replaced import check_layer, refuse_options


class VocabParallelEmbedding(ShardedModule):
    """An embedding whose rows are split over the ranks.

    Args:
        full: the whole embedding, the same on all ranks; each rank copies its part.

    Shapes: tokens (B, T), the same on all ranks, to (B, T, D); (B, T / n, D) with sequence
    parallelism.

    Keeps `padding_idx`, `max_norm`, `norm_type` and `scale_grad_by_freq`.

    Raises:
        ValueError: the embedding is sparse, or more than an embedding; or a token is outside the
            vocabulary. On a GPU a check would stall the device, so torch's device-side assertion
            fails instead.
    """

    def __init__(self, full: nn.Embedding, tp: TensorParallel) -> None:
        super().__init__()
        check_layer("VocabParallelEmbedding", full, nn.Embedding)
        why = "gradients of parts are dense"
        refuse_options("VocabParallelEmbedding", full, ["sparse"], why)
        self.tp = tp
        self.training = full.training
        self.vocab_size = full.num_embeddings
        self.weight = parameter_like(full.weight, _padded_part(full.weight, tp))
        self.padding_idx, self.scale_grad_by_freq = full.padding_idx, full.scale_grad_by_freq
        self.max_norm, self.norm_type = full.max_norm, full.norm_type
        self.shards = {"weight": (0, full.num_embeddings)}

    def forward(self, tokens_BT: Tensor) -> Tensor:
        _check_ids("VocabParallelEmbedding: tokens", tokens_BT, self.vocab_size)
        num_rows = self.weight.shape[0]
        local_BT = tokens_BT - self.tp.rank * num_rows
        owned_BT = (local_BT >= 0) & (local_BT < num_rows)
        wrong_BT = (tokens_BT < 0) | (tokens_BT >= self.vocab_size)
        # Tokens outside the vocabulary look beyond the end, which raises.
        local_BT = local_BT.masked_fill(wrong_BT, num_rows)
        if self.scale_grad_by_freq or self.max_norm is not None:
            # Both options count or change the rows that are looked up, so look up no other row.
            own_BT = owned_BT | wrong_BT
            x_BTD = self.weight.new_zeros(*local_BT.shape, self.weight.shape[1])
            x_BTD[own_BT] = self._look_up(local_BT[own_BT])
        else:
            # Tokens of other ranks look up row 0, and the result becomes zero.
            local_BT = local_BT.masked_fill(~owned_BT & ~wrong_BT, 0)
            x_BTD = self._look_up(local_BT).masked_fill(~owned_BT.unsqueeze(-1), 0)
        if self.tp.sequence_parallel:
            return reduce_scatter_sequence(x_BTD, 1, self.tp.group)
        return reduce_from(x_BTD, self.tp.group)

    def _look_up(self, rows: Tensor) -> Tensor:
        """The embeddings at `rows` of this rank's part. A padding row gets no gradient."""
        padding = None
        if self.padding_idx is not None:
            padding = self.padding_idx - self.tp.rank * self.weight.shape[0]
            padding = padding if 0 <= padding < self.weight.shape[0] else None
        return F.embedding(
            rows, self.weight, padding, self.max_norm, self.norm_type, self.scale_grad_by_freq
        )


class VocabParallelHead(ShardedModule):
    """The output layer: a column-parallel linear layer without bias, padded to equal parts.

    Shapes: (B, T, D), or (B, T / n, D) with sequence parallelism, to (B, T, ceil(V / n)): the
    logits of this rank's tokens. Padding columns are -inf, so that they are zero in a softmax.
    """

    def __init__(self, full: nn.Linear, tp: TensorParallel) -> None:
        super().__init__()
        check_layer("VocabParallelHead", full, nn.Linear)
        if full.bias is not None:
            raise ValueError("VocabParallelHead: expected a layer without bias")
        self.tp = tp
        self.training = full.training
        self.vocab_size = full.out_features
        self.weight = parameter_like(full.weight, _padded_part(full.weight, tp))
        self.bias = None
        self.shards = {"weight": (0, full.out_features)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        (logits_BTV,) = column_parallel(x_BTD, [self], self.tp)
        num_owned = _num_owned(self.weight.shape[0], self.vocab_size, self.tp.rank)
        if num_owned < self.weight.shape[0]:
            column_V = torch.arange(self.weight.shape[0], device=x_BTD.device)
            logits_BTV = logits_BTV.masked_fill(column_V >= num_owned, float("-inf"))
        return logits_BTV

    def gather(self, logits_BTV: Tensor) -> Tensor:
        """The logits of the whole vocabulary, (B, T, V), e.g. for sampling."""
        return gather_from(logits_BTV, -1, self.tp.group)[..., : self.vocab_size]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of logits that are split along the vocabulary; no rank sees all logits.

    Equals `F.cross_entropy` of the whole logits, and has the same value on all ranks. Computed in
    float32, or in float64 for float64 logits.

    Args:
        logits: (..., V / n), this rank's columns; rank i holds columns i V / n and following.
        targets: (...), int64, token ids of the whole vocabulary, the same on all ranks.
        vocab_size: columns from this number on are padding; None means that there is no padding.
        ignore_index: targets with this value count neither in the sum nor in the mean.
        label_smoothing: this share of the target's probability is spread over the vocabulary.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: shapes or options do not fit, or a target is outside the vocabulary (on a GPU:
            device-side assertion).
    """
    # Validate.
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = logits.shape[-1] * size
    vocab_size = total if vocab_size is None else vocab_size
    who = f"[rank {dist.get_rank()}] vocab_parallel_cross_entropy"
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"{who}: logits of shape {tuple(logits.shape)} need targets of shape "
            f"{tuple(logits.shape[:-1])}, got {tuple(targets.shape)}"
        )
    if targets.is_floating_point():
        raise ValueError(
            f"{who}: targets are token ids (int64), not probabilities: {targets.dtype}"
        )
    if not 0 < vocab_size <= total:
        raise ValueError(
            f"{who}: {size} ranks x {logits.shape[-1]} columns = {total} cannot hold a vocabulary "
            f"of {vocab_size}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{who}: label_smoothing goes from 0 to 1, got {label_smoothing}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'{who}: reduction is "mean", "sum" or "none", got {reduction!r}')
    _check_ids("vocab_parallel_cross_entropy: targets", targets, vocab_size, ignore_index)

    # Compute.
    num_owned = _num_owned(logits.shape[-1], vocab_size, rank)
    losses = _CrossEntropy.apply(
        logits,
        targets,
        rank * logits.shape[-1],
        num_owned,
        vocab_size,
        ignore_index,
        label_smoothing,
        group,
    )
    if reduction == "none":
        return losses
    return losses.sum() / (targets != ignore_index).sum() if reduction == "mean" else losses.sum()


class _CrossEntropy(torch.autograd.Function):
    """Loss of every token; N tokens, V columns of this rank."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        first: int,
        num_owned: int,
        vocab_size: int,
        ignore_index: int,
        smoothing: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        z_NV = logits.reshape(-1, logits.shape[-1])[:, :num_owned].to(wide)
        targets_N = targets.flatten()
        kept_N = targets_N != ignore_index

        # 1. The maximum over the vocabulary. A rank may own only padding.
        max_N = z_NV.amax(1) if num_owned else z_NV.new_full((len(z_NV),), float("-inf"))
        dist.all_reduce(max_N, dist.ReduceOp.MAX, group=group)

        # 2. Sum of exponentials, the target's logit, and for label smoothing the sum of the logits.
        exp_NV = (z_NV - max_N.unsqueeze(1)).exp()
        own_N = targets_N - first
        owned_N = kept_N & (own_N >= 0) & (own_N < num_owned)
        wrong_N = kept_N & ((targets_N < 0) | (targets_N >= vocab_size))
        own_N = own_N.masked_fill(~owned_N, 0).masked_fill(wrong_N, num_owned + 1)
        if num_owned:
            z_target_N = z_NV.gather(1, own_N.unsqueeze(1)).squeeze(1).masked_fill(~owned_N, 0)
        else:
            z_target_N = torch.zeros_like(max_N)
        sums = torch.stack([exp_NV.sum(1), z_target_N, z_NV.sum(1)][: 3 if smoothing else 2])
        dist.all_reduce(sums, group=group)

        # 3. The loss of each token.
        log_sum_N = max_N + sums[0].log()
        loss_N = log_sum_N - (1 - smoothing) * sums[1]
        if smoothing:
            loss_N = loss_N - smoothing * sums[2] / vocab_size
        softmax_NV = exp_NV.div_(sums[0].unsqueeze(1))
        ctx.save_for_backward(softmax_NV, own_N, owned_N, kept_N)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        ctx.smoothing, ctx.vocab_size = smoothing, vocab_size
        return loss_N.masked_fill(~kept_N, 0.0).view(targets.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        softmax_NV, own_N, owned_N, kept_N = ctx.saved_tensors
        grad_NV = softmax_NV - ctx.smoothing / ctx.vocab_size
        if grad_NV.shape[1]:
            rows_N = torch.arange(len(own_N), device=own_N.device)
            grad_NV[rows_N, own_N] -= (1 - ctx.smoothing) * owned_N.to(grad_NV.dtype)
        grad_NV *= grads[0].flatten().unsqueeze(1)
        # Not a product: if nothing counts, the mean's gradient is inf, and inf * 0 is nan.
        grad_NV = grad_NV.masked_fill(~kept_N.unsqueeze(1), 0)
        padding = ctx.shape[-1] - grad_NV.shape[1]
        grad = F.pad(grad_NV, (0, padding)).view(ctx.shape).to(ctx.dtype)
        return grad, *[None] * 7


def _padded_part(full_VD: Tensor, tp: TensorParallel) -> Tensor:
    num_rows = -(-full_VD.shape[0] // tp.size)
    return tp.part(F.pad(full_VD.detach(), (0, 0, 0, num_rows * tp.size - full_VD.shape[0])), 0)


def _num_owned(num_columns: int, vocab_size: int, rank: int) -> int:
    """How many of a rank's columns are tokens; the rest is padding."""
    return min(num_columns, max(0, vocab_size - rank * num_columns))


def _check_ids(what: str, ids: Tensor, vocab_size: int, ignore_index: int | None = None) -> None:
    if ids.device.type != "cpu":
        return
    wrong = (ids < 0) | (ids >= vocab_size)
    if ignore_index is not None:
        wrong &= ids != ignore_index
    if wrong.any():
        raise ValueError(
            f"[rank {dist.get_rank()}] {what} go from 0 to {vocab_size - 1}, got "
            f"{ids[wrong][0].item()}"
        )
