"""Criteria for mixed precision on a GPU: time and memory of the student's loop. Extra points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograder.criteria.common import gpu_meter, oracle
from autograder.criteria.criterion import Case, Context, Finding, HardwareMissingError, Values
from autograder.criteria.lab4_amp.recorded import NEVER, GivenScaler

WIDTH, LAYERS, OUT = 2048, 8, 64  # few outputs: the loss saves float32 in any precision
MOST_SAMPLES, FEWEST_SAMPLES = 65_536, 4_096
# Per sample a float32 step keeps each layer's input and, at its peak, a few more tensors.
BYTES_PER_SAMPLE = WIDTH * 4 * (LAYERS + 6)
ROUNDS = 5
LR = 1e-3
LEAST_SPEEDUP = 2.0  # tensor cores promise 8 to 16; a loop that is half in float32 stays below 2
MOST_MEMORY = 0.75  # most memory here is activations, and 16 bits halve their bytes
LOSS_RTOL = 0.05


def network(seed: int) -> nn.Sequential:
    """Linear layers and ReLU, float32; the same seed gives the same network."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for out in [WIDTH] * (LAYERS - 1) + [OUT]:
        linear = nn.Linear(WIDTH, out)
        with torch.no_grad():
            weight = torch.randn(out, WIDTH, generator=generator)
            linear.weight.copy_(weight * (2 / WIDTH) ** 0.5)
            linear.bias.zero_()
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def data(seed: int, samples: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [samples, WIDTH], targets [samples, OUT], float32: FEWEST_SAMPLES rows, repeated."""
    generator = torch.Generator(device).manual_seed(seed)
    few = torch.randn(FEWEST_SAMPLES, WIDTH + OUT, device=device, generator=generator)
    both = few.repeat(samples // FEWEST_SAMPLES, 1)
    return both[:, :WIDTH].contiguous(), both[:, WIDTH:].contiguous()


def observe(train_amp: Any, inputs: Values, context: Context) -> Values:
    """Measures a step of the student's loop in 16 bits and a step of the grader's in float32.

    Each rank trains alone (DDP over a group of one rank), so that no communication is timed.
    """
    import torch.distributed as dist

    device = context.device
    dtype = gpu_meter.half_dtype(device)
    samples = _choose_samples(device)
    x, y = data(inputs["data"], samples, device)
    groups = [dist.new_group([rank]) for rank in range(context.world_size)]
    model = DistributedDataParallel(
        network(inputs["network"]).to(device),
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=groups[context.rank],
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    start = [p.detach().clone() for p in model.parameters()]
    losses: dict[str, float] = {}

    def afresh() -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            for p, value in zip(model.parameters(), start, strict=True):
                p.copy_(value)

    def full() -> None:
        optimizer.zero_grad()
        loss = oracle.mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses["full"] = loss.item()

    def mixed() -> None:
        scaler = GivenScaler(device.type, init_scale=1024.0, growth_interval=NEVER)
        told = train_amp(model, [(x, y)], oracle.mse, optimizer, scaler, dtype=dtype)
        losses["mixed"] = float(told[0])

    runs = {"full": full, "mixed": mixed}
    answer: Values = {}
    with gpu_meter.without_tf32():
        for name, run in runs.items():
            afresh()
            run()  # the first run allocates what stays allocated
            afresh()
            answer[f"{name}/bytes"] = gpu_meter.peak_bytes(run, device)
            answer[f"{name}/loss"] = losses[name]  # before any update
        for name, values in gpu_meter.paired_seconds(runs, device, rounds=ROUNDS).items():
            answer[f"{name}/seconds"] = np.array(values)
    return answer | {"samples": samples, "dtype": str(dtype).removeprefix("torch.")}


def _choose_samples(device: torch.device) -> int:
    """The number of samples, the same on all ranks.

    That many samples fit twice into this rank's share of the free GPU memory.

    Raises:
        HardwareMissingError: not even FEWEST_SAMPLES, which keep the GPU busy, fit.
    """
    import torch.distributed as dist

    free = gpu_meter.free_bytes(device)
    fit = free // (2 * dist.get_world_size() * BYTES_PER_SAMPLE)
    samples = min(MOST_SAMPLES, fit // FEWEST_SAMPLES * FEWEST_SAMPLES)
    if samples < FEWEST_SAMPLES:
        raise HardwareMissingError(
            f"It needs {2 * FEWEST_SAMPLES * BYTES_PER_SAMPLE / 2**30:.1f} GiB of free GPU memory "
            f"for each rank; all ranks together have {free / 2**30:.1f}."
        )
    return samples


def judge_speed(case: Case) -> Iterator[Finding]:
    """At least LEAST_SPEEDUP times as fast as in float32, with the same loss."""
    for rank, answer in enumerate(case.answers):
        full, mixed = (
            gpu_meter.positive(answer.get(f"{name}/seconds"), ROUNDS) for name in ("full", "mixed")
        )
        if full is None or mixed is None:
            yield Finding(f"expected {ROUNDS} times in seconds.", rank)
            continue
        ratio = gpu_meter.median_ratio(full, mixed)
        if not ratio >= LEAST_SPEEDUP:
            yield Finding(
                f"a step of {answer.get('samples')} samples took {np.median(mixed) * 1e3:.1f} "
                f"ms in {answer.get('dtype')}, {np.median(full) * 1e3:.1f} ms in float32: "
                f"expected at least {LEAST_SPEEDUP:g} times as fast, got {ratio:.2f} times. Do "
                "all matrix products run under autocast, the model's and the loss's?",
                rank,
            )
        yield from _judge_loss(rank, answer)


def judge_memory(case: Case) -> Iterator[Finding]:
    """At most MOST_MEMORY times the peak memory of float32, with the same loss."""
    for rank, answer in enumerate(case.answers):
        full, mixed = (answer.get(f"{name}/bytes") for name in ("full", "mixed"))
        if not (isinstance(full, int) and isinstance(mixed, int) and full > 0 and mixed > 0):
            yield Finding("expected two peaks in bytes.", rank)
            continue
        if mixed > MOST_MEMORY * full:
            yield Finding(
                f"a step of {answer.get('samples')} samples needed {mixed / 2**30:.2f} GiB "
                f"beyond parameters and data in {answer.get('dtype')}, {full / 2**30:.2f} in "
                f"float32: expected at most {MOST_MEMORY:g} of that, got {mixed / full:.2f}. "
                "Are the activations in 16 bits, and is no float32 copy of them kept?",
                rank,
            )
        yield from _judge_loss(rank, answer)


def _judge_loss(rank: int, answer: Values) -> Iterator[Finding]:
    full, mixed = (answer.get(f"{name}/loss") for name in ("full", "mixed"))
    right = (
        isinstance(full, float)
        and isinstance(mixed, float)
        and abs(mixed - full) <= LOSS_RTOL * abs(full)
    )
    if not right:
        yield Finding(
            f"the loss of the first step: expected {full} as in float32, within "
            f"{LOSS_RTOL:.0%}, got {mixed}.",
            rank,
        )
