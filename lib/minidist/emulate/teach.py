"""Run a function on an emulated cluster in one call: broker, ranks, replay."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from minidist import launch
from minidist.emulate.broker import Broker
from minidist.emulate.clusters import Cluster
from minidist.emulate.plan import ChargePlan
from minidist.emulate.simulate import Timeline, simulate
from minidist.emulate.trace import Trace


def run(
    fn: Callable[..., Any],
    nprocs: int,
    cluster: Cluster,
    *args: Any,
    plan: ChargePlan | None = None,
    deadline_s: float = 60.0,
) -> tuple[list[Any], Timeline]:
    """Call `fn(*args)` on `nprocs` ranks of an emulated cluster.

    Args:
        fn: runs inside `emulated_world`, with "emulated" as the default process group.
        cluster: the cluster on which the trace is replayed.
        plan: cost of each `Charged` layer. Without a plan, every operation is charged by roofline
            (see `RooflineDevice`).
        deadline_s: real seconds for all of it.

    Returns:
        One result per rank, and the timeline.

    Raises:
        LaunchError: as `minidist.launch.run`.
    """
    results, trace = run_traced(fn, nprocs, *args, plan=plan, deadline_s=deadline_s)
    return results, simulate(trace, cluster)


def run_traced(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    plan: ChargePlan | None = None,
    deadline_s: float = 60.0,
    keep_payloads: bool = False,
) -> tuple[list[Any], Trace]:
    """As `run`, but returns the trace, which can be replayed on several clusters."""
    directory = tempfile.mkdtemp(prefix="minidist-")
    listeners: list[socket.socket] = []
    try:
        with Broker(nprocs, keep_payloads=keep_payloads, deadline_s=deadline_s) as broker:
            broker.begin(plan)
            for rank in range(nprocs):
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listener.settimeout(deadline_s)
                listener.bind(os.path.join(directory, str(rank)))
                listener.listen(1)
                listeners.append(listener)
                threading.Thread(target=_accept, args=(broker, rank, listener), daemon=True).start()
            results = launch.run(
                _rank, nprocs, directory, fn, args, plan is None, deadline_s=deadline_s
            )
            return results, broker.end()
    finally:
        for listener in listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that still accepts
            listener.close()
        shutil.rmtree(directory, ignore_errors=True)


def _accept(broker: Broker, rank: int, listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock, _ = listener.accept()
        broker.attach(rank, sock)


def _rank(directory: str, fn: Callable[..., Any], args: tuple[Any, ...], roofline: bool) -> Any:
    from minidist.emulate.backend import emulated_world
    from minidist.emulate.device import RooflineDevice

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(os.path.join(directory, str(rank)))
    with contextlib.ExitStack() as stack:
        stack.enter_context(sock)
        world = stack.enter_context(emulated_world(sock, rank, world_size))
        if roofline:
            stack.enter_context(RooflineDevice(world))
        return fn(*args)
