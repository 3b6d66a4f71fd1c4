"""Speedup and efficiency: how much of the performance of N GPUs a job gets.

- **Communication**: S = N / (1 + C), C = exposed communication / computation of a step on N GPUs.
- **Amdahl** (1967): a serial share f of the one-GPU time limits S to 1 / (f + (1-f)/N) < 1/f.
- **Critical batch size** (McCandlish et al., arXiv 1812.06162): (steps/S_min - 1) times
  (examples/E_min - 1) is 1, so above B_crit = E_min/S_min a larger batch saves only few steps.

A communication share that was measured on N GPUs is not Amdahl's f. With a measured share the
speedup is N * compute / (compute + communication).

>>> round(speedup_with_communication(num_gpus=8, compute_s=0.100, communication_s=0.010), 2)
7.27
>>> round(amdahl_speedup(serial_fraction=0.1, num_gpus=8), 2)
4.71
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def speedup_with_communication(
    *, num_gpus: int, compute_s: float, communication_s: float, overlap_fraction: float = 0.0
) -> float:
    """S = N / (1 + C) for data parallelism with a fixed batch per GPU.

    Args:
        overlap_fraction: share of the communication that runs behind computation. The hidden time
            is at most compute_s.
    """
    if compute_s <= 0 or communication_s < 0 or not 0 <= overlap_fraction <= 1:
        raise ValueError(
            f"need compute > 0, communication >= 0 and overlap in [0, 1], got {compute_s}, "
            f"{communication_s}, {overlap_fraction}"
        )
    hidden_s = min(overlap_fraction * communication_s, compute_s)
    return num_gpus / (1 + (communication_s - hidden_s) / compute_s)


def amdahl_speedup(*, serial_fraction: float, num_gpus: float) -> float:
    """1 / (f + (1-f)/N). `num_gpus` may be infinite."""
    if not 0 <= serial_fraction <= 1:
        raise ValueError(f"serial_fraction is in [0, 1], got {serial_fraction}")
    return 1 / (serial_fraction + (1 - serial_fraction) / num_gpus)


def karp_flatt(*, speedup: float, num_gpus: int) -> float:
    """The serial share that explains a measured speedup: f = (1/S - 1/N) / (1 - 1/N). If f grows
    with N, the loss comes from overhead (communication), not from a serial part (Karp and Flatt
    1990).

    >>> [round(karp_flatt(speedup=1000 / t, num_gpus=n), 3) for n, t in ((2, 520), (32, 50))]
    [0.04, 0.019]
    """
    if num_gpus < 2:
        raise ValueError("karp_flatt needs at least 2 GPUs")
    return (1 / speedup - 1 / num_gpus) / (1 - 1 / num_gpus)


def strong_scaling_efficiency(*, time_one_s: float, time_n_s: float, num_gpus: int) -> float:
    """The same problem on N GPUs: (t_1 / t_N) / N.

    >>> round(100 * strong_scaling_efficiency(time_one_s=100, time_n_s=15, num_gpus=8), 1)
    83.3
    """
    return time_one_s / (num_gpus * time_n_s)


def weak_scaling_efficiency(*, time_one_s: float, time_n_s: float) -> float:
    """The same work per GPU: t_1 / t_N."""
    return time_one_s / time_n_s


def throughput_efficiency(*, rate_one: float, rate_n: float, num_gpus: int) -> float:
    """Samples per second on N GPUs / (N * samples per second on one GPU)."""
    return rate_n / (num_gpus * rate_one)


# -------------------------------------------------------------------------------------- bottleneck


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """Where the time of a step goes.

    Attributes:
        limit: "compute", "communication", "loader" or "idle": the largest loss, or "compute" if
            no loss is above the threshold.
        shares: shares of the step: compute, exposed communication, waiting for data, other idle
            time.
        efficiency: the compute share.
        speedup: speedup of `num_gpus` GPUs over one GPU that only computes.
        advice: what to try first.
    """

    limit: str
    shares: Mapping[str, float]
    efficiency: float
    speedup: float
    advice: str


_ADVICE = {
    "compute": "GPUs compute: larger matrices, lower precision, fused kernels, no recomputation",
    "communication": "overlap it with backward, more micro-batches per all-reduce, a larger batch "
    "per GPU, compression, a faster link",
    "loader": "more workers, prefetch, pinned memory, cheaper preprocessing, a faster disk",
    "idle": "stragglers, pipeline bubbles, synchronisation with the host, launch overhead: look at "
    "a timeline",
}


def bottleneck(
    *,
    compute_s: float,
    communication_s: float,
    num_gpus: int,
    step_s: float | None = None,
    loader_s: float = 0.0,
    overlapped_s: float = 0.0,
    threshold: float = 0.1,
) -> Bottleneck:
    """What limits a step, from the measured parts of the step.

    Args:
        communication_s: all communication; of this time, overlapped_s runs behind computation.
        loader_s: time that the step waits for its batch.
        step_s: the whole step; the time that is in no part counts as idle. Default: the sum of the
            parts.
        threshold: losses below this share of the step do not count as the limit.

    >>> b = bottleneck(compute_s=60, communication_s=40, num_gpus=8)
    >>> b.limit, round(b.speedup, 2)
    ('communication', 4.8)

    Raises:
        ValueError: negative times, or parts that add up to more than the step.
    """
    parts = {
        "compute": compute_s,
        "communication": communication_s - overlapped_s,
        "loader": loader_s,
    }
    if min(parts.values()) < 0 or overlapped_s < 0 or compute_s <= 0:
        raise ValueError(f"bottleneck: times must not be negative, compute above 0, got {parts}")
    known = sum(parts.values())
    total = known if step_s is None else step_s
    if known > total * (1 + 1e-9):
        raise ValueError(
            f"bottleneck: compute + exposed communication + loader = {known:.6g} s, more than the "
            f"step, {total:.6g} s; give the overlap"
        )
    parts["idle"] = max(0.0, total - known)
    shares = {name: seconds / total for name, seconds in parts.items()}
    losses = {name: share for name, share in shares.items() if name != "compute"}
    worst = max(losses, key=lambda name: losses[name])
    limit = worst if losses[worst] > threshold else "compute"
    return Bottleneck(
        limit=limit,
        shares=shares,
        efficiency=shares["compute"],
        speedup=num_gpus * shares["compute"],
        advice=_ADVICE[limit],
    )


# ------------------------------------------------------------------------------ critical batch size


def steps_and_examples(
    *, batch: float, critical_batch: float, min_steps: float
) -> tuple[float, float]:
    """Optimiser steps and examples that reach a fixed loss at a batch size (arXiv 1812.06162).

    steps = S_min (1 + B_crit/B), examples = E_min (1 + B/B_crit), E_min = S_min B_crit.

    >>> steps_and_examples(batch=1000, critical_batch=1000, min_steps=5000)  # twice each minimum
    (10000.0, 10000000.0)
    """
    if min(batch, critical_batch, min_steps) <= 0:
        raise ValueError("batch, critical_batch and min_steps must be above 0")
    steps = min_steps * (1 + critical_batch / batch)
    return steps, steps * batch


def critical_batch_size(*, batches: tuple[float, float], steps: tuple[float, float]) -> float:
    """B_crit from the steps with which two batch sizes reached the same loss.

    Two equations steps = S_min (1 + B_crit/B) give B_crit = (s1 - s2) / (s2/B1 - s1/B2).

    >>> critical_batch_size(batches=(500, 2000), steps=(15000, 7500))
    1000.0
    """
    (b1, b2), (s1, s2) = batches, steps
    denominator = s2 / b1 - s1 / b2
    if denominator <= 0 or s1 <= s2 or b1 >= b2:
        raise ValueError(
            "critical_batch_size needs a smaller and a larger batch, fewer steps for the larger, "
            f"and less than proportionally fewer; got batches {batches}, steps {steps}"
        )
    return (s1 - s2) / denominator


def noise_scale(*, grad_sq_small: float, grad_sq_big: float, small: int, big: int) -> float:
    """Simple noise scale tr(S)/|G|^2, an estimate of B_crit, from the mean squared norms of
    gradients over `small` and `big` examples (arXiv 1812.06162, appendix A). Data parallelism has
    both gradients: one rank's gradient and the all-reduced gradient.

    |G|^2 = (big g_big - small g_small) / (big - small); tr(S) = (g_small - g_big)/(1/small - 1/big)

    >>> noise_scale(grad_sq_small=1 + 64 / 8, grad_sq_big=1 + 64 / 32, small=8, big=32)
    64.0

    Raises:
        ValueError: not 0 < small < big; or |G|^2 or tr(S) comes out negative, because too few norms
            were averaged.
    """
    if not 0 < small < big:
        raise ValueError(f"noise_scale needs 0 < small < big, got {small}, {big}")
    gradient = (big * grad_sq_big - small * grad_sq_small) / (big - small)
    variance = (grad_sq_small - grad_sq_big) / (1 / small - 1 / big)
    if not gradient > 0 or not variance >= 0:
        raise ValueError(
            f"noise_scale: squared norms of {grad_sq_small:.4g} over {small} examples and "
            f"{grad_sq_big:.4g} over {big} give |G|^2 = {gradient:.4g} and tr(S) = {variance:.4g}; "
            "expected above 0 and at least 0: average the norms over more steps"
        )
    return variance / gradient
