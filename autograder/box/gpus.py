"""Divides the GPUs among the submissions that run at once; each gets its own if there are enough.

The ranks of a submission use one GPU each if there is one for every rank, and the CPU otherwise
(`minidist.device`). A measurement on a GPU is worthless while a second submission uses that GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Set in a worker, which sees only its own GPUs: the number of GPUs that the grader has.
ALL = "AUTOGRADER_NUM_GPUS"
# Device files of GPU drivers: NVIDIA's (servers and Jetson), AMD's, and WSL's.
_DRIVERS = ("nvidia*", "nvhost*", "nvgpu*", "kfd", "dxg")


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, named as in CUDA_VISIBLE_DEVICES."""
    count = _count()
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return named[:count] or [str(index) for index in range(count)]


def num_gpus() -> int:
    """How many GPUs the grader has; a worker of the grader sees only some of them."""
    return int(os.environ.get(ALL) or _count())


def _count() -> int:
    """How many GPUs torch sees; without a driver 0, and the slow import of torch is saved."""
    if not any(any(Path("/dev").glob(name)) for name in _DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def most_jobs(count: int, world_size: int) -> int:
    """How many submissions can run at once with the GPUs they need, out of `count`; at least 1."""
    return max(1, count // world_size if count >= world_size else count)


def divide(gpus: Sequence[str], jobs: int) -> list[dict[str, str]]:
    """Environment variables for each of `jobs` workers; empty if there is no GPU.

    With fewer GPUs than jobs, several jobs share one.
    """
    if not gpus:
        return [{} for _ in range(jobs)]
    each, more = divmod(len(gpus), jobs)
    shares = []
    for job in range(jobs):
        begin = job * each + min(job, more)
        own = gpus[begin : begin + each + (job < more)] or [gpus[job % len(gpus)]]
        shares.append({VISIBLE: ",".join(own), ALL: str(len(gpus))})
    return shares
