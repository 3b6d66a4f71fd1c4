"""The layer that replaces an MLP: a router, many small MLPs of which a token visits a few, and
shared ones that every token visits.

    y = sum over the k chosen experts of weight * expert(x)  +  shared(x)

The shared experts of one layer are one MLP, s times as wide as an expert: the sum of s MLPs that
read the same input is an MLP whose inner layers stand side by side.

Example, on each rank::

    mesh = make_expert_mesh()                                        # ep = all ranks
    config = MoEConfig(width=64, expert_width=128, num_experts=8, top_k=2)
    torch.manual_seed(0)                                             # the same on all ranks
    layer = MoE(config, mesh)
    y_BTD = layer(x_BTD)                                             # this rank's tokens
    (loss(y_BTD) + 0.01 * balance_loss(layer.routing)).backward()
    average_gradients(layer, mesh)

Letters of shapes: B batch, T tokens of a sequence, N = B * T, D width, F expert width, L experts of
this rank, R rows that its experts get.
Papers: GShard (arXiv 2006.16668), DeepSeekMoE for shared experts (arXiv 2401.06066).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.model import GPT, Block
from minidist.parallel.expert.dispatch import (
    combine,
    dispatch,
    expert_capacity,
    keep_within_capacity,
)
from minidist.parallel.expert.mesh import ExpertMesh
from minidist.parallel.expert.router import Router, Routing


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes of one layer.

    Attributes:
        expert_width: inner width of one expert.
        top_k: routed experts that a token visits.
        shared_experts: experts that every token visits.
        capacity_factor: how many times the even share an expert takes from each rank; what exceeds
            it is dropped. None drops nothing.
    """

    width: int
    expert_width: int
    num_experts: int
    top_k: int = 2
    shared_experts: int = 0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("width", "expert_width", "num_experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"MoEConfig: {name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"MoEConfig: top_k must be 1 to {self.num_experts}, the number of experts, got "
                f"{self.top_k}"
            )
        if self.shared_experts < 0:
            raise ValueError(f"MoEConfig: shared_experts is at least 0, got {self.shared_experts}")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(
                f"MoEConfig: capacity_factor must be positive or None, got {self.capacity_factor}"
            )


class Experts(nn.Module):
    """The experts of this rank: MLPs without biases, their weights stacked.

    All ranks draw all experts, in order, and each keeps its own: for one seed the model is the same
    for any number of ranks.
    """

    def __init__(self, config: MoEConfig, own: range) -> None:
        super().__init__()
        width, inner = config.width, config.expert_width
        up, down = [], []
        for expert in range(config.num_experts):
            pair = torch.randn(width, inner) / width**0.5, torch.randn(inner, width) / inner**0.5
            if expert in own:
                up.append(pair[0])
                down.append(pair[1])
        self.up_LDF = nn.Parameter(torch.stack(up))
        self.down_LFD = nn.Parameter(torch.stack(down))

    def forward(self, rows_RD: Tensor, rows_per_expert: list[int]) -> Tensor:
        """Each expert on its rows, which come expert after expert."""
        # An expert without rows is called as well: its gradient is zero then, and not missing.
        done = [
            F.gelu(rows @ up) @ down
            for rows, up, down in zip(
                rows_RD.split(rows_per_expert), self.up_LDF, self.down_LFD, strict=True
            )
        ]
        return torch.cat(done)


class MoE(nn.Module):
    """A mixture of experts in the place of an MLP.

    Args:
        mesh: over which ranks the experts are spread; None keeps all of them in this process.

    Attributes:
        routing: where the tokens of the last call wanted to go; None before the first.
        num_dropped: choices of this rank that the last call dropped.

    Raises:
        ValueError: the experts cannot be spread evenly over the ranks.
    """

    def __init__(self, config: MoEConfig, mesh: ExpertMesh | None = None) -> None:
        super().__init__()
        num_experts = config.num_experts
        own = range(num_experts) if mesh is None else mesh.own_experts(num_experts)
        self.config, self.mesh = config, mesh
        self.router = Router(width=config.width, num_experts=num_experts, top_k=config.top_k)
        self.experts = Experts(config, own)
        self.shared: nn.Sequential | None = None
        if config.shared_experts:
            inner = config.shared_experts * config.expert_width
            self.shared = nn.Sequential(
                nn.Linear(config.width, inner, bias=False),
                nn.GELU(),
                nn.Linear(inner, config.width, bias=False),
            )
        self.routing: Routing | None = None
        self.num_dropped = 0

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (..., D) of this rank to (..., D).

        Raises:
            ValueError: the last dimension of x is not the layer's width.
        """
        if x.shape[-1] != self.config.width:
            raise ValueError(
                f"MoE: expected tokens of width {self.config.width}, got a tensor of shape "
                f"{tuple(x.shape)}"
            )
        x_ND = x.reshape(-1, self.config.width)
        # 1. Choose experts, and drop what exceeds their capacity.
        routing = self.router(x_ND)
        keep_NK = self._kept(routing)
        # 2. To the experts and back.
        group, size = (None, 1) if self.mesh is None else (self.mesh.ep_group, self.mesh.ep)
        rows_RD, route = dispatch(x_ND, routing, keep_NK, group, size)
        y_ND = combine(self.experts(rows_RD, route.rows_per_expert), route, group)
        # 3. The shared experts, which are at home on every rank.
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND)
        self.routing, self.num_dropped = routing, int((~keep_NK).sum())
        return y_ND.view_as(x)

    def _kept(self, routing: Routing) -> Tensor:
        choices_NK, config = routing.choices_NK, self.config
        if config.capacity_factor is None:
            return torch.ones_like(choices_NK, dtype=torch.bool)
        capacity = expert_capacity(
            len(choices_NK), config.top_k, config.num_experts, config.capacity_factor
        )
        return keep_within_capacity(choices_NK, config.num_experts, capacity)


def use_experts(model: GPT, config: MoEConfig, mesh: ExpertMesh | None = None) -> list[MoE]:
    """Replace the MLP of every block of a GPT by a mixture of experts; returns the new layers.

    Raises:
        ValueError: the layer's width is not the model's.
    """
    if config.width != model.config.width:
        raise ValueError(
            f"use_experts: the model has width {model.config.width}, the experts {config.width}"
        )
    layers = []
    for block in model.modules():
        if isinstance(block, Block):
            like = next(block.parameters())
            layers.append(MoE(config, mesh).to(like.device, like.dtype))
            block.add_module("mlp", layers[-1])
    return layers
