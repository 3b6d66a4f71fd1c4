"""The torch.distributed backend "emulated": collectives that travel through the broker.

A collective's data is sent when the collective is called, and fetched when the rank waits for it.
Writing to a sent tensor before `wait()` raises an error: on a real network it would be a race.
The order of messages on the rank's one connection is the order of events in virtual time, see
[Note: how virtual time is replayed]. Importing this module registers the backend; `emulated_world`
makes it the default process group for a block.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from minidist.emulate.client import Client, CollectiveError, CollectiveMismatch
from minidist.emulate.group import EmulatedGroup
from minidist.emulate.handles import EmulatedWork
from minidist.emulate.streams import emulated_streams
from minidist.launch import isolated_world

__all__ = [
    "CollectiveError",
    "CollectiveMismatch",
    "EmulatedGroup",
    "EmulatedWork",
    "current_client",
    "emulated_world",
]

# Names of groups are numbered from here, per session: the same on all ranks, and different from
# the names of all other groups.
_BASE = 1_000_000
_client: Client | None = None


@contextlib.contextmanager
def emulated_world(sock: socket.socket, rank: int, world_size: int) -> Iterator[Client]:
    """One session on this rank: inside the block, `torch.distributed` uses the emulated cluster.

    The broker's `begin` is called before the block, its `end` after all ranks have left their
    blocks. The same socket serves one block after another. After the block, the previous default
    group is restored.

    Yields:
        The connection; with its `charge(layer, direction)` it is the channel that `Charged` needs.

    Raises:
        CollectiveError: no session has begun, or the connection is broken; from a collective's
            wait: a rank is missing. CollectiveMismatch: ranks called different collectives.
    """
    global _client
    client = Client(sock, rank, world_size)
    client.join()
    before, _client = _client, client
    try:
        with (
            isolated_world(
                "emulated",
                store=dist.HashStore(),
                rank=rank,
                world_size=world_size,
                base=_BASE + 10_000 * client.session,
            ),
            emulated_streams(client),
        ):
            yield client
    finally:
        _client = before
        client.leave()


def current_client() -> Client:
    """The connection of the block that runs now; RuntimeError outside of a block."""
    if _client is None:
        raise RuntimeError('the backend "emulated" works only inside `with emulated_world(...)`')
    return _client


def _create(options: Any, _: Any = None) -> EmulatedGroup:
    client = current_client()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return EmulatedGroup(client, ranks, str(options.group_id))


if "EMULATED" not in dist.Backend._plugins:
    dist.Backend.register_backend("emulated", _create, extended_api=True, devices=["cpu"])
