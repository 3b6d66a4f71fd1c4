"""A parameter server with real processes: rank 0 of a group serves, all others work.

Example::

    def train(parameters_N):
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            return serve(parameters_N, make_sgd, num_updates=100, consistency=Asynchronous())
        return work(gradient, parameters_N)

All messages have the size of the parameters plus one number, the kind of the message:

    server -> worker   PARAMETERS or STOP       worker -> server   GRADIENT or FAILED

A worker either sends exactly one message or waits for one, and the server sends only to workers
that wait. So blocking sends cannot deadlock. The server takes the message that arrives first
(`recv` from any source); of torch's backends only gloo supports this. Parameters are therefore in
host memory, where a parameter server keeps them anyway. A worker may compute on any device.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.distributed as dist

from minidist.errors import ProtocolError
from minidist.parallel.parameter_server.server import (
    Consistency,
    MakeOptimizer,
    Report,
    Server,
    check,
)
from minidist.parallel.parameter_server.simulation import Gradient


class Kind(IntEnum):
    """First number of a message."""

    PARAMETERS = 0  # continue with these parameters
    STOP = 1  # all updates are made; these are the final parameters
    GRADIENT = 2
    FAILED = 3  # the sender raised, and sends nothing more
    ABORT = 4  # a different rank failed


def serve(
    parameters: torch.Tensor,
    make_optimizer: MakeOptimizer,
    *,
    num_updates: int,
    consistency: Consistency,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, Report]:
    """On rank 0 of the group: serve until `num_updates` updates are made, then stop all workers.

    Args:
        parameters: flat, 1-D, on the CPU; the initial values.
        make_optimizer: makes the optimizer for a list of tensors.

    Returns:
        (final parameters, report). Workers are numbered from 0: rank - 1 in the group.

    Raises:
        ValueError: wrong arguments, a backend that cannot receive from any source, or a rank other
            than 0.
        ProtocolError: a worker failed. All other workers are told, and raise as well.
    """
    rank, num_workers = _check("serve", parameters, group)
    check(parameters, num_workers, consistency)
    if rank != 0:
        raise ValueError(f"serve: is for rank 0 of the group, was called on rank {rank}")
    server = Server(parameters, make_optimizer, num_workers, consistency)
    ranks = dist.get_process_group_ranks(group)
    message = _message(Kind.PARAMETERS, server.parameters)
    for worker in range(num_workers):
        dist.send(message, group_dst=worker + 1, group=group)
    busy = set(range(num_workers))  # these workers compute; all others wait for a message
    gone: set[int] = set()
    error: Exception | None = None
    while busy:
        source = dist.recv(message, group=group)
        worker = ranks.index(source) - 1
        busy.discard(worker)
        try:
            if message[0] == Kind.FAILED:
                gone.add(worker)
                raise ProtocolError(f"serve: worker {worker} raised", rank=worker + 1)
            if error is not None or server.report.num_updates >= num_updates:
                continue  # only collect messages, until all workers wait
            released = server.push(worker, message[1:])
        except Exception as raised:
            error = error or raised
            continue
        if server.report.num_updates < num_updates:
            for free in released:
                answer = _message(Kind.PARAMETERS, server.parameters)
                dist.send(answer, group_dst=free + 1, group=group)
                busy.add(free)
    last = _message(Kind.STOP if error is None else Kind.ABORT, server.parameters)
    for worker in set(range(num_workers)) - gone:
        dist.send(last, group_dst=worker + 1, group=group)
    if error is not None:
        raise error
    return server.parameters, server.report


def work(
    gradient: Gradient, parameters: torch.Tensor, *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """On every other rank: compute gradients until the server sends STOP.

    Args:
        gradient: called with (parameters, worker, step); worker and step are counted from 0.
            Returns a tensor of the parameters' shape, on any device.
        parameters: same shape and dtype as on rank 0; the values come from the server.

    Returns:
        The final parameters, as on the server.

    Raises:
        ValueError: wrong arguments, or called on rank 0.
        ProtocolError: a different rank failed. An error of `gradient` is raised here, and ends the
            training on all ranks.
    """
    rank, _ = _check("work", parameters, group)
    if rank == 0:
        raise ValueError("work: is for the ranks that do not serve, was called on rank 0")
    message = _message(Kind.PARAMETERS, parameters)
    step = 0
    while True:
        dist.recv(message, group_src=0, group=group)
        if message[0] == Kind.STOP:
            return message[1:].clone()
        if message[0] == Kind.ABORT:
            raise ProtocolError("work: another rank of the parameter server failed", rank=rank)
        try:
            value = gradient(message[1:].clone(), rank - 1, step)
            if value.shape != parameters.shape:
                raise ValueError(
                    f"work: gradient() returned shape {tuple(value.shape)} on rank {rank}, "
                    f"expected {tuple(parameters.shape)}"
                )
        except BaseException:
            dist.send(_message(Kind.FAILED, parameters), group_dst=0, group=group)
            raise
        answer = _message(Kind.GRADIENT, value.detach().to(parameters))
        dist.send(answer, group_dst=0, group=group)
        step += 1


def _message(kind: Kind, values: torch.Tensor) -> torch.Tensor:
    """[kind, *values] as one tensor, so that a receive from any source cannot mix two messages."""
    return torch.cat([values.new_tensor([float(kind)]), values.detach()])


def _check(name: str, parameters: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(rank in the group, number of workers)."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    backend = dist.get_backend(group)
    if "gloo" not in backend:
        raise ValueError(
            f"{name}: needs a gloo group, which can receive from any source; got {backend!r} on "
            f"rank {rank}"
        )
    if size < 2:
        raise ValueError(f"{name}: needs a server and a worker, got a group of {size} rank")
    if parameters.device.type != "cpu":
        raise ValueError(
            f"{name}: parameters must be on the CPU, got {parameters.device} on rank {rank}"
        )
    return rank, size - 1
