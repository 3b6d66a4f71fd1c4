"""Where a rank seems to run, for code that reads torchrun's environment.

In grading all ranks are on one machine, so LOCAL_RANK equals RANK and LOCAL_WORLD_SIZE equals
WORLD_SIZE. These helpers let a rank believe that it is one of several nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from autograder.criteria.common.pretending import having, namespace, pretending
from autograder.criteria.criterion import Context


def environment(rank: int, world_size: int, per_node: int) -> dict[str, str]:
    """What torchrun tells a rank about its place, on nodes of `per_node` ranks; the last may have
    fewer."""
    node = rank // per_node
    first = node * per_node
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank - first),
        "LOCAL_WORLD_SIZE": str(min(per_node, world_size - first)),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(-(-world_size // per_node)),
    }


def two_nodes(rank: int, world_size: int) -> dict[str, str]:
    """What torchrun tells a rank about its place, if the last rank is alone on a second node."""
    return environment(rank, world_size, max(1, world_size - 1))


def meeting_place(init_method: Any = None) -> str:
    """Where ranks would meet in `init_process_group`; None: where the environment says."""
    if init_method is not None and not str(init_method).startswith("env://"):
        return str(init_method)
    return f"tcp://{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


@contextmanager
def on_two_nodes(context: Context, written: Any) -> Iterator[None]:
    """Inside, the last rank is alone on a second node, as far as the environment tells.

    Every check runs like this, so that code that takes LOCAL_RANK for RANK, or LOCAL_WORLD_SIZE for
    WORLD_SIZE, fails. Not on GPUs, where LOCAL_RANK says which one is free.

    Args:
        written: a function or class of the notebook.
    """
    if context.device.type != "cpu":
        yield
        return
    with mock.patch.dict(os.environ, two_nodes(context.rank, context.world_size)), on_cpu(written):
        yield


LAST_ALONE = "(The last rank is alone on a second node here: its LOCAL_RANK is 0.)"


@contextmanager
def on_cpu(written: Any) -> Iterator[None]:
    """Inside, the notebook runs on the CPU: torch finds no GPU, and a device that the notebook has
    in a variable (DEVICE, say) is the CPU.

    For ranks whose world is emulated, or whose environment tells of fewer ranks than there are: the
    machine may have enough GPUs for a node of that environment, but fewer than real ranks.

    Args:
        written: a function or class of the notebook, which may import torch's functions by name.
    """
    names = namespace(written)
    gpus = [n for n, v in names.items() if isinstance(v, torch.device) and v.type == "cuda"]
    instead = {(torch.cuda, "is_available"): lambda: False, (torch.cuda, "device_count"): lambda: 0}
    with pretending(written, instead), having(names, dict.fromkeys(gpus, torch.device("cpu"))):
        yield


@contextmanager
def alone(context: Context) -> Iterator[None]:
    """Inside, each rank is the only one of its process group. Every rank has to enter."""
    groups = [dist.new_group([rank]) for rank in range(context.world_size)]
    world = dist.distributed_c10d._world
    everybody = world.default_pg
    places = environment(0, 1, 1)
    if context.device.type != "cpu":
        del places["LOCAL_RANK"]  # it says which GPU is free
    world.default_pg = groups[context.rank]
    try:
        with mock.patch.dict(os.environ, places):
            yield
    finally:
        world.default_pg = everybody


@contextmanager
def hashing_as(process: int, written: Any) -> Iterator[None]:
    """Inside, the notebook's `hash` of text differs between processes.

    Ranks that torchrun starts hash text in different ways. In grading, ranks are forks of one
    process, and would hash alike.

    Args:
        process: number of the process; written: a function or class of the notebook.
    """

    def has_text(value: object) -> bool:
        if isinstance(value, tuple | frozenset):
            return any(has_text(item) for item in value)
        return isinstance(value, str | bytes)

    def own(value: object) -> int:
        return hash((process, hash(value))) if has_text(value) else hash(value)

    with having(namespace(written), {"hash": own}):
        yield


@contextmanager
def ordering_sets_as(process: int, written: Any) -> Iterator[None]:
    """Inside, the order of the notebook's `set(...)` of texts differs between processes.

    As in `hashing_as`: ranks that torchrun starts order sets of text in different ways.

    Args:
        process: number of the process; written: a function of the notebook.
    """

    class OwnOrder(set):
        def __iter__(self) -> Iterator[Any]:
            return iter(sorted(super().__iter__(), key=lambda value: hash((process, value))))

        def union(self, *others: Any) -> OwnOrder:
            return OwnOrder(super().union(*others))

        def __or__(self, other: Any) -> OwnOrder:
            return OwnOrder(super().__or__(other))

        def __reduce__(self) -> Any:
            return set, (list(self),)  # other ranks get a plain set

    with having(namespace(written), {"set": OwnOrder}):
        yield
