"""What labs share on the emulated cluster: equal links, charged layers, searches in payloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.criterion import Case, Draw, Finding, Values
from minidist.emulate.clusters import Cluster, Link
from minidist.emulate.plan import ChargePlan
from minidist.emulate.simulate import simulate
from minidist.emulate.trace import Event

MAX_PLACES = 2000  # positions tried per search: a payload may be made to waste our time
Last = TypeVar("Last")


def even_cluster(world_size: int, bandwidth_bytes_per_s: float, latency_s: float) -> Cluster:
    """One node of `world_size` devices whose links are all equal."""
    link = Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)
    return Cluster(
        name="grading",
        nodes=1,
        devices_per_node=world_size,
        intra_node=link,
        inter_node=link,
        peak_flops_per_s=1e12,
        memory_bandwidth_bytes_per_s=1e11,
    )


def charge_plan(
    draw: Draw, forward_s: Sequence[float] = (), backward_s: Sequence[float] = ()
) -> ChargePlan:
    """What each layer costs in seconds, and the secret behind the factors; default: no layers."""
    secret = draw.seed("charges").to_bytes(16, "big")
    return ChargePlan(tuple(forward_s), tuple(backward_s), secret)


def mark_steps(draw: Draw) -> ChargePlan:
    """One layer that costs almost nothing: its charges mark where a step begins and ends."""
    return charge_plan(draw, (1e-6,), (1e-6,))


def charge(layers: Iterable[nn.Module], channel: Any) -> nn.Sequential:
    """The layers, each wrapped so that it requests its factors from `channel`.

    Args:
        channel: the connection to the broker in a rank; a `PlanChannel` in the referee.
    """
    from minidist.emulate.device import Charged

    return nn.Sequential(*(Charged(layer, i, channel) for i, layer in enumerate(layers)))


def charged_mlp(inputs: Values, channel: Any, dtype: torch.dtype) -> nn.Sequential:
    """`oracle.mlp` with charged layers: each is a Linear and the activation after it, if any."""
    plain = list(oracle.mlp(inputs, dtype))
    return charge((nn.Sequential(*plain[i : i + 2]) for i in range(0, len(plain), 2)), channel)


def is_compute(event: Event, direction: str, step: int) -> bool:
    """Whether a layer was computed in this direction ("forward", "backward") in this step."""
    return event.kind == "compute" and event.direction == direction and event.step == step


def local_gradients(
    model: nn.Module, inputs: Values, steps: Iterable[int]
) -> list[list[np.ndarray]]:
    """For each step a rank's own gradients, from the batches x/0, y/0, x/1, …

    Args:
        model: in float64, with the rank's secret factors: charged over a `PlanChannel`.
    """
    found = []
    for step in steps:
        x, y = (torch.from_numpy(inputs[f"{k}/{step}"]).double() for k in "xy")
        model.zero_grad()
        oracle.mse(model(x), y).backward()
        found.append([oracle.grad_of(p) for p in model.parameters()])
    return found


def seconds_each(case: Case, cluster: Cluster, begin: int, count: int) -> float:
    """Mean virtual seconds of the last `count` steps.

    The first of them begins when any rank first goes forward in step `begin`.
    """
    timeline = simulate(case.trace, cluster)
    begin_s = min(
        timeline.event_times[rank][i][0]
        for rank, events in enumerate(case.trace.events)
        for i, e in enumerate(events)
        if is_compute(e, "forward", begin)
    )
    return (timeline.makespan_s - begin_s) / count


def holds_run(payload: Any, values: np.ndarray, scales: Iterable[float]) -> bool:
    """Whether `values`, times one of `scales`, is a contiguous run of `payload`.

    The tolerance is 0.1 % of the largest value.
    """
    sent, wanted = np.asarray(payload, dtype=np.float64).ravel(), values.ravel()
    anchor = int(np.abs(wanted).argmax())
    for scale in scales:
        value = wanted * scale
        tolerance = 1e-3 * abs(value[anchor])
        near = np.flatnonzero(np.abs(sent - value[anchor]) <= tolerance)[:MAX_PLACES] - anchor
        for place in near:
            run = sent[place : place + len(value)] if place >= 0 else sent[:0]
            if len(run) == len(value) and (np.abs(run - value) <= tolerance).all():
                return True
    return False


def sends_of(case: Case, rank: int) -> list[Event]:
    """The events in which a rank began to send a message."""
    return [e for e in case.trace.events[rank] if e.kind == "issue" and e.collective == "send"]


def of_every_rank(
    case: Case, read: Callable[[Case, int], Last | Finding]
) -> list[Last] | list[Finding]:
    """`read(case, rank)` of each rank; only the findings if a result is one or has a `finding`."""
    found = [read(case, rank) for rank in range(case.world_size)]
    findings = [it if isinstance(it, Finding) else getattr(it, "finding", None) for it in found]
    return [it for it in findings if it] or [it for it in found if not isinstance(it, Finding)]
