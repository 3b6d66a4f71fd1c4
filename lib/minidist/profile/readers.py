"""The sources of a monitor: NVML, the program nvidia-smi, or the host. No torch.

A reader is a function that returns the current `Reading` of each device.

>>> parse_smi("0, 87, 1024, 81559, 412.50")
[Reading(device='gpu 0', utilization=0.87, memory_used_bytes=1073741824, ...)]
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_SMI_FIELDS = "index,utilization.gpu,memory.used,memory.total,power.draw"


class Reading(NamedTuple):
    """One device at one moment. A value is None if the device or driver does not report it."""

    device: str  # "gpu 0", "host"
    utilization: float | None  # 0 to 1
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None


Reader = Callable[[], Sequence[Reading]]


def choose_reader() -> Reader:
    """NVML if `nvidia-ml-py` and a driver are installed, else nvidia-smi, else the host."""
    for make in (nvml_reader, smi_reader):
        with contextlib.suppress(OSError, RuntimeError):
            reader = make()
            if reader():
                return reader
    return host_reader()


def nvml_reader() -> Reader:
    """Reads all GPUs through NVML.

    Raises:
        RuntimeError: no `nvidia-ml-py`, or no driver.
    """
    try:
        import pynvml  # type: ignore[import-not-found]  # not a dependency
    except ImportError as error:
        raise RuntimeError("NVML needs the package nvidia-ml-py") from error
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise RuntimeError(f"NVML does not work here: {error}") from error

    def ask(function: Any, handle: Any) -> Any:
        try:
            return function(handle)
        except nvml.NVMLError:  # this GPU, or this part of a GPU (MIG), does not report the value
            return None

    def read() -> list[Reading]:
        readings = []
        for index, handle in enumerate(handles):
            rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
            memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
            power_mw = ask(nvml.nvmlDeviceGetPowerUsage, handle)
            readings.append(
                Reading(
                    f"gpu {index}",
                    None if rates is None else rates.gpu / 100,
                    None if memory is None else int(memory.used),
                    None if memory is None else int(memory.total),
                    None if power_mw is None else power_mw / 1000,
                )
            )
        return readings

    return read


def smi_reader(timeout_s: float = 10.0) -> Reader:
    """Reads all GPUs by starting `nvidia-smi` for each reading, which takes tens of milliseconds.

    Raises:
        RuntimeError: no nvidia-smi on the PATH.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise RuntimeError("no nvidia-smi on the PATH")
    command = [program, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"]

    def read() -> list[Reading]:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=True
            )
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"nvidia-smi failed: {error}") from error
        return parse_smi(done.stdout)

    return read


def parse_smi(text: str) -> list[Reading]:
    """Readings from the output of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`.

    >>> parse_smi("0, 87, 1024, 81559, 412.50\\n1, 0, 3, 81559, [N/A]\\n")[1].power_w is None
    True
    """
    readings = []
    for line in text.strip().splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 5:
            raise RuntimeError(f"nvidia-smi: expected 5 fields ({_SMI_FIELDS}), got {line!r}")
        numbers: list[float | None] = []
        for field in fields[1:]:
            try:
                numbers.append(float(field))
            except ValueError:  # [N/A], [Not Supported]
                numbers.append(None)
        use, used, total, power_w = numbers
        readings.append(
            Reading(
                f"gpu {fields[0]}",
                None if use is None else use / 100,
                None if used is None else round(used * 2**20),
                None if total is None else round(total * 2**20),
                power_w,
            )
        )
    return readings


def host_reader() -> Reader:
    """Reads the host: busy share of all cores since the last reading, and memory in use.

    Uses psutil if it is installed, else /proc. The first reading has no utilisation.
    """
    last: list[tuple[float, float]] = []

    def read() -> list[Reading]:
        busy, whole = _cpu_times()
        utilization = None
        if last:
            before_busy, before_whole = last.pop()
            if whole > before_whole:
                utilization = min(1.0, max(0.0, (busy - before_busy) / (whole - before_whole)))
        last.append((busy, whole))
        used, total = _host_memory()
        return [Reading("host", utilization, used, total, None)]

    return read


def _cpu_times() -> tuple[float, float]:
    """Busy and total seconds of all cores since boot."""
    try:
        import psutil  # comes with ipykernel

        times = psutil.cpu_times()
        whole = math.fsum(times[: 8 if os.name == "posix" else None])  # user includes guest times
        return whole - times.idle - getattr(times, "iowait", 0.0), whole
    except ImportError:
        fields = [float(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return math.fsum(fields) - fields[3] - fields[4], math.fsum(fields)


def _host_memory() -> tuple[int, int]:
    """Used and total bytes; used is the memory that is not available without swapping."""
    try:
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.total - memory.available), int(memory.total)
    except ImportError:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return (kib["MemTotal"] - kib["MemAvailable"]) * 1024, kib["MemTotal"] * 1024
