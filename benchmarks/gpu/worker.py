"""What a part's process runs: `python -m gpu.worker PART ROWS_FILE SECONDS [--rehearse]`.

`python -m gpu.worker describe` prints what this machine is, as one line of JSON.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MIN_TORCH = (2, 11)
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    _end_with_parent()
    rehearse = "--rehearse" in arguments
    name, *rest = [each for each in arguments if each != "--rehearse"]
    if name == "describe":
        print(json.dumps(describe(rehearse)))
        return
    from gpu.recorder import Recorder
    from gpu.sizes import FULL, TINY

    path, seconds = Path(rest[0]), float(rest[1])
    with Recorder(name, path, deadline_s=time.monotonic() + seconds) as recorder:
        module = importlib.import_module(f"gpu.{name}")
        module.measure(recorder, TINY if rehearse else FULL)


def describe(rehearse: bool = False) -> dict[str, Any]:
    """Devices and versions. With `rehearse`, GPUs are left out, as they will not be used.

    Raises:
        RuntimeError: torch is too old.
    """
    import torch

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < MIN_TORCH:
        wanted = ".".join(map(str, MIN_TORCH))
        raise RuntimeError(f"torch {torch.__version__} is too old: expected {wanted} or later")
    # The whole check, not NVML's: a device that NVML lists may be one that CUDA cannot use.
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    count = torch.cuda.device_count() if torch.cuda.is_available() and not rehearse else 0
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    return {
        "num_devices": count,
        "devices": [each.name for each in properties],
        "memory_bytes": [each.total_memory for each in properties],
        "compute_capability": [f"{each.major}.{each.minor}" for each in properties],
        "driver": driver_version() if count else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if count else None,
        "nccl": _nccl_version() if count else None,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_cores": _cpu_cores(),
        "why_none": None if count else _why_none(torch, rehearse),
    }


def driver_version() -> str | None:
    """Of the NVIDIA driver, such as "580.82"; None where nothing says."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        import pynvml  # type: ignore[import-not-found]  # not a dependency

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    except Exception:  # not installed, or no driver: it has errors of its own
        return None


def _nccl_version() -> str | None:
    import torch.cuda.nccl
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _cpu_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _why_none(torch: Any, rehearse: bool) -> str:
    if rehearse:
        return "a rehearsal on the CPU"
    if torch.version.cuda is None:
        return "a build without CUDA"
    return f"built for CUDA {torch.version.cuda}, which finds no driver or no device"


def _end_with_parent() -> None:
    """Whatever kills the runner must not leave a part behind that holds the GPU."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):  # not Linux
        return


if __name__ == "__main__":
    main(sys.argv[1:])
