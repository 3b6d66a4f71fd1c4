"""GPU utilisation, memory and power while a block runs; without a GPU, figures of the host.

Phases: choose the source (NVML through `nvidia-ml-py`, else the program `nvidia-smi`, else the
host); sample in a thread until the block or the deadline ends; summarise per device.

Example::

    with Monitor(interval_s=0.2) as monitor:
        train()
    print(monitor.summary())

>>> reader = lambda: [Reading("gpu 0", 0.5, 4 * 2**30, 8 * 2**30, 300.0)]
>>> with Monitor(interval_s=60, reader=reader) as monitor:
...     pass
>>> print(monitor.summary())
device   utilization  peak      memory  of      power  samples
gpu 0            50%   50%    4.00 GiB   50%    300 W        2

GPU utilisation is the share of time in which *some* kernel ran, on one of the GPU's multiprocessors
or on all of them. So 100 % does not mean that the GPU is used well; even a NCCL kernel that waits
for a different rank counts as 100 %. Model FLOPs utilisation (`minidist.cost.utilization`) and
power are better measures.

GPUs have NVML's numbers, in PCI bus order; CUDA_VISIBLE_DEVICES has no effect on them.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from minidist.profile.readers import Reader, Reading, choose_reader

_GIB = 1024**3


class Sample(NamedTuple):
    """A reading and its time, in seconds since the monitor started."""

    time_s: float
    reading: Reading


@dataclass(frozen=True, kw_only=True)
class DeviceSummary:
    """One device over the whole block. A field is None if the device does not report the value.

    Attributes:
        utilization, power_w: means over the samples.
        energy_j: mean power times the time between the first and the last sample.
        peak_utilization, peak_memory_bytes: the highest sample.
    """

    device: str
    num_samples: int
    utilization: float | None
    peak_utilization: float | None
    peak_memory_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None
    energy_j: float | None


class Summary(tuple[DeviceSummary, ...]):
    """The summaries of all devices; prints as a table."""

    def __str__(self) -> str:
        lines = ["device   utilization  peak      memory  of      power  samples"]
        for d in self:
            memory = (d.peak_memory_bytes or 0) / _GIB
            share = _percent(
                d.peak_memory_bytes / d.memory_total_bytes
                if d.peak_memory_bytes is not None and d.memory_total_bytes
                else None
            )
            power = "-" if d.power_w is None else f"{d.power_w:.0f} W"
            lines.append(
                f"{d.device:8} {_percent(d.utilization):>11} {_percent(d.peak_utilization):>5} "
                f"{memory:>7.2f} GiB {share:>5} {power:>8} {d.num_samples:>8}"
            )
        return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


class Monitor:
    """Samples in a background thread while the block runs, at least at its start and its end.

    Args:
        interval_s: pause between samples.
        reader: the function that reads the devices; None means `choose_reader()`.
        deadline_s: sampling stops after this time, so that a forgotten monitor in a notebook does
            not run for ever.

    Attributes:
        samples: rows, in order of time.
        error: the exception of the reader that stopped the sampling, or None; the block continues.
    """

    def __init__(
        self, interval_s: float = 0.5, *, reader: Reader | None = None, deadline_s: float = 3600.0
    ) -> None:
        if not interval_s > 0 or not deadline_s > 0:
            raise ValueError(
                f"Monitor: interval_s and deadline_s must be above 0, got {interval_s} and "
                f"{deadline_s}"
            )
        self.interval_s, self.deadline_s = interval_s, deadline_s
        self.samples: list[Sample] = []
        self.error: Exception | None = None
        self._reader = reader
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_s = 0.0

    def __enter__(self) -> Monitor:
        if self._thread is not None:
            raise RuntimeError("Monitor: already running; make another one")
        if self._reader is None:
            self._reader = choose_reader()
        self._start_s = time.monotonic()
        self._end.clear()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(self.interval_s + 15.0)  # a call of nvidia-smi times out after 10 s
            self._thread = None

    def summary(self) -> Summary:
        """Means and peaks per device over the samples so far."""
        by_device: dict[str, list[Sample]] = {}
        for sample in list(self.samples):
            by_device.setdefault(sample.reading.device, []).append(sample)
        return Summary(_summarize(device, own) for device, own in by_device.items())

    def _run(self) -> None:
        while self.error is None:
            ended = self._end.wait(self.interval_s)
            if time.monotonic() - self._start_s > self.deadline_s:
                return
            self._sample()
            if ended:
                return

    def _sample(self) -> None:
        assert self._reader is not None
        try:
            readings = self._reader()
        except Exception as error:  # a failing driver must not stop the training
            self.error = error
            return
        now_s = time.monotonic() - self._start_s
        self.samples += [Sample(now_s, reading) for reading in readings]


def _summarize(device: str, samples: list[Sample]) -> DeviceSummary:
    readings = [sample.reading for sample in samples]
    use = [r.utilization for r in readings if r.utilization is not None]
    used = [r.memory_used_bytes for r in readings if r.memory_used_bytes is not None]
    power = [r.power_w for r in readings if r.power_w is not None]
    mean_w = math.fsum(power) / len(power) if power else None
    return DeviceSummary(
        device=device,
        num_samples=len(samples),
        utilization=math.fsum(use) / len(use) if use else None,
        peak_utilization=max(use, default=None),
        peak_memory_bytes=max(used, default=None),
        memory_total_bytes=readings[-1].memory_total_bytes,
        power_w=mean_w,
        energy_j=None if mean_w is None else mean_w * (samples[-1].time_s - samples[0].time_s),
    )
