"""Streams of the emulated device, under the names of torch.cpu.

On a GPU, code that overlaps copies, collectives and compute puts them on streams and orders them by
events; `fully_shard` is written like that. On a CPU torch's streams do nothing. Inside
`emulated_streams` they are recorded, so that such code overlaps in virtual time as it would on a
GPU: a collective is issued on the current stream, `wait` makes the current stream wait, and
`stream.wait_event(event)` orders one stream after another. See
[Note: how virtual time is replayed].
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from minidist.emulate.client import Client


class EmulatedStream:
    """A queue of work of the emulated device. Stream number 0 does the compute."""

    def __init__(self, device: _Device, number: int) -> None:
        self._device = device
        self.number = number

    def record_event(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        event = event or EmulatedEvent(self._device)
        event.record(self)
        return event

    def wait_event(self, event: EmulatedEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: EmulatedStream) -> None:
        if stream is not self:
            self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Does nothing: the host of the emulated cluster costs no time."""

    def query(self) -> bool:
        return True


class EmulatedEvent:
    """A mark on a stream that another stream can wait for."""

    def __init__(self, device: _Device) -> None:
        self._device = device
        self._mark: int | None = None

    def record(self, stream: EmulatedStream | None = None) -> None:
        self._mark = self._device.mark(stream or self._device.current)

    def wait(self, stream: EmulatedStream | None = None) -> None:
        if self._mark is not None:  # an event never recorded blocks nothing, as in CUDA
            self._device.wait_for(self._mark, stream or self._device.current)

    def synchronize(self) -> None:
        """Does nothing: see `EmulatedStream.synchronize`."""

    def query(self) -> bool:
        return True


class _Device:
    """The streams of one rank in one session."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._numbers = itertools.count(1)
        self._marks = itertools.count()
        self.current = EmulatedStream(self, 0)

    def new_stream(self, *_: Any, **__: Any) -> EmulatedStream:
        return EmulatedStream(self, next(self._numbers))

    def new_event(self, *_: Any, **__: Any) -> EmulatedEvent:
        return EmulatedEvent(self)

    def current_stream(self, device: Any = None) -> EmulatedStream:
        return self.current

    @contextlib.contextmanager
    def use(self, stream: EmulatedStream | None) -> Iterator[None]:
        before = self.current
        self._switch_to(stream or before)
        try:
            yield
        finally:
            self._switch_to(before)

    def _switch_to(self, stream: EmulatedStream) -> None:
        self.current, self._client.stream = stream, stream.number

    def mark(self, stream: EmulatedStream) -> int:
        mark = next(self._marks)
        self._client.post({"t": "record", "e": mark, "st": stream.number})
        return mark

    def wait_for(self, mark: int, stream: EmulatedStream) -> None:
        self._client.post({"t": "after", "e": mark, "st": stream.number})


@contextlib.contextmanager
def emulated_streams(client: Client) -> Iterator[None]:
    """Replace torch.cpu's streams and events by those of the emulated device, inside the block."""
    device = _Device(client)
    ours = {
        "Stream": device.new_stream,
        "Event": device.new_event,
        "current_stream": device.current_stream,
        "stream": device.use,
    }
    before = {name: getattr(torch.cpu, name) for name in ours}
    try:
        for name, value in ours.items():
            setattr(torch.cpu, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(torch.cpu, name, value)
        client.stream = 0
