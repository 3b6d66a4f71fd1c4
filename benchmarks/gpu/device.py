"""Devices, memory and ranks, asked for in the order that CUDA wants."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gpu.recorder import NotHereError, free_memory
from minidist import cost

TIMEOUT_S = 60.0  # of every collective: a hang ends before the part does

# Products of fp32 matrices: "highest" computes in fp32, "high" lets tensor cores round to TF32.
DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "fp32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
    "fp16": (torch.float16, "highest"),
    "bf16": (torch.bfloat16, "highest"),
}


def use_device(kind: str) -> torch.device:
    """The first device of this process, made current.

    Raises:
        NotHereError: "cuda" without a CUDA device.
    """
    if kind != "cuda":
        return torch.device(kind)
    if not torch.cuda.is_available():
        raise NotHereError("needs a CUDA device")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def require_cuda(device: torch.device) -> None:
    """
    Raises:
        NotHereError: it is no CUDA device.
    """
    if device.type != "cuda":
        raise NotHereError("needs a CUDA device")


def num_gpus() -> int:
    """CUDA devices; does not start CUDA in this process where NVML can tell."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """`torch.set_float32_matmul_precision` for the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(fn: Callable[[], Any], device: torch.device) -> int:
    """Most bytes that tensors had on the device at once while `fn` ran, those from before included.

    It is what the allocator handed out, not what it keeps (`memory_reserved`) nor the context.

    Raises:
        NotHereError: not a CUDA device; the CPU's allocator does not count.
    """
    require_cuda(device)
    synchronize(device)
    free_memory()
    torch.cuda.reset_peak_memory_stats(device)
    fn()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def known_gpu(device: torch.device) -> cost.GPU | None:
    """The cost model's figures for this device, by its name; None if it has none."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return cost.find_gpu(properties.name, properties.total_memory)


def count_ranks(n: int) -> str:
    """
    >>> count_ranks(1), count_ranks(2)
    ('1 rank', '2 ranks')
    """
    return f"{n} rank{'' if n == 1 else 's'}"


# --- ranks ----------------------------------------------------------------------------------------


def choose_world(kind: str, *, at_least: int = 1) -> tuple[str, int]:
    """Backend and number of ranks: NCCL with a rank per GPU, or ranks over gloo that share.

    NCCL refuses two ranks on one GPU. On a CPU: gloo.

    Args:
        at_least: ranks that are wanted; more GPUs than that all take part.
    """
    count = num_gpus() if kind == "cuda" else 0
    return ("nccl", count) if count >= at_least and count else ("gloo", at_least)


def start_rank(backend: str, kind: str) -> torch.device:
    """What every rank does first: its device, then the default group. Returns the device.

    Ranks beyond the number of GPUs share them, one after the other.
    """
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        # Before the group: NCCL takes the current device. And a DeviceMesh would choose another
        # one, by the local rank, where CUDA has not been started.
        torch.cuda.set_device(device)
        torch.cuda.init()
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    return device
