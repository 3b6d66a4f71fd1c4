"""Which GPUs the submissions have that run at once: as far as they go, each has its own.

The ranks of a submission take a GPU each where there is one for every rank, and the CPU otherwise
(`minidist.device`). What is measured on a GPU is worth nothing while another submission uses it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
# In a worker, which sees only its submissions' own: how many the grader has.
ALL = "AUTOGRADER_NUM_GPUS"


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, in the words of CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return named[:count] or [str(index) for index in range(count)]


def num_gpus() -> int:
    """How many GPUs the grader has, which a worker of its has only some of."""
    return int(os.environ.get(ALL) or torch.cuda.device_count())


def most_jobs(count: int, world_size: int) -> int:
    """How many submissions can have what they need of `count` GPUs at once; 1 at least."""
    return max(1, count // world_size if count >= world_size else count)


def divide(gpus: Sequence[str], jobs: int) -> list[dict[str, str]]:
    """Variables for the environment of each of `jobs` workers; empty where there is no GPU.

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
