"""The server's rules, without communication: what a gradient does, and which workers may go on.

Example::

    server = Server(parameters_N, make_sgd, num_workers=2, consistency=Asynchronous(max_ahead=1))
    server.push(0, gradient_N)  # [0]: applied, worker 0 may take the new parameters
    server.push(0, gradient_N)  # []: worker 0 is 2 ahead of worker 1 now, and has to wait
    server.push(1, gradient_N)  # [0, 1]

Phases of a push:
1. Count the worker's finished step, and the updates that its gradient has missed.
2. Update: apply the gradient, or keep it until enough gradients have come.
3. Release the workers that need not wait any longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Synchronous:
    """One update per step, with the mean of the gradients of all workers, or of the fastest ones.

    Args:
        num_backups: how many workers each step does not wait for; it drops their late gradients.
            This avoids waiting for stragglers.
    """

    num_backups: int = 0


@dataclass(frozen=True, kw_only=True)
class Asynchronous:
    """One update per gradient, made immediately.

    Args:
        max_ahead: a worker that has finished c steps may go on only if all workers have finished at
            least c - max_ahead steps. None means no limit; 0 means lockstep.
    """

    max_ahead: int | None = None


Consistency = Synchronous | Asynchronous
MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


@dataclass
class Report:
    """What happened at the server.

    Attributes:
        staleness: number of missed updates -> number of applied gradients that missed so many.
        arrivals: the workers whose gradients arrived, in order; the input of `replay`.
        num_updates: steps of the optimiser.
        num_dropped: gradients that came after their step was complete.
    """

    staleness: Counter[int] = field(default_factory=Counter)
    arrivals: list[int] = field(default_factory=list)
    num_updates: int = 0
    num_dropped: int = 0

    @property
    def num_applied(self) -> int:
        """Gradients that went into an update."""
        return self.staleness.total()

    @property
    def mean_staleness(self) -> float:
        total = sum(missed * count for missed, count in self.staleness.items())
        return total / max(1, self.num_applied)

    def histogram(self) -> list[tuple[int, int]]:
        """(missed updates, number of gradients), from 0 to the largest, for a plot."""
        largest = max(self.staleness, default=-1)
        return [(missed, self.staleness[missed]) for missed in range(largest + 1)]


class Server:
    """Parameters, their optimiser, and the rules of consistency. Workers are numbered from 0.

    Args:
        parameters: flat, 1-D, floating point; copied. `server.parameters` is the current value.
        make_optimizer: makes a torch optimizer for a list of tensors.
        num_workers: number of workers; all of them have the parameters at the start.
        consistency: `Synchronous` or `Asynchronous`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        parameters: torch.Tensor,
        make_optimizer: MakeOptimizer,
        num_workers: int,
        consistency: Consistency,
    ) -> None:
        check(parameters, num_workers, consistency)
        self.parameters = parameters.detach().clone()
        self.optimizer = make_optimizer([self.parameters])
        self.num_workers = num_workers
        self.consistency = consistency
        self.report = Report()
        self._clocks = [0] * num_workers  # steps that each worker has finished
        self._read = [0] * num_workers  # num_updates when the worker took its parameters
        self._waiting: set[int] = set()
        self._collected: dict[int, torch.Tensor] = {}  # synchronous: gradients of this step

    def push(self, worker: int, gradient: torch.Tensor) -> list[int]:
        """A gradient arrives from a worker that was not waiting.

        Returns:
            The workers that may go on with the current `self.parameters`, in order. Any other
            worker that has pushed waits until a later push returns it.

        Raises:
            ValueError: the gradient's shape is wrong, or the worker is waiting or does not exist.
        """
        if gradient.shape != self.parameters.shape:
            raise ValueError(
                f"Server.push: worker {worker} sent a gradient of shape {tuple(gradient.shape)}, "
                f"the parameters have {tuple(self.parameters.shape)}"
            )
        if not 0 <= worker < self.num_workers or worker in self._waiting:
            raise ValueError(
                f"Server.push: worker {worker} has no parameters out (of {self.num_workers} "
                f"workers, {sorted(self._waiting)} wait)"
            )
        # 1. Count.
        self.report.arrivals.append(worker)
        self._clocks[worker] += 1
        self._waiting.add(worker)
        missed = self.report.num_updates - self._read[worker]
        # 2. Update.
        if isinstance(self.consistency, Asynchronous):
            self._update(gradient, [missed])
        elif missed > 0:
            self.report.num_dropped += 1  # its step was complete without this gradient
        else:
            self._collected[worker] = gradient.clone()
            if len(self._collected) == self.num_workers - self.consistency.num_backups:
                # In the order of workers, not of arrivals, so that every run gives the same sum.
                mean = torch.stack([self._collected[w] for w in sorted(self._collected)]).mean(0)
                self._update(mean, [0] * len(self._collected))
                self._collected.clear()
        # 3. Release.
        released = sorted(w for w in self._waiting if self._may_go_on(w))
        for w in released:
            self._waiting.discard(w)
            self._read[w] = self.report.num_updates
        return released

    def _update(self, gradient: torch.Tensor, staleness: list[int]) -> None:
        self.parameters.grad = gradient.to(self.parameters)
        self.optimizer.step()
        self.report.num_updates += 1
        self.report.staleness.update(staleness)

    def _may_go_on(self, worker: int) -> bool:
        if isinstance(self.consistency, Synchronous):
            return worker not in self._collected
        limit = self.consistency.max_ahead
        return limit is None or self._clocks[worker] - min(self._clocks) <= limit


def check(parameters: torch.Tensor, num_workers: int, consistency: Consistency) -> None:
    """Raise ValueError for arguments that cannot work; on every rank, before any communication."""
    if parameters.dim() != 1 or not parameters.is_floating_point():
        raise ValueError(
            "parameter server: parameters must be a 1-D floating-point tensor, got "
            f"{parameters.dtype} of shape {tuple(parameters.shape)}"
        )
    if num_workers < 1:
        raise ValueError(f"parameter server: needs at least 1 worker, got {num_workers}")
    if isinstance(consistency, Synchronous):
        if not 0 <= consistency.num_backups < num_workers:
            raise ValueError(
                f"Synchronous: num_backups must be in [0, {num_workers - 1}] for {num_workers} "
                f"workers, got {consistency.num_backups}"
            )
    elif consistency.max_ahead is not None and consistency.max_ahead < 0:
        raise ValueError(f"Asynchronous: max_ahead must not be < 0, got {consistency.max_ahead}")
