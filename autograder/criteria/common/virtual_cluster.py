"""A pretended cluster of nodes with GPUs, which notes what code calls on each of its places.

Grading has one node, and fewer GPUs than ranks or none. So a student's function or script runs
where torch says that there are GPUs, and the environment says that there are several nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from autograder.criteria.common.launched import ON_CPU, complete_environment, write_to
from autograder.criteria.common.places import environment, meeting_place
from autograder.criteria.common.pretending import pretending
from autograder.criteria.common.script_worker import ScriptError, work
from autograder.criteria.criterion import Finding, Values
from minidist.errors import LaunchError
from minidist.launch import run

PER_NODE, NODES = 3, 2
MEET = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "23456"}  # where its ranks meet
SCRIPT_GPUS = (PER_NODE - 1, PER_NODE)  # per node, in two runs of a script that end when it joins
JOINING_DEADLINE_S = 60.0  # for both runs together


class Place:
    """One place of the virtual cluster: the environment and GPUs, and what was called there."""

    def __init__(
        self, rank: int, gpus: int, world_size: int = NODES * PER_NODE, per_node: int = PER_NODE
    ) -> None:
        self.environment = environment(rank, world_size, per_node) | MEET
        self.gpus, self.joined, self.current = gpus, 0, -1
        self.backend, self.rank, self.world_size, self.meets = "", rank, world_size, ""
        self.told: Values = {
            "given rank": rank,
            "gpus": gpus,
            "world": world_size,
            "per node": per_node,
        }

    def init_process_group(
        self,
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Notes the arguments; what is not given comes from the environment."""
        self.joined += 1
        if store is None:
            self.meets = meeting_place(init_method)
        self.backend = str(backend or "cpu:gloo,cuda:nccl")  # torch's default
        self.rank = rank if rank >= 0 else self.rank
        self.world_size = world_size if world_size >= 0 else self.world_size

    def set_device(self, device: Any) -> None:
        """Notes the index; `device` may be an int, a text or a torch.device."""
        index = device if isinstance(device, int) else torch.device(device).index
        self.current = -1 if index is None else index

    def leave(self, *_: Any, **__: Any) -> None:
        """Leaves the process group; raises what torch raises where there is none."""
        if not self.joined:
            raise AssertionError("Process group cannot be None")
        self.joined = 0

    def instead(self) -> dict[tuple[Any, str], Any]:
        """What stands for torch's functions here."""
        return {
            (dist, "init_process_group"): self.init_process_group,
            (dist, "destroy_process_group"): self.leave,
            (dist, "is_initialized"): lambda: self.joined > 0,
            (dist, "is_nccl_available"): lambda: True,
            (dist, "get_rank"): lambda *_: self.rank,
            (dist, "get_world_size"): lambda *_: self.world_size,
            (dist, "get_backend"): lambda *_: self.backend,
            (dist, "barrier"): lambda *_, **__: None,
            (torch.cuda, "is_available"): lambda: self.gpus > 0,
            (torch.cuda, "device_count"): lambda: self.gpus,
            (torch.cuda, "set_device"): self.set_device,
            (torch.cuda, "current_device"): lambda: max(0, self.current),
            (torch.accelerator, "is_available"): lambda: self.gpus > 0,
            (torch.accelerator, "device_count"): lambda: self.gpus,
            (torch.accelerator, "set_device_index"): self.set_device,
            (torch.accelerator, "current_accelerator"): lambda *_, **__: (
                torch.device("cuda") if self.gpus else None
            ),
        }


# --- a script, until it joins --------------------------------------------------------------------


class _HasJoinedError(BaseException):
    """Ends a script that has joined; no `except Exception` of its own may catch it."""


class _Door(Place):
    """A place at which a script ends as soon as it joins."""

    def init_process_group(self, *args: Any, **options: Any) -> None:
        if not self.backend:  # a script with a bare `except:` may join again: the first one counts
            super().init_process_group(*args, **options)
            if (device := options.get("device_id")) is not None:
                self.set_device(device)
        raise _HasJoinedError


def find_joins(script: Path, arguments: list[str], folder: Path) -> list[Values]:
    """For each number of GPUs, the backend that the script names and the GPU that it has chosen.

    The backend is "" if the script does not come that far, the GPU is -1 if it chooses one later.

    Without a real GPU the script cannot go on after it has joined. The list is empty if the script
    waits for the other ranks before it joins, or if the machine is too busy.
    """
    given = (_join, 1, str(script.resolve()), arguments, str(folder))
    try:
        return run(*given, deadline_s=JOINING_DEADLINE_S, env=ON_CPU)[0]
    except LaunchError:  # no fault: a script may need a real GPU, or other ranks, before it joins
        return []


def _join(script: str, arguments: list[str], folder: str) -> list[Values]:
    """The first rank of the second node starts the script, once for each number of GPUs."""
    write_to(Path(os.devnull))
    os.chdir(folder)
    joins: list[Values] = []
    for gpus in SCRIPT_GPUS:
        door = _Door(PER_NODE, gpus)
        # A store of the script's own would wait for the rank that serves it.
        instead = door.instead() | {(dist, "TCPStore"): lambda *_, **__: dist.HashStore()}
        with (
            mock.patch.dict(os.environ, door.environment),
            pretending(work, instead),
            suppress(ScriptError),
        ):
            complete_environment()
            work(script, arguments)
        joins.append({"backend": door.backend, "gpu": door.current})
    return joins


def judge_joins(joins: Any) -> Iterator[Finding]:
    """nccl and the GPU of the local rank where every rank of the node has one, else gloo."""
    for gpus, join in zip(SCRIPT_GPUS, joins if isinstance(joins, list) else [], strict=False):
        expected, local = ("nccl" if gpus >= PER_NODE else "gloo"), 0  # it is node 1's first rank
        where = f"on the second of two nodes of {PER_NODE} ranks and {gpus} GPUs each"
        backend, gpu = (join.get("backend"), join.get("gpu")) if isinstance(join, dict) else ("", 0)
        if backend and expected not in str(backend):
            yield Finding(
                f"{where}, expected backend {expected}, got {backend}: nccl if every rank of the "
                "machine can have a GPU of its own, else gloo."
            )
        elif expected == "nccl" and gpu not in (-1, local):
            yield Finding(
                f"{where}, rank {PER_NODE}, which is local rank {local} there, took cuda:{gpu}: "
                "each node counts its own GPUs, so LOCAL_RANK chooses one."
            )
