"""Dispatch and combine: tokens travel to their experts and back.

Rank r holds experts r * E/n to (r+1) * E/n - 1. How many tokens a rank sends to which rank is known
only after routing, so the parts of the all-to-all have unequal sizes, and ranks tell each other the
sizes first.

`dispatch`, phases:
1. sort the choices that are kept by expert: what goes to one rank is then in one piece,
2. exchange the number of rows per expert, then the rows themselves,
3. sort the received rows, which come rank after rank, by expert.
`combine` undoes 3 and 2, multiplies each row by its weight and adds it to its token.

The backward pass of an all-to-all is the all-to-all with both lists of sizes swapped.

Capacity: a buffer of fixed size per expert and sender. What does not fit is dropped: the expert
adds nothing to this token, which goes on through the residual connection alone.

Papers: GShard (arXiv 2006.16668, algorithm 1), Switch Transformer (arXiv 2101.03961, section 2.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from minidist.parallel.expert.router import Routing

Group = dist.ProcessGroup | None


# -------------------------------------------------------------------------------------- capacity


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Rows that one rank may send to one expert: `factor` times the even share, rounded up.

    >>> expert_capacity(num_tokens=64, top_k=2, num_experts=8, factor=1.25)
    20
    """
    return math.ceil(factor * num_tokens * top_k / num_experts)


def keep_within_capacity(choices_NK: Tensor, num_experts: int, capacity: int) -> Tensor:
    """True for each choice that its expert has room for, (N, K).

    First choices of all tokens come before second choices; among equals, earlier tokens come first.

    >>> keep_within_capacity(torch.tensor([[0, 1], [0, 1], [1, 0]]), 2, capacity=2).tolist()
    [[True, True], [True, False], [True, False]]
    """
    queue = F.one_hot(choices_NK.T.flatten(), num_experts)  # first choices, then second choices
    place = (queue.cumsum(0) * queue).sum(1)  # 1 for the first row of an expert
    return (place <= capacity).view(choices_NK.T.shape).T


# ------------------------------------------------------------------------------------ all-to-all


def all_to_all(rows: Tensor, send: list[int], receive: list[int], group: Group = None) -> Tensor:
    """Exchange rows; autograd sends the gradients back the same way.

    Args:
        rows: (sum of `send`, D); the first send[0] rows go to rank 0 of the group, and so on.
        send, receive: rows for, and from, each rank of the group.

    Returns:
        (sum of `receive`, D), rank after rank.
    """
    return _AllToAll.apply(rows, send, receive, group)  # type: ignore[return-value]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Group
    ) -> Tensor:
        ctx.sizes, ctx.group = (send, receive), group
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        send, receive = ctx.sizes
        return all_to_all(grads[0], receive, send, ctx.group), None, None, None


# -------------------------------------------------------------------------- dispatch and combine


@dataclass(frozen=True)
class Route:
    """What `combine` needs to bring rows back.

    Attributes:
        num_tokens: N of this rank.
        token_M: token of each row that this rank sent.
        weight_M: weight of each of these rows, differentiable.
        send, receive: rows for, and from, each rank of the group.
        order_R: the place among the received rows of each row that the experts get.
        rows_per_expert: of each expert of this rank.
    """

    num_tokens: int
    token_M: Tensor
    weight_M: Tensor
    send: list[int]
    receive: list[int]
    order_R: Tensor
    rows_per_expert: list[int]


def dispatch(
    x_ND: Tensor, routing: Routing, keep_NK: Tensor, group: Group = None, num_ranks: int = 1
) -> tuple[Tensor, Route]:
    """Send each token to the experts that it has chosen.

    Args:
        keep_NK: choices that are not dropped.
        group: the ranks among which the experts are spread; not used with one rank.

    Returns:
        Rows for the experts of this rank, expert after expert, (R, D); and the way back.
    """
    num_experts = routing.probs_NE.shape[1]

    # 1. The kept choices, sorted by expert.
    token_M, choice_M = keep_NK.nonzero(as_tuple=True)
    expert_M = routing.choices_NK[token_M, choice_M]
    expert_M, order_M = expert_M.sort(stable=True)
    token_M, choice_M = token_M[order_M], choice_M[order_M]
    weight_M = routing.weights_NK[token_M, choice_M]
    rows = x_ND[token_M]

    # 2. Sizes, then rows.
    sent_nL = torch.bincount(expert_M, minlength=num_experts).view(num_ranks, -1)
    got_nL = sent_nL
    if num_ranks > 1:
        got_nL = torch.empty_like(sent_nL)
        dist.all_to_all_single(got_nL, sent_nL, group=group)
    send, receive = sent_nL.sum(1).tolist(), got_nL.sum(1).tolist()  # on a GPU: waits for it
    if num_ranks > 1:
        rows = all_to_all(rows, send, receive, group)

    # 3. Rank after rank becomes expert after expert.
    own = torch.arange(got_nL.shape[1], device=x_ND.device).repeat(num_ranks)
    order_R = own.repeat_interleave(got_nL.flatten()).argsort(stable=True)
    route = Route(len(x_ND), token_M, weight_M, send, receive, order_R, got_nL.sum(0).tolist())
    return rows[order_R], route


def combine(rows_RD: Tensor, route: Route, group: Group = None) -> Tensor:
    """Bring the experts' results back and add them up, weighted: (R, D) to (N, D)."""
    rows = rows_RD[route.order_R.argsort()]
    if len(route.send) > 1:
        rows = all_to_all(rows, route.receive, route.send, group)
    rows = rows * route.weight_M[:, None]  # fp32 under autocast, like the weights
    out_ND = rows.new_zeros(route.num_tokens, rows.shape[1])
    return out_ND.index_add(0, route.token_M, rows)
