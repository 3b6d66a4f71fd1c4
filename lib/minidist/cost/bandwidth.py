"""Measured collectives: bus bandwidth, and a fit of latency and bandwidth to measurements.

nccl-tests reports two figures. *Algorithm bandwidth* is buffer bytes / seconds. *Bus bandwidth* is
algorithm bandwidth times a factor per collective, for example 2(n-1)/n for an all-reduce. With this
factor an ideal ring gives the bandwidth of the wire for any number of ranks (nccl-tests,
doc/PERFORMANCE.md).

Example: 8 ranks all-reduce 16 GiB in 0.128 s.

>>> t = 0.128
>>> round(algorithm_bandwidth(num_bytes=2**34, seconds=t) / 1e9)  # GB/s
134
>>> round(bus_bandwidth(kind="all_reduce", num_bytes=2**34, seconds=t, num_ranks=8) / 1e9)
235
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minidist.cost.comm import Wire


def bus_factor(*, kind: str, num_ranks: int) -> float:
    """Bus bandwidth / algorithm bandwidth. Buffer sizes as in `minidist.cost.comm`: for all_gather
    and reduce_scatter the whole buffer, n times a rank's share.

    >>> bus_factor(kind="all_reduce", num_ranks=8), bus_factor(kind="all_gather", num_ranks=8)
    (1.75, 0.875)
    """
    n = num_ranks
    if n < 1:
        raise ValueError(f"bus_factor: num_ranks must be at least 1, got {n}")
    factors = {
        "all_reduce": 2 * (n - 1) / n,
        "all_reduce_in_network": (n - 1) / (n + 1),  # the switch computes the sum (NVLink SHARP)
        "reduce_scatter": (n - 1) / n,
        "all_gather": (n - 1) / n,
        "all_to_all": (n - 1) / n,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send": 1.0,
    }
    if kind not in factors:
        raise ValueError(f"bus_factor: unknown kind {kind!r}, known are {', '.join(factors)}")
    return factors[kind]


def algorithm_bandwidth(*, num_bytes: float, seconds: float) -> float:
    """Buffer bytes per second."""
    return num_bytes / seconds


def bus_bandwidth(*, kind: str, num_bytes: float, seconds: float, num_ranks: int) -> float:
    """Bytes per second on the busiest link, if the algorithm is an ideal ring."""
    factor = bus_factor(kind=kind, num_ranks=num_ranks)
    return factor * algorithm_bandwidth(num_bytes=num_bytes, seconds=seconds)


def seconds_from_bus_bandwidth(
    *, kind: str, num_bytes: float, bus_bytes_per_s: float, num_ranks: int
) -> float:
    """The time from which nccl-tests computed a bus bandwidth."""
    return num_bytes * bus_factor(kind=kind, num_ranks=num_ranks) / bus_bytes_per_s


def half_bandwidth_bytes(*, num_ranks: int, link: Wire) -> float:
    """The buffer size at which a ring all-reduce reaches half of its bandwidth, n alpha / beta: the
    latency and the transfer take equally long.

    >>> wire = Wire(bandwidth_bytes_per_s=100e9, latency_s=5e-6)
    >>> round(half_bandwidth_bytes(num_ranks=8, link=wire))
    4000000
    """
    return num_ranks * link.latency_s * link.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A straight line through measured times.

    Attributes:
        link: latency per message and bandwidth that explain the times best.
        latency_s_error, bandwidth_rel_error: standard error of the latency, relative standard error
            of the bandwidth.
        mean_rel_error: of the fitted times compared with the measured times.
    """

    link: Wire
    latency_s_error: float
    bandwidth_rel_error: float
    mean_rel_error: float


def fit_link(
    *,
    num_bytes: Sequence[float],
    seconds: Sequence[float],
    kind: str = "all_reduce",
    num_ranks: int = 2,
) -> Fit:
    """Fit alpha and beta of a ring to measured times by (weighted) least squares.

    The time of a collective is a linear function of its bytes: t = M alpha + c B beta, with M
    messages one after the other and c the bus factor. Relative errors are minimised (weights
    1/t^2), so that small messages count as much as large messages.

    >>> sizes = [2.0**k for k in range(10, 26)]
    >>> times = [14 * 5e-6 + 1.75 * b / 200e9 for b in sizes]  # 8 ranks, 5 us, 200 GB/s
    >>> fit = fit_link(num_bytes=sizes, seconds=times, num_ranks=8)
    >>> round(fit.link.latency_s * 1e6, 6), round(fit.link.bandwidth_bytes_per_s / 1e9, 6)
    (5.0, 200.0)

    Raises:
        ValueError: fewer than three points, one size only, times that are not positive, or larger
            messages do not take longer.
    """
    if len(num_bytes) != len(seconds) or len(seconds) < 3 or len(set(num_bytes)) < 2:
        raise ValueError(
            f"fit_link needs three points or more at two sizes or more, got {len(num_bytes)} sizes "
            f"({len(set(num_bytes))} different) and {len(seconds)} times"
        )
    if not all(t > 0 and math.isfinite(t) for t in seconds):
        raise ValueError("fit_link: times must be positive and finite")
    messages = {"all_reduce": 2 * (num_ranks - 1), "send": 1}.get(kind, num_ranks - 1)
    factor = bus_factor(kind=kind, num_ranks=num_ranks)

    # Weighted normal equations of t = intercept + slope * bytes, bytes centred on their mean.
    weights = [1 / t**2 for t in seconds]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, num_bytes, strict=True)) / total
    mean_t = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, num_bytes, strict=True))
    slope = (
        sum(
            w * (x - mean_x) * (t - mean_t)
            for w, x, t in zip(weights, num_bytes, seconds, strict=True)
        )
        / spread
    )
    intercept = mean_t - slope * mean_x
    if slope <= 0:
        raise ValueError("fit_link: larger messages are not slower here, so there is no bandwidth")

    residuals = [intercept + slope * x - t for x, t in zip(num_bytes, seconds, strict=True)]
    variance = sum(w * r**2 for w, r in zip(weights, residuals, strict=True)) / (len(seconds) - 2)
    relative_errors = [abs(r / t) for r, t in zip(residuals, seconds, strict=True)]
    return Fit(
        link=Wire(
            bandwidth_bytes_per_s=factor / slope, latency_s=max(0.0, intercept / max(1, messages))
        ),
        latency_s_error=math.sqrt(variance * (1 / total + mean_x**2 / spread)) / max(1, messages),
        bandwidth_rel_error=math.sqrt(variance / spread) / slope,
        mean_rel_error=sum(relative_errors) / len(relative_errors),
    )
