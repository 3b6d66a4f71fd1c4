"""A parameter server in one process: workers with a virtual clock, reproducible in every run.

Example::

    def gradient(parameters_N, worker, step): ...            # 1-D, as the parameters

    def compute_s(worker, step, rng):
        return rng.uniform(0.9, 1.1) * (4.0 if worker == 0 else 1.0)   # worker 0 is slow

    run = simulate(gradient, torch.zeros(10), make_sgd, num_workers=4, num_updates=100,
                   consistency=Asynchronous(), compute_s=compute_s)
    run.report.histogram()    # [(0, 14), (1, 20), ...]
    run.time_s                # virtual seconds
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from minidist.parallel.parameter_server.server import Consistency, MakeOptimizer, Report, Server

# Gradient(parameters, worker, step of that worker) -> gradient, 1-D like the parameters
Gradient = Callable[[torch.Tensor, int, int], torch.Tensor]
# ComputeS(worker, step of that worker, random numbers of that worker) -> seconds
ComputeS = Callable[[int, int, random.Random], float]


class Interval(NamedTuple):
    """A worker computes one gradient, from `begin_s` to `end_s`; between intervals it waits."""

    worker: int
    begin_s: float
    end_s: float


class Simulated(NamedTuple):
    """Result of `simulate`.

    Attributes:
        parameters: the final parameters.
        report: staleness and arrivals.
        time_s: virtual seconds until the last update.
        intervals: the computations of the workers, in the order in which gradients arrived; for a
            plot.
        idle_s: per worker, the seconds it waited for the server's permission to go on.
        values: (virtual seconds, value of `evaluate`) after each update.
    """

    parameters: torch.Tensor
    report: Report
    time_s: float
    intervals: list[Interval]
    idle_s: list[float]
    values: list[tuple[float, float]]

    @property
    def idle_share(self) -> float:
        """Share of the workers' total time in which they waited."""
        return sum(self.idle_s) / (len(self.idle_s) * self.time_s) if self.time_s else 0.0


def simulate(
    gradient: Gradient,
    parameters: torch.Tensor,
    make_optimizer: MakeOptimizer,
    *,
    num_workers: int,
    num_updates: int,
    consistency: Consistency,
    compute_s: ComputeS = lambda worker, step, rng: rng.uniform(0.5, 1.5),
    evaluate: Callable[[torch.Tensor], float] | None = None,
    seed: int = 0,
) -> Simulated:
    """Train until `num_updates` updates have been made. Messages take no time.

    Args:
        gradient: computes a worker's gradient of a step; worker and step are counted from 0.
        compute_s: the seconds that this takes. Each worker has its own random numbers, so a
            worker's times do not depend on the consistency.
        evaluate: returns a number after each update, e.g. the loss.
        seed: seed of the random numbers.

    Raises:
        ValueError: see `Server`; or a time is not positive.
    """
    server = Server(parameters, make_optimizer, num_workers, consistency)
    rngs = [random.Random(f"{seed}/{worker}") for worker in range(num_workers)]
    held = [server.parameters.clone() for _ in range(num_workers)]
    steps = [0] * num_workers
    events: list[tuple[float, int, float]] = []  # (end, worker, begin): equal ends by worker
    intervals: list[Interval] = []
    idle_s = [0.0] * num_workers
    waits_since: dict[int, float] = {}
    values: list[tuple[float, float]] = []
    now_s = 0.0

    def begin(worker: int) -> None:
        duration_s = compute_s(worker, steps[worker], rngs[worker])
        if not duration_s > 0:
            raise ValueError(f"simulate: compute_s must be positive, got {duration_s}")
        heapq.heappush(events, (now_s + duration_s, worker, now_s))

    for worker in range(num_workers):
        begin(worker)
    while server.report.num_updates < num_updates:
        now_s, worker, begin_s = heapq.heappop(events)
        intervals.append(Interval(worker, begin_s, now_s))
        before = server.report.num_updates
        released = server.push(worker, gradient(held[worker], worker, steps[worker]))
        if evaluate is not None and server.report.num_updates > before:
            values.append((now_s, evaluate(server.parameters)))
        steps[worker] += 1
        waits_since[worker] = now_s
        for free in released:
            idle_s[free] += now_s - waits_since.pop(free)
            held[free] = server.parameters.clone()
            begin(free)
    for worker, since_s in waits_since.items():
        idle_s[worker] += now_s - since_s
    return Simulated(server.parameters, server.report, now_s, intervals, idle_s, values)


def replay(
    gradient: Gradient,
    parameters: torch.Tensor,
    make_optimizer: MakeOptimizer,
    *,
    num_workers: int,
    arrivals: Sequence[int],
    consistency: Consistency,
) -> tuple[torch.Tensor, Report]:
    """Repeat a run from the order in which its gradients arrived; same result, bit for bit.

    Args:
        arrivals: `Report.arrivals` of a run, e.g. of real processes.
    """
    server = Server(parameters, make_optimizer, num_workers, consistency)
    held = [server.parameters.clone() for _ in range(num_workers)]
    steps = [0] * num_workers
    for worker in arrivals:
        released = server.push(worker, gradient(held[worker], worker, steps[worker]))
        steps[worker] += 1
        for free in released:
            held[free] = server.parameters.clone()
    return server.parameters, server.report
