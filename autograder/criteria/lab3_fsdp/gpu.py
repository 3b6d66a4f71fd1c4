"""Criterion for sharding on a GPU: a rank's peak memory while it trains. Extra points.

torch's own allocator counts the bytes, inside the rank. No memory limit per process works on all
GPUs, as RLIMIT_DATA does on every machine for the criterion without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autograder.criteria.common import gpu_meter, oracle
from autograder.criteria.common.memory_limit import build
from autograder.criteria.criterion import Case, Context, Finding, Values

WIDTH, BLOCKS, SAMPLES, STEPS, LR = 1536, 24, 4, 3, 1e-4
PARAMETER_BYTES = BLOCKS * (WIDTH + 2) * WIDTH * 4
COPIES = 4  # parameters, gradients and AdamW's two states
# Allowed beyond the shards, as a fraction of the parameters: two or three gathered units, one unit
# that is reduced, and the activations. Code that keeps all units gathered needs 1; code that shards
# the optimizer alone needs more.
TRANSIENT = 0.5
LOSS_RTOL = 1e-3


def budget_bytes(world_size: int) -> int:
    """The most bytes that a rank may hold."""
    return int((COPIES / world_size + TRANSIENT) * PARAMETER_BYTES)


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, [SAMPLES, WIDTH] each, float32."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(SAMPLES, WIDTH, generator=generator),
        torch.randn(SAMPLES, WIDTH, generator=generator),
    )


def observe(fsdp_class: Any, inputs: Values, context: Context) -> Values:
    """Shards the model with the class; returns the peak of some AdamW steps and the first loss."""
    device = context.device
    x, y = (tensor.to(device) for tensor in data(inputs["data"]))
    gpu_meter.warm_up(device)
    before = torch.cuda.memory_allocated(device)
    model = build(inputs["network"], width=WIDTH, num_blocks=BLOCKS).to(device)
    fsdp = fsdp_class(model, list(model))
    # Fused, because the default on a GPU copies all shards in every step.
    optimizer = torch.optim.AdamW(fsdp.local_parameters(), lr=LR, fused=True)
    losses: list[float] = []

    def train() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = oracle.mse(fsdp(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    peak = gpu_meter.peak_bytes(train, device, base=before)
    return {"bytes": peak, "loss": losses[0]}


def judge(case: Case) -> Iterator[Finding]:
    """The peak is within the budget, and the first loss is that of the whole model."""
    budget = budget_bytes(case.world_size)
    model = build(case.inputs[0]["network"], torch.float64, WIDTH, BLOCKS)
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        x, y = (tensor.double() for tensor in data(inputs["data"]))
        with torch.no_grad():
            expected = oracle.mse(model(x), y).item()
        loss, peak = answer.get("loss"), answer.get("bytes")
        if not (isinstance(loss, float) and abs(loss - expected) <= LOSS_RTOL * expected):
            yield Finding(
                f"the loss before the first update: expected {expected:.6g}, got {loss}. Is the "
                "output the whole model's?",
                rank,
            )
        if not isinstance(peak, int) or peak <= 0:
            yield Finding("expected a peak in bytes.", rank)
        elif peak > budget:
            yield Finding(
                f"a model with {PARAMETER_BYTES / 1e6:.0f} MB of parameters, in {BLOCKS} units, "
                f"with AdamW: expected at most {budget / 1e6:.0f} MB on each of {case.world_size} "
                f"ranks, got {peak / 1e6:.0f} MB. Are the whole model's tensors gone after the "
                "constructor, and a unit's after its forward and backward?",
                rank,
            )
