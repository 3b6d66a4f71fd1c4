"""Eight equal layers whose time is charged on the emulated cluster, and a cluster to fit."""

from __future__ import annotations

import torch

from minidist.emulate import Charged, ChargePlan, Cluster, Link

DEPTH, WIDTH = 8, 24


def plan_for(layers=DEPTH, forward_s=0.010, backward_s=0.020, secret=b"0123456789abcdef"):
    return ChargePlan((forward_s,) * layers, (backward_s,) * layers, secret)


def grading_cluster(
    num_ranks: int, parameter_bytes: int, compute_s: float, share: float = 0.43
) -> Cluster:
    """All gradients in one ring all-reduce take `share` of a step's compute; 3 devices or more."""
    n = max(num_ranks, 2)
    link = Link(
        bandwidth_bytes_per_s=2 * (n - 1) / n * parameter_bytes / (share * compute_s),
        latency_s=0.0,
    )
    return Cluster(
        name="grading",
        nodes=1,
        devices_per_node=num_ranks,
        intra_node=link,
        inter_node=link,
        peak_flops_per_s=1e12,
        memory_bandwidth_bytes_per_s=1e12,
    )


class Net(torch.nn.Module):
    """Charged linear layers; `side` is used in odd steps only (for find_unused_parameters)."""

    def __init__(self, channel=None, side=False, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.layers = torch.nn.ModuleList(
            Charged(torch.nn.Linear(WIDTH, WIDTH), i, channel) for i in range(DEPTH)
        )
        self.side = torch.nn.Linear(WIDTH, WIDTH) if side else None
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=WIDTH**-0.5, generator=generator)
        self.to(dtype)

    def forward(self, x, step=0):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.side is not None and step % 2:
            x = x + self.side(x)
        return x
