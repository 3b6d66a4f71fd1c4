"""How many ranks the kernel "torchrun (auto)" starts on a node.

The first of these that gives a number above 0: MINIDIST_RANKS; torchrun's own PET_NPROC_PER_NODE;
the GPUs of CUDA_VISIBLE_DEVICES, of the Slurm job, of the machine; the tasks of the Slurm job; 2.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping

DEFAULT_RANKS = 2


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """A variable that must be a number >= 1; Slurm's `4(x2)` (4 on each of 2 nodes) is 4."""
    text = environment.get(name, "").strip()
    if not text:
        return None
    match = re.fullmatch(r"([1-9]\d{0,3})(\(x\d+\))?", text)
    if match is None:
        raise ValueError(f"--ranks auto: expected a number of ranks in {name}, got {text!r}")
    return int(match[1])


def _num_gpus(environment: Mapping[str, str]) -> int:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # as in CUDA, entries after an invalid one do not count
        names = [name.strip() for name in visible.split(",")]
        return next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    on_node = environment.get("SLURM_GPUS_ON_NODE", "").strip()
    if on_node.isdecimal():
        return int(on_node)
    return len(glob.glob("/dev/nvidia[0-9]*"))


def count_ranks(environment: Mapping[str, str]) -> int:
    """The number of ranks for `environment`, on this node.

    Raises:
        ValueError: a variable is malformed.

    >>> count_ranks({"CUDA_VISIBLE_DEVICES": "0,2,5"})
    3
    >>> count_ranks({"CUDA_VISIBLE_DEVICES": "", "SLURM_TASKS_PER_NODE": "4"})
    4
    """
    return (
        _number(environment, "MINIDIST_RANKS")
        or _number(environment, "PET_NPROC_PER_NODE")
        or _num_gpus(environment)
        or _number(environment, "SLURM_TASKS_PER_NODE")
        or DEFAULT_RANKS
    )
