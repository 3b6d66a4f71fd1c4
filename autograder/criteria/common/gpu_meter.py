"""Measures seconds and bytes on a GPU, for criteria with extra points, inside the judged rank.

Times are judged as ratios. The two sides of a ratio take turns in the same rounds, and all ranks
run the same side at the same time, so ranks that share a GPU slow down both sides equally.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from autograder.criteria.criterion import Draw, HardwareMissingError, Values

Run = Callable[[], object]


def draw_seeds(source: Draw) -> list[Values]:
    """A seed for the network that all ranks share, and one for each rank's data."""
    network = int(source.shared().integers(1 << 31))
    return [
        {"network": network, "data": int(source.private(rank).integers(1 << 31))}
        for rank in range(source.world_size)
    ]


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Free bytes on the GPU after all ranks have emptied their caches; the minimum over all ranks.

    Ranks that share a GPU also share these bytes.
    """
    import torch.distributed as dist

    gc.collect()
    torch.cuda.empty_cache()
    dist.barrier()
    free = torch.tensor(torch.cuda.mem_get_info(device)[0], device=device)
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    return int(free.item())


def warm_up(device: torch.device) -> None:
    """Makes the matrix product libraries allocate their memory, for forward and backward."""
    layer = torch.nn.Linear(64, 64, device=device)
    layer(torch.ones(64, 64, device=device)).sum().backward()
    synchronize(device)


def peak_bytes(run: Run, device: torch.device, base: int | None = None) -> int:
    """The peak number of bytes that torch held while `run` ran, minus `base`.

    Args:
        base: `torch.cuda.memory_allocated` of an earlier moment; None means the current value.
    """
    synchronize(device)
    base = torch.cuda.memory_allocated(device) if base is None else base
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - base


def paired_seconds(
    runs: Mapping[str, Run], device: torch.device, *, rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each run in each round; the order of the runs is reversed every second round."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-warmup, rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            synchronize(device)
            dist.barrier()
            begin = time.perf_counter()
            runs[name]()
            synchronize(device)
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def half_dtype(device: torch.device) -> torch.dtype:
    """The 16-bit dtype that is fast on the matrix units of this GPU.

    Raises:
        HardwareMissingError: the GPU has no such units (before Volta, compute capability 7.0).
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < (7, 0):
        raise HardwareMissingError(
            f"It needs a GPU with 16-bit matrix units (compute capability 7.0); this one, "
            f"{torch.cuda.get_device_name(device)}, has {capability[0]}.{capability[1]}."
        )
    return torch.bfloat16 if capability >= (8, 0) else torch.float16


@contextmanager
def without_tf32() -> Iterator[None]:
    """Inside, float32 matrix products use full float32; the old setting is restored at the end."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def positive(values: Any, count: int) -> np.ndarray | None:
    """`values` as float64 if they are `count` finite numbers above zero."""
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        return None
    found = values.astype(np.float64)
    if found.shape != (count,) or not np.isfinite(found).all() or (found <= 0).any():
        return None
    return found


def median_ratio(over: np.ndarray, under: np.ndarray) -> float:
    """Median over rounds of over / under."""
    return statistics.median((over / under).tolist())
