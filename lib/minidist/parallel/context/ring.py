"""Ring attention: exact attention over a sequence of which each rank holds a part.

Queries stay on their rank. Keys and values travel around the ring, and each rank attends to them as
they pass. A rank holds the keys and values of at most three ranks (its own, the current ones, the
arriving ones), so the longest possible sequence grows with the number of ranks. (Here the scores of
one pair of chunks exist as a matrix; a fused kernel such as FlashAttention avoids this matrix.)

Each block of keys gives a partial result. Let L be the logarithm of a partial result's softmax
denominator. Two partial results then combine exactly:

    L = log(exp(L1) + exp(L2)),    out = exp(L1 - L) out1 + exp(L2 - L) out2

Phases, forward, n times:
1. start sending the current keys and values to the next rank,
2. attend to the current keys, chunk by chunk: earlier chunks fully, the same chunk with a
   triangular mask, later chunks not at all,
3. combine with the earlier partial result; wait for the next keys and values.
Phases, backward, n times: keys and values travel again. Their gradients follow one step behind;
each rank adds its share, until the gradients are back on the rank that owns the keys.
1. start sending the current keys and values to the next rank,
2. recompute the probabilities from L; compute the gradient of this rank's queries, and this rank's
   share of the gradients of the current keys and values,
3. add the share to the gradients that arrived; start sending the sum to the next rank.

Example, on each rank::

    q_BHTK, k_BHTK, v_BHTK = (shard_sequence(x, 2, group=group) for x in (q, k, v))
    out_BHTK = ring_attention(q_BHTK, k_BHTK, v_BHTK, group=group)   # the rank's own tokens

Papers: Ring Attention (arXiv 2310.01889); its online softmax and backward pass are those of
FlashAttention (arXiv 2205.14135). Letters of shapes: B batch, H heads, T tokens of this rank, K
width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.parallel.context.layout import Layout, chunks_of

_KEYS, _GRADS = 1, 2  # tags, because both kinds travel between the same two ranks at once


def ring_attention(
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTK: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    layout: Layout = "zigzag",
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's tokens to the whole sequence.

    Computes in float32, or in float64 for float64 inputs, and returns the inputs' dtype.

    Args:
        query_BHTK, key_BHTK, value_BHTK: this rank's tokens in the order of `layout`; the same
            shape on all ranks.
        causal: attend only to tokens at the same or an earlier position.
        scale: factor of the scores; None means 1 / sqrt(K).

    Raises:
        ValueError: shapes differ, or T is odd although zigzag needs two equal chunks.
    """
    check_inputs("ring_attention", query_BHTK, key_BHTK, value_BHTK, group, layout)
    scale = query_BHTK.shape[-1] ** -0.5 if scale is None else scale
    return _RingAttention.apply(query_BHTK, key_BHTK, value_BHTK, group, causal, layout, scale)


def check_inputs(
    who: str, query: Tensor, key: Tensor, value: Tensor, group: Any, layout: Layout
) -> None:
    """Check the inputs of one rank without communication; raises ValueError."""
    where = f"[rank {dist.get_rank()}] {who}"
    if dist.get_rank(group) < 0:
        raise ValueError(f"{where}: this rank is not a member of the group")
    if layout not in get_args(Layout):
        raise ValueError(f"{where}: layout is one of {get_args(Layout)}, got {layout!r}")
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if query.ndim != 4 or len(set(shapes)) > 1:
        raise ValueError(
            f"{where}: expected query, key and value of one shape (B, H, T, K), got {shapes}"
        )
    if query.shape[2] % len(chunks_of(0, 1, layout)):
        raise ValueError(f"{where}: zigzag needs two equal chunks, got T = {query.shape[2]} tokens")


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: dist.ProcessGroup | None,
        causal: bool,
        layout: Layout,
        scale: float,
    ) -> Tensor:
        ring = _Ring(group)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        queries = query.to(wide).chunk(len(chunks_of(0, 1, layout)), 2)
        outs = [torch.zeros_like(q) for q in queries]
        log_sums = [q.new_full(q.shape[:-1], float("-inf")) for q in queries]
        key_value = torch.stack([key, value])

        for step in range(ring.size):
            # 1. Start sending the current keys and values.
            passing = ring.pass_on(key_value, _KEYS) if step < ring.size - 1 else None

            # 2. Attend to the current keys.
            keys, values = (x.to(wide).chunk(len(queries), 2) for x in key_value)
            for i, j, masked in _pairs(ring, step, causal, layout):
                scores = _scores(queries[i], keys[j], masked, scale)
                log_sum = scores.logsumexp(-1)
                out = (scores - log_sum.unsqueeze(-1)).exp() @ values[j]

                # 3. Combine with the earlier partial result.
                total = torch.logaddexp(log_sums[i], log_sum)
                outs[i] = outs[i] * (log_sums[i] - total).exp().unsqueeze(-1) + out * (
                    log_sum - total
                ).exp().unsqueeze(-1)
                log_sums[i] = total
            if passing is not None:
                key_value = passing.wait()

        out = torch.cat(outs, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, torch.cat(log_sums, 2))
        ctx.ring, ctx.causal, ctx.layout, ctx.scale = ring, causal, layout, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, log_sum = ctx.saved_tensors
        ring, scale = ctx.ring, ctx.scale
        wide = log_sum.dtype
        num = len(chunks_of(0, 1, ctx.layout))
        queries, grad_outs = (x.to(wide).chunk(num, 2) for x in (query, grads[0]))
        log_sums = log_sum.chunk(num, 2)
        # Softmax backward needs sum_k p_k dp_k. This equals dout . out, so no rank needs the whole
        # row of probabilities.
        inner = (grads[0].to(wide) * out.to(wide)).sum(-1, keepdim=True).chunk(num, 2)
        grad_queries = [torch.zeros_like(q) for q in queries]
        key_value = torch.stack([key, value])
        coming: _Passing | None = None

        for step in range(ring.size):
            # 1. Start sending the current keys and values.
            passing = ring.pass_on(key_value, _KEYS) if step < ring.size - 1 else None

            # 2. Gradient of this rank's queries, and its share of those of keys and values.
            keys, values = (x.to(wide).chunk(num, 2) for x in key_value)
            share = torch.zeros_like(key_value, dtype=wide)
            grad_keys, grad_values = (x.chunk(num, 2) for x in share)  # views
            for i, j, masked in _pairs(ring, step, ctx.causal, ctx.layout):
                scores = _scores(queries[i], keys[j], masked, scale)
                probabilities = (scores - log_sums[i].unsqueeze(-1)).exp()
                grad_values[j].add_(probabilities.mT @ grad_outs[i])
                grad_probabilities = grad_outs[i] @ values[j].mT
                grad_scores = probabilities * (grad_probabilities - inner[i]) * scale
                grad_queries[i] += grad_scores @ keys[j]
                grad_keys[j].add_(grad_scores.mT @ queries[i])

            # 3. Add the share to the gradients of these keys, which arrive one step behind them.
            if coming is not None:
                share += coming.wait()
            coming = ring.pass_on(share, _GRADS)
            if passing is not None:
                key_value = passing.wait()

        # After n steps the gradients are back on the rank that owns the keys.
        assert coming is not None
        grad_key, grad_value = coming.wait()
        return (
            torch.cat(grad_queries, 2).to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            *[None] * 4,
        )


def _scores(query: Tensor, key: Tensor, masked: bool, scale: float) -> Tensor:
    scores = query @ key.mT * scale
    if masked:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _pairs(ring: _Ring, step: int, causal: bool, layout: Layout) -> Iterator[tuple[int, int, bool]]:
    """(query chunk, key chunk, whether to mask) for each pair that a rank computes at a step."""
    source = (ring.rank - step) % ring.size  # the rank that owns the current keys
    for i, query_chunk in enumerate(chunks_of(ring.rank, ring.size, layout)):
        for j, key_chunk in enumerate(chunks_of(source, ring.size, layout)):
            if not causal or key_chunk < query_chunk:
                yield i, j, False
            elif key_chunk == query_chunk:
                yield i, j, True


class _Ring:
    """The ranks of a group in a ring: tensors go to the next rank and come from the previous."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        whole = group if group is not None else dist.group.WORLD
        assert whole is not None
        self.next, self.previous = (
            dist.get_global_rank(whole, (self.rank + offset) % self.size) for offset in (1, -1)
        )

    def pass_on(self, tensor: Tensor, tag: int) -> _Passing:
        return _Passing(self, tensor, tag)


class _Passing:
    """A tensor on its way to the next rank, while a similar one comes from the previous rank."""

    def __init__(self, ring: _Ring, tensor: Tensor, tag: int) -> None:
        self._sent = tensor  # kept alive until it is sent
        self._received = tensor
        self._works: list[Any] = []
        if ring.size > 1:
            self._received = torch.empty_like(tensor)
            send = dist.P2POp(dist.isend, tensor, ring.next, ring.group, tag)
            receive = dist.P2POp(dist.irecv, self._received, ring.previous, ring.group, tag)
            self._works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received
