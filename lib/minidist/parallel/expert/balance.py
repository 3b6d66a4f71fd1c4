"""Balance: without help a router prefers few experts, and the others learn little.

- `balance_loss`: an auxiliary loss, added to the model's own with a small factor alpha. f_i is the
  share of all choices that falls on expert i, P_i its mean probability, and the loss is E times the
  sum of f_i * P_i: 1 when the load is even. f_i has no gradient. That of P_i is proportional to
  f_i, so the fullest expert's probability is pushed down most. Too small an alpha does nothing; too
  large an alpha disturbs what the model is trained for.
- `update_bias`: no loss. After each step the bias of an expert with more than the mean load goes
  down by `speed`, that of one with less goes up. Only choices change; no gradient is disturbed.

Both count the choices of all ranks: an expert that one rank floods may be idle for the others.

Papers: Switch Transformer (arXiv 2101.03961, equation 4), auxiliary-loss-free balancing (arXiv
2408.15664, algorithm 1), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.parallel.expert.router import Router, Routing


def count_choices(routing: Routing, group: dist.ProcessGroup | None = None) -> Tensor:
    """Choices per expert, (E,), of all ranks of the group; without ranks, of this process."""
    load_E = routing.load_E
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(load_E, group=group)
    return load_E


def imbalance(load_E: Tensor) -> float:
    """Load of the fullest expert divided by the mean load; 1 is perfect balance.

    >>> imbalance(torch.tensor([2, 2, 6, 2]))
    2.0
    """
    return (load_E.max() / load_E.double().mean()).item()


def balance_loss(routing: Routing, group: dist.ProcessGroup | None = None) -> Tensor:
    """E * sum(f_i * P_i), a scalar: 1 for an even load, at most E.

    f counts the choices of all ranks of the group and P the tokens of this rank. If all ranks have
    equally many tokens, the mean of this loss over ranks is the loss of the whole batch, and so is
    its gradient after `average_gradients`.
    """
    load_E = count_choices(routing, group).to(routing.probs_NE.dtype)
    share_E = load_E / load_E.sum()
    return len(share_E) * (share_E * routing.probs_NE.mean(0)).sum()


@torch.no_grad()
def update_bias(router: Router, load_E: Tensor, *, speed: float = 0.001) -> None:
    """Move the bias of each expert by `speed`: down if its load is above the mean, else up.

    Args:
        load_E: choices of all ranks, as `count_choices` gives them, so that the biases of all ranks
            stay equal.
    """
    load_E = load_E.to(router.bias_E.dtype)
    router.bias_E += speed * (load_E.mean() - load_E).sign()
