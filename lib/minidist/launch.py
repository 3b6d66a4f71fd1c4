"""Start one process per rank, and give a block of code a default process group of its own.

Example::

    def mean(x):
        dist.init_process_group("gloo")
        t = torch.tensor([x * dist.get_rank()])
        dist.all_reduce(t, op=dist.ReduceOp.AVG)
        return t.item()

    run(mean, 2, 3.0)  # [1.5, 1.5], one result per rank

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import cloudpickle

from minidist.errors import LaunchDeadlineError, LaunchError
from minidist.processes.fork_server import Child, fork
from minidist.processes.last_calls import (
    OVERSIZED,
    NumberedCall,
    at_terminate,
    disagreement,
    is_oversized,
    last_calls,
)
from minidist.processes.lifetime import keep_backends
from minidist.processes.ports import free_port, gloo_at_home, let_go
from minidist.processes.stacks import ask, tell_when_asked

# After a rank has failed, the others get this long to fail by themselves (their tracebacks help).
_GRACE_S = 1.0
_NUM_FRAMES = 5  # of the stack of a rank that C++ ends, the innermost ones

# Groups made inside isolated_world stay referenced: a gloo group's destructor joins threads that
# may still wait for a peer.
_retired_groups: list[Any] = []


def run(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    deadline_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(*args)` in `nprocs` fresh processes and return one result per rank.

    Every process has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    set as torchrun sets them, one torch thread, and no process group. Arguments and results are
    pickled. Definitions of a script or a notebook are pickled by value, so the script is not run
    again in each process.

    Args:
        fn: what each rank calls.
        nprocs: number of ranks.
        deadline_s: seconds from when all ranks have been forked to the last result.
        env: extra environment variables of the ranks.

    Raises:
        LaunchError: a rank raised or died; every other rank has been killed by then. `rank` of the
            error is the first one that failed.
        LaunchDeadlineError: a LaunchError; a rank had not finished in time, and no rank had failed.
            The message says where each unfinished rank stood.
    """
    if nprocs < 1:
        raise ValueError(f"run: nprocs must be at least 1, got {nprocs}")
    job = cloudpickle.dumps((fn, args))
    port = free_port()
    ranks: list[_Rank] = []
    try:
        for rank in range(nprocs):
            variables = rank_environment(rank, nprocs, port, env)
            ranks.append(_Rank(rank, fork(_rank_main, job, env=variables)))
        _collect(ranks, time.monotonic() + deadline_s, deadline_s)
    finally:
        for each in ranks:
            each.let_end()
        for each in ranks:
            each.close()
        let_go(port)
    return [each.result for each in ranks]


def rank_environment(
    rank: int, nprocs: int, port: int, env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """This process's environment, with `env`, and with what torchrun would tell a rank.

    Args:
        port: where rank 0 serves the store, on this machine.
    """
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Under torchrun or our kernel, this variable says that an agent serves the store. Here rank
        # 0 serves it.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return gloo_at_home() | os.environ | dict(env or {}) | place


class _Rank:
    """The parent's view of one rank: its process and what came out of it."""

    def __init__(self, rank: int, process: Child) -> None:
        self.rank = rank
        self.process = process
        self.done = False
        self.result: Any = None
        self.error: str | None = None
        self.calls: list[NumberedCall] = []  # of a rank that failed
        self.got_oversized = False

    def receive(self) -> None:
        """Take the rank's one message; its pipe is readable or closed."""
        self.done = True
        try:
            status, value, self.calls = pickle.loads(self.process.pipe.recv_bytes())
        except EOFError:
            self.error = self._end()
            return
        except Exception as error:
            self.error = f"its result could not be read: {error!r}"
            return
        if status == "ok":
            self.result = value
        elif status == "ends":
            self.got_oversized, stack = value
            self.error = f"\n{stack}{self._end()}"
        else:
            self.error = value

    def _end(self) -> str:
        code = self.process.join(30.0)
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"code {code}"
        return f"the process ended without a result ({how})"

    def let_end(self) -> None:
        """Close the pipe: a rank that is done ends now."""
        self.process.pipe.close()

    def close(self) -> None:
        # A rank that is done may still be closing its groups: give it a moment, then end it.
        if self.process.join(2.0 if self.done and self.error is None else 0.0) is None:
            self.process.kill()
            self.process.join(5.0)
        self.process.close()


def _collect(ranks: list[_Rank], end_s: float, deadline_s: float) -> None:
    first: _Rank | None = None
    while pending := [each for each in ranks if not each.done]:
        left_s = end_s - time.monotonic()
        ready = connection.wait([each.process.pipe for each in pending], max(0.0, left_s))
        for each in pending:
            if each.process.pipe in ready:
                each.receive()
                if each.error is not None and first is None:
                    first = each
                    end_s = min(end_s, time.monotonic() + _GRACE_S)
        if not ready and time.monotonic() >= end_s:
            break
    unfinished = [each for each in ranks if not each.done]
    late = [each.rank for each in unfinished]
    if first is not None:
        first = next((each for each in ranks if each.got_oversized), first)
        others = [each for each in ranks if each.error is not None and each is not first]
        is_gloos = any(word in (first.error or "") for word in ("gloo", "SIGABRT"))
        apart = disagreement({each.rank: each.calls for each in ranks}) if is_gloos else ""
        why = apart or (OVERSIZED if first.got_oversized else "")
        text = why and f"{why}\n"
        text += f"failed in run(): {first.error}"
        for each in others:
            last = (each.error or "").strip().splitlines()[-1]
            text += f"\nalso failed: rank {each.rank}: {last}"
        if late:
            text += f"\nkilled while still running: {_names(late)}"
        raise LaunchError(text, rank=first.rank)
    if late:
        gone = [each.rank for each in ranks if each.done]
        told = ask({each.process.pid: each.process.pipe.fileno() for each in unfinished})
        stood = [(each.rank, told.get(each.process.pid)) for each in unfinished]
        raise LaunchDeadlineError(
            f"run(): {_names(late)} had not finished after {deadline_s:g} s "
            f"(of {len(ranks)} ranks); all were killed"
            + (f"; {_names(gone)} had returned, so nothing that waits for it ends" if gone else "")
            + "".join(f"\nrank {rank} stood {where}" for rank, where in stood if where),
            rank=late[0] if len(late) == 1 else None,
        )


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _rank_main(pipe: connection.Connection, job: bytes) -> None:
    """What a rank's process runs: calls the function, sends one message, waits for all ranks.

    Rank 0 serves the store: without it, a rank that is still making a group would fail.
    """
    try:
        tell_when_asked(pipe.fileno())
        import torch

        torch.set_num_threads(1)
        keep_backends()
        at_terminate(lambda exception: pipe.send_bytes(pickle.dumps(_last_words(exception))))
        fn, args = pickle.loads(job)
        message = cloudpickle.dumps(("ok", fn(*args), []))
    except BaseException:
        message = pickle.dumps(("error", traceback.format_exc(), last_calls()))
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError, EOFError):
        pipe.send_bytes(message)
        pipe.recv_bytes()  # waits until the parent closes its end, or is gone


def _last_words(exception: str) -> tuple[str, tuple[bool, str], list[NumberedCall]]:
    """What the parent gets from a rank that C++ ends: why, where the main thread stands, calls."""
    stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])
    return "ends", (is_oversized(exception), "".join(stack[-_NUM_FRAMES:])), last_calls()


_c10d_maps = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
)
_rounds = itertools.count()


@contextlib.contextmanager
def isolated_world(
    backend: str,
    *,
    store: Any,
    rank: int,
    world_size: int,
    base: int,
    timeout_s: float = 30.0,
) -> Iterator[Any]:
    """Make a new default process group for the block, and put back what was there before.

    Inside, `torch.distributed` knows only the new world: the surrounding groups can neither be
    used by default nor destroyed, and stay usable afterwards. Groups made inside are forgotten,
    not destroyed. Code inside may call `destroy_process_group` and `init_process_group`.

    Args:
        backend: "gloo", "nccl" or a registered backend.
        store: where the ranks meet. Each block needs a separate store, e.g. a fresh `PrefixStore`.
        base: first number in the names of the groups made inside: the same on every rank, and far
            from the numbers of other blocks that are alive.
        timeout_s: timeout of the group's operations.

    Yields:
        The default process group of the block.
    """
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    world = c10d._world
    # Save the state that surrounds the block, and empty it. torch looks up these module globals at
    # each use, so replacing the objects is enough for isolation.
    saved = {name: getattr(c10d, name) for name in _c10d_maps}
    saved_world = {
        name: getattr(world, name)
        for name in ("_default_pg", "_pg_coalesce_state", "_comms")
        if hasattr(world, name)
    }
    saved_count, saved_method = world.group_count, c10d._default_pg_init_method
    saved_backend = c10d._backend
    saved_hook = sys.excepthook
    for name in _c10d_maps:
        setattr(c10d, name, {})
    inner = {name: getattr(c10d, name) for name in _c10d_maps}
    for name, value in saved_world.items():
        setattr(world, name, None if name == "_default_pg" else type(value)())
    world.group_count = base
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        group = dist.group.WORLD
        if backend != "emulated":
            _retired_groups.append(group)
        yield group
    finally:
        # Drop the names that were made inside from torch's registry ...
        for pg, pg_name in list(inner["_pg_names"].items()):
            if backend != "emulated":
                _retired_groups.append(pg)
            with contextlib.suppress(Exception):
                _unregister(pg_name)
        # ... put the surroundings back ...
        for name, value in saved.items():
            setattr(c10d, name, value)
        for name, value in saved_world.items():
            setattr(world, name, value)
        world.group_count = saved_count
        c10d._default_pg_init_method = saved_method
        c10d._backend = saved_backend
        sys.excepthook = saved_hook
        # ... and their names, which destroy_process_group() inside has wiped from the registry.
        for pg, pg_name in saved["_pg_names"].items():
            _register_again(pg_name, pg)


def _unregister(name: Any) -> None:
    from torch._C._distributed_c10d import _unregister_process_group

    _unregister_process_group(name)


def _register_again(name: Any, pg: Any) -> None:
    from torch._C._distributed_c10d import _register_process_group, _resolve_process_group

    try:
        _resolve_process_group(name)
    except Exception:
        _register_process_group(name, pg)
