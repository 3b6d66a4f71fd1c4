"""Criterion for buckets on real GPUs: the efficiency of a step with communication. Extra points.

The batch size is chosen on the machine so that a step computes `COMPUTE_OVER_COMM` times as long
as it takes to pack, all-reduce and unpack all gradients. A submission that does all this after
backward has an efficiency near 0.86 on any machine. Packing always takes GPU time. Where links are
fast, most of the communication time is packing.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import gpu_meter, oracle
from autograder.criteria.criterion import (
    Case,
    Context,
    Finding,
    HardwareMissingError,
    Values,
)

WIDTH, LAYERS, ROUNDS = 2048, 10, 15
COMPUTE_OVER_COMM = 6.0
FEWEST_SAMPLES, MOST_SAMPLES = 256, 65_536
LEAST_EFFICIENCY = 0.9


def network(seed: int) -> nn.Sequential:
    """Linear layers and tanh; the same seed gives the same network."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for p in linear.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * WIDTH**-0.5)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class _Step:
    """A step: forward, backward and, if there are buckets, the mean over ranks."""

    def __init__(self, model: nn.Module, buckets: Any, seed: int) -> None:
        self.model, self.buckets = model, buckets
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        self._all = torch.randn(2, FEWEST_SAMPLES, WIDTH, device=device, generator=generator)
        self.use(FEWEST_SAMPLES)

    def use(self, samples: int) -> None:
        """Sets the number of samples of all following steps, a multiple of FEWEST_SAMPLES."""
        self.x, self.y = (t.repeat(samples // FEWEST_SAMPLES, 1) for t in self._all)

    def __call__(self) -> None:
        self.model.zero_grad()
        oracle.mse(self.model(self.x), self.y).backward()
        if self.buckets is not None:
            self.buckets.finish()


def observe(buckets_class: Any, inputs: Values, context: Context) -> Values:
    """Seconds and one gradient of steps with the student's buckets and of steps without.

    Raises:
        HardwareMissingError: there is only one rank, which sends nothing; its time would be only
            Python's own.
    """
    if context.world_size == 1:
        raise HardwareMissingError("It needs two ranks or more, with a GPU each.")
    device = context.device
    alone = network(inputs["network"]).to(device)
    together = copy.deepcopy(alone)
    # One bucket for each layer, the last one first: weight and bias are parameters 2 i and 2 i + 1.
    plan = [[2 * layer, 2 * layer + 1] for layer in reversed(range(LAYERS))]
    buckets = buckets_class(together, plan)
    steps = {
        "alone": _Step(alone, None, inputs["data"]),
        "together": _Step(together, buckets, inputs["data"]),
    }
    samples = _choose_samples(steps["alone"], device)
    for step in steps.values():
        step.use(samples)
    seconds = gpu_meter.paired_seconds(dict(steps), device, rounds=ROUNDS, warmup=3)
    answer: Values = {f"{name}/seconds": np.array(values) for name, values in seconds.items()}
    for name, step in steps.items():
        answer[f"{name}/gradient"] = oracle.grad_of(list(step.model.parameters())[-1])
    return answer | {"samples": samples}


def _choose_samples(step: _Step, device: torch.device) -> int:
    """The samples with which a step alone takes COMPUTE_OVER_COMM times as long as averaging."""
    import torch.distributed as dist

    gradients = [torch.zeros_like(p) for p in step.model.parameters()]

    def average() -> None:
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(piece.view_as(g))

    comm = gpu_meter.paired_seconds({"mean": average}, device, rounds=5)["mean"]
    samples = FEWEST_SAMPLES
    while samples < MOST_SAMPLES:
        step.use(samples)
        compute = gpu_meter.paired_seconds({"step": step}, device, rounds=3)["step"]
        # All ranks decide alike, from the fastest step and the slowest averaging of all ranks.
        worst = torch.tensor([np.median(comm), -np.median(compute)], device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if -worst[1].item() >= COMPUTE_OVER_COMM * worst[0].item():
            break
        samples += max(1, samples // FEWEST_SAMPLES // 4) * FEWEST_SAMPLES
    return samples


def _is_gradient(value: np.ndarray) -> bool:
    """Whether this can be the last bias's gradient; a mean over many numbers makes it small."""
    return (
        value.dtype.kind == "f"
        and value.shape == (WIDTH,)
        and bool((np.abs(value) < 1).all() and value.any())
    )


def judge(case: Case) -> list[Finding]:
    """The slowest ranks of each round are efficient, and the gradient is the mean over ranks."""
    findings: list[Finding] = []
    times: dict[str, list[np.ndarray]] = {"alone": [], "together": []}
    own = [answer.get("alone/gradient") for answer in case.answers]
    whole = [g for g in own if isinstance(g, np.ndarray) and _is_gradient(g)]
    for rank, answer in enumerate(case.answers):
        for name, found in times.items():
            seconds = gpu_meter.positive(answer.get(f"{name}/seconds"), ROUNDS)
            if seconds is None:
                findings.append(Finding(f"expected {ROUNDS} times in seconds.", rank))
                break
            found.append(seconds)
        if len(whole) != case.world_size:
            findings.append(
                Finding(
                    f"expected {WIDTH} finite numbers of a gradient on each rank, not all of them "
                    "zero.",
                    rank,
                )
            )
        else:
            if wrong := oracle.differs(
                rank,
                "gradient of the last bias",
                answer.get("together/gradient"),
                oracle.mean(whole),
                terms=whole,
                hint="It should be the mean over ranks when finish() returns.",
            ):
                findings.append(wrong)
    if findings:
        return findings
    alone, together = (np.max(times[name], axis=0) for name in ("alone", "together"))
    efficiency = gpu_meter.median_ratio(alone, together)
    if not efficiency >= LEAST_EFFICIENCY:
        return [
            Finding(
                f"a step of {case.answers[0].get('samples')} samples took "
                f"{np.median(together) * 1e3:.2f} ms with communication, "
                f"{np.median(alone) * 1e3:.2f} ms without: expected an efficiency of at least "
                f"{LEAST_EFFICIENCY:g}, got {efficiency:.3f}. Is each bucket sent while backward "
                "goes on, and the GPU not waited for before finish()?"
            )
        ]
    return []
