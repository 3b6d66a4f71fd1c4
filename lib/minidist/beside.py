"""The same training in several ways, side by side: losses, traffic, and time on two clocks.

Example, on every rank::

    beside(
        {
            "torch": training(DistributedDataParallel),
            "minidist": training(BucketedDDP),
        }
    )

All ways get the same weights and batches. Times of the real clock are medians over rounds in which
every way is timed once, so that other load on the machine slows all ways alike. Times of the
emulated cluster do not depend on the machine.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.collectives.log import CollectiveLog
from minidist.collectives.records import table
from minidist.emulate import Charged, ChargePlan, Cluster, Link
from minidist.emulate import run as run_emulated

Step = Callable[[Tensor, Tensor], Tensor]
Begin = Callable[[nn.Sequential], Step]

LAYERS, WIDTH, BATCH = 8, 256, 16
FORWARD_S, BACKWARD_S = 3e-4, 6e-4  # of a layer, on the emulated cluster
NETWORK = Link(bandwidth_bytes_per_s=1e9, latency_s=5e-5)
WITHIN_NODE = Link(bandwidth_bytes_per_s=1e10, latency_s=5e-6)


@dataclass(frozen=True)
class Result:
    """What one way of training has cost.

    Attributes:
        losses: the mean over ranks of the loss of each step.
        calls: collectives of one rank in the last step.
        megabytes: 1e6 bytes that one rank sends in the last step, if rings carry the collectives.
        ms: median time of a step on this machine.
        emulated_ms: time of the second step on the emulated cluster.
    """

    losses: tuple[float, ...]
    calls: int
    megabytes: float
    ms: float
    emulated_ms: float


def find(name: str) -> Any:
    """The library's part `module:attribute`; None while an open lab asks for it.

    >>> find("minidist.model:MLP") is not None, find("minidist.not_handed_out:Thing")
    (True, None)
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError:
        return None


def training(wrap: Callable[[nn.Sequential], Any]) -> Begin:
    """SGD on the mean squared error.

    Args:
        wrap: makes the network parallel, and returns what to call. If that has a method
            `finish_gradient_synchronization`, it is called after backward; if it has a method
            `local_parameters`, these are trained, and not the network's.
    """

    def begin(model: nn.Sequential) -> Step:
        wrapped = wrap(model)
        own = getattr(wrapped, "local_parameters", model.parameters)
        optimizer = torch.optim.SGD(own(), lr=0.1)
        finish = getattr(wrapped, "finish_gradient_synchronization", None)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(x), y)
            loss.backward()
            if finish is not None:
                finish()
            optimizer.step()
            return loss

        return step

    return begin


def beside(
    ways: Mapping[str, Begin | None],
    *,
    device: torch.device | str = "cpu",
    steps: int = 5,
    rounds: int = 7,
    ranks_per_node: int = 1,
) -> dict[str, Result]:
    """Trains one small network in every way, on all ranks; rank 0 prints a table.

    Args:
        ways: name -> `begin(model)`, which gets a copy of the network, a Sequential of equal
            layers, and returns `step(x, y)`: one step of training that returns this rank's loss.
            None for a way that is not handed out yet.
        device: of the network and the batches on the real clock.
        steps: number of steps whose losses are compared.
        rounds: number of rounds; in each, every way is timed once.
        ranks_per_node: of the emulated cluster, whose links within a node are ten times as fast as
            those between nodes.

    Raises:
        ValueError: `ways` has no way, or only None; or the ranks are no whole number of nodes.
    """
    begun = {name: begin for name, begin in ways.items() if begin is not None}
    if not begun:
        raise ValueError("beside: expected at least one way of training, got none")
    if dist.get_world_size() % ranks_per_node:
        raise ValueError(
            f"beside: expected ranks_per_node to divide {dist.get_world_size()} ranks, "
            f"got {ranks_per_node}"
        )
    x, y = (batches.to(device) for batches in _batches(dist.get_rank(), steps))
    running = {name: begin(_network().to(device)) for name, begin in begun.items()}
    losses: dict[str, list[float]] = {name: [] for name in running}
    calls = {}
    for name, step in running.items():
        for inputs, targets in zip(x, y, strict=True):
            with CollectiveLog() as log:
                loss = step(inputs, targets)
            losses[name].append(_mean(loss))
            calls[name] = log.records
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, step in running.items():
            dist.barrier()
            began = time.perf_counter()
            _mean(step(x[0], y[0]))  # the mean is there only after the whole step
            times[name].append(time.perf_counter() - began)
    results = {
        name: Result(
            losses=tuple(losses[name]),
            calls=len(calls[name]),
            megabytes=sum(call.ring_bytes for call in calls[name]) / 1e6,
            ms=statistics.median(times[name]) * 1e3,
            emulated_ms=_emulated_ms(begin, ranks_per_node),
        )
        for name, begin in begun.items()
    }
    if dist.get_rank() == 0:
        _show(results, [name for name in ways if name not in begun])
    return results


def _network() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return model


def _batches(rank: int, steps: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(steps, BATCH, WIDTH, generator=generator)
    return x, x.roll(1, dims=-1)


def _mean(loss: Tensor) -> float:
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _train_emulated(begin: Begin) -> None:
    layers = list(_network())
    step = begin(nn.Sequential(*(Charged(layer, i) for i, layer in enumerate(layers))))
    x, y = _batches(dist.get_rank(), 2)
    for inputs, targets in zip(x, y, strict=True):
        step(inputs, targets)


def _emulated_ms(begin: Begin, ranks_per_node: int) -> float:
    """The second step's time on the emulated cluster."""
    took = [0.0]
    if dist.get_rank() == 0:
        world_size = dist.get_world_size()
        cluster = Cluster(
            name=f"nodes of {ranks_per_node}",
            nodes=world_size // ranks_per_node,
            devices_per_node=ranks_per_node,
            intra_node=WITHIN_NODE,
            inter_node=NETWORK,
            peak_flops_per_s=1e12,
            memory_bandwidth_bytes_per_s=1e11,
        )
        plan = ChargePlan((FORWARD_S,) * LAYERS, (BACKWARD_S,) * LAYERS, b"beside")
        _, timeline = run_emulated(_train_emulated, world_size, cluster, begin, plan=plan)
        took = [(timeline.makespan_s - timeline.steps[1].start_s) * 1e3]
    dist.broadcast_object_list(took, src=0)
    return took[0]


def _show(results: Mapping[str, Result], missing: list[str]) -> None:
    first = next(iter(results.values()))
    head = ["", "first loss", "last loss", "largest gap", "calls", "MB sent", "ms here", "emulated"]
    rows = []
    for name, result in results.items():
        gap = max(abs(a - b) for a, b in zip(first.losses, result.losses, strict=True))
        rows.append(
            [
                *(name, f"{result.losses[0]:.5f}", f"{result.losses[-1]:.5f}", f"{gap:.0e}"),
                *(str(result.calls), f"{result.megabytes:.2f}", f"{result.ms:.1f}"),
                f"{result.emulated_ms:.2f} ms",
            ]
        )
    print(table(head, rows))
    compute = LAYERS * (FORWARD_S + BACKWARD_S) * 1e3
    print(
        f"(on the emulated cluster, forward and backward of a batch compute for {compute:.2f} ms)"
    )
    for name in missing:
        print(f"{name}: handed out when this lab is over; run this cell again then")
