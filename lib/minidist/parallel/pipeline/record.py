"""The state of an executor's step while it runs, and the timeline recorded from it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.parallel.pipeline.schedule import Action, Schedule
from minidist.parallel.pipeline.simulate import Span, Timeline


class Clock:
    """Records nothing. This is the default, because it costs nothing."""

    @contextlib.contextmanager
    def span(self, action: Action) -> Iterator[None]:
        yield

    def spans(self) -> tuple[Span, ...]:
        return ()


class HostClock(Clock):
    """Times of the host. Correct if computation is over when its call returns (CPU)."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextlib.contextmanager
    def span(self, action: Action) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self._spans.append(Span(action, start_s, time.perf_counter()))

    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)


class CudaClock(Clock):
    """Times of the device, from events between its kernels, converted to the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._origin_s, self._origin = time.perf_counter(), self._event()
        self._events: list[tuple[Action, Any, Any]] = []

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def span(self, action: Action) -> Iterator[None]:
        start = self._event()
        yield
        self._events.append((action, start, self._event()))

    def spans(self) -> tuple[Span, ...]:
        torch.cuda.synchronize(self._device)

        def at_s(event: Any) -> float:
            return self._origin_s + self._origin.elapsed_time(event) / 1e3

        return tuple(Span(action, at_s(start), at_s(end)) for action, start, end in self._events)


def make_clock(device: torch.device, record: bool) -> Clock:
    """The clock that fits the device."""
    if not record:
        return Clock()
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class StepResult:
    """The result of a step on this rank, besides the gradients.

    Args:
        loss: mean over the batch's targets, a detached scalar; None except on the last rank.
        output: output of the last stage for the whole batch, if requested, on its rank; else None.
        peak_activations: most activations that the rank kept at once. The unit is one micro-batch
            through all layers of the rank.
        spans: when each action ran, in seconds of this machine's clock; empty unless recording.
    """

    loss: Tensor | None
    output: Tensor | None
    peak_activations: float
    spans: tuple[Span, ...]


@dataclass
class Run:
    """State of one step on one rank."""

    inputs: list[Tensor] = field(default_factory=list)  # per micro-batch, on the first rank
    targets: list[Tensor] = field(default_factory=list)  # per micro-batch, on the last rank
    weights: list[float] = field(default_factory=list)  # its share of the batch's targets
    keep_output: bool = False
    clock: Clock = field(default_factory=Clock)
    inbox: dict[Action, Tensor] = field(default_factory=dict)  # by the action that needs it
    outbox: dict[Action, Tensor] = field(default_factory=dict)  # by the action that made it
    live: dict[tuple[int, int], Any] = field(default_factory=dict)  # (micro-batch, chunk)
    peak: int = 0  # most entries of `live` at once
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)

    def keep(self, action: Action, what: Any) -> None:
        """Keep the activations of a forward, until its backward takes them with `live.pop`."""
        self.live[action.micro_batch, action.chunk] = what
        self.peak = max(self.peak, len(self.live))


def gather_timeline(
    schedule: Schedule, spans: tuple[Span, ...], group: dist.ProcessGroup | None = None
) -> Timeline:
    """The timeline of all ranks, on every rank, in the simulator's form. Collective.

    Time 0 is the first start. Ranks of one machine share a clock; across machines, the rows are
    aligned only as well as the machines' clocks.

    Args:
        spans: this rank's spans of a recorded step.
    """
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, spans, group=group)
    origin_s = min((span.start_s for row in rows for span in row), default=0.0)
    return Timeline(
        schedule,
        tuple(
            tuple(Span(s.action, s.start_s - origin_s, s.end_s - origin_s) for s in row)
            for row in rows
        ),
    )
