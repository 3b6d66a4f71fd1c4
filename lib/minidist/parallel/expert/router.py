"""The router: a small linear layer that chooses k of E experts for each token.

1. p = softmax(x W): one probability per expert,
2. the choice: the k experts with the largest p + b. The bias b is not trained. Without
   `update_bias` it stays zero,
3. the weights: p of the chosen experts, divided by their sum. The bias is not in them. For k = 1
   the weight is p itself: divided by itself it would be 1, and the router would never learn.

The choice itself has no gradient. The router learns through the weights only, so only from the
experts that a token has visited.

>>> router = Router(width=4, num_experts=8, top_k=2)
>>> routing = router(torch.randn(5, 4))
>>> routing.choices_NK.shape, routing.weights_NK.sum(1).allclose(torch.ones(5))
(torch.Size([5, 2]), True)

Letters of shapes: N tokens of this rank, D width, E experts, K choices of a token.
Papers: GShard (arXiv 2006.16668) for k = 2, Switch Transformer (arXiv 2101.03961) for k = 1,
auxiliary-loss-free balancing (arXiv 2408.15664) for b.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Routing:
    """Where the tokens of this rank want to go.

    Attributes:
        probs_NE: the router's probabilities, differentiable.
        choices_NK: experts of each token, the most wanted one first.
        weights_NK: their weights, differentiable; for K > 1 they sum to 1 for each token.
    """

    probs_NE: Tensor
    choices_NK: Tensor
    weights_NK: Tensor

    @property
    def load_E(self) -> Tensor:
        """How many choices of this rank fall on each expert, before any is dropped."""
        return torch.bincount(self.choices_NK.flatten(), minlength=self.probs_NE.shape[1])


class Router(nn.Module):
    """Chooses `top_k` of `num_experts` experts for each token.

    Every rank holds the whole router, with equal weights. Keep it in fp32 or more: in bf16 a bias
    of 0.5 does not change if 0.001 is added. For the same reason it computes in the dtype of its
    weights under autocast, too.
    """

    bias_E: Tensor

    def __init__(self, *, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"Router: a token visits 1 to {num_experts} of {num_experts} experts, got top_k "
                f"{top_k}"
            )
        self.top_k = top_k
        self.weight_ED = nn.Parameter(torch.randn(num_experts, width) / width**0.5)
        self.register_buffer("bias_E", torch.zeros(num_experts))

    def forward(self, x_ND: Tensor) -> Routing:
        """Routing of tokens (N, D)."""
        # 1. Probabilities. In 16 bits, experts that are nearly equal would change places.
        with torch.autocast(x_ND.device.type, enabled=False):
            probs_NE = (x_ND.to(self.weight_ED.dtype) @ self.weight_ED.T).softmax(1)
        # 2. The choice, which the bias may change.
        choices_NK = (probs_NE.detach() + self.bias_E).topk(self.top_k, dim=1).indices
        # 3. The weights, without the bias.
        weights_NK = probs_NE.gather(1, choices_NK)
        if self.top_k > 1:
            weights_NK = weights_NK / weights_NK.sum(1, keepdim=True)
        return Routing(probs_NE, choices_NK, weights_NK)
