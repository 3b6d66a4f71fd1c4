"""The network that DDP from scratch trains on the emulated cluster: charged layers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common.emulated import charge
from autograder.criteria.criterion import Context, Values


class _Layer(nn.Module):
    """tanh of a linear layer, in its own dtype."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(weight).to(dtype))
        self.bias = None if bias is None else nn.Parameter(torch.from_numpy(bias).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias))


class _ByNumber(nn.Sequential):
    """Runs its layers in the order of their numbers, not in that of registration."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for layer in sorted(self, key=attrgetter("layer")):
            input = layer(input)
        return input


def make_model(
    inputs: Values, channel: Any, doubles: Sequence[int], frozen: int = 0
) -> nn.Sequential:
    """The charged network of `inputs`, with some layers in float64.

    Args:
        frozen: how many frozen numbers, on which nothing depends, are added to each layer.
    """
    layers = []
    for number in range(inputs["layers"]):
        dtype = torch.float64 if number in doubles else torch.float32
        layer = _Layer(inputs[f"w{number}"], inputs.get(f"b{number}"), dtype)
        if frozen:
            layer.frozen = nn.Parameter(torch.zeros(frozen), requires_grad=False)
        layers.append(layer)
    charged = charge(layers, channel)
    return _ByNumber(*(charged[number] for number in inputs.get("registered", range(len(layers)))))


def wrap(
    ddp_class: Any, inputs: Values, context: Context, doubles: Sequence[int]
) -> tuple[nn.Sequential, Any]:
    """The network and its DDP; without frozen parameters if the DDP refuses them."""
    frozen = inputs.get("frozen", 0)
    module = make_model(inputs, context.broker, doubles, frozen)
    try:
        return module, ddp_class(module, bucket_cap_mb=inputs["cap_mb"])
    except Exception:
        if not frozen:
            raise
    return wrap(ddp_class, inputs | {"frozen": 0}, context, doubles)  # `judge_tied` finds that
