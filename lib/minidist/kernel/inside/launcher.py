"""The launcher: imports torch and ipykernel once, and forks an agent for each set of ranks.

The agent is torch's elastic agent, the same that `torchrun` runs, so ranks find torchrun's
environment variables; the agent forks the ranks. The launcher itself never runs user code and can
always fork again: fresh ranks cost a fork, not a second import of torch. The launcher reads its
configuration as one JSON line from standard input; then the front tells it over the link to start
or to end ranks.
"""

from __future__ import annotations

import base64
import contextlib
import json
import multiprocessing.connection
import os
import queue
import shutil
import socket
import sys
import threading
from collections.abc import Iterable
from typing import Any

from minidist.kernel.link import Link, endpoint
from minidist.processes import fork_server
from minidist.processes.cores import num_cores
from minidist.processes.lifetime import adopt_orphans
from minidist.processes.ports import free_port, gloo_at_home
from minidist.processes.tree import children, descendants, kill_descendants

# How soon the launcher looks again for ranks that its agent has forked.
_LOOK_AGAIN_S = 0.2
# The interval at which torch's agent checks its ranks. A check would collect a rank's exit status,
# and then nobody else could read it. No check is needed: the agent may restart nothing, and after
# a loss the front ends the other ranks.
_NEVER_S = 1e9


def _set_environment(config: dict[str, Any]) -> None:
    """Set what torch and numpy need before their import, and the variables promised to ranks."""
    threads = str(max(1, num_cores() // config["ranks"]))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, threads)
    # Counting GPUs must not initialise CUDA in the process that forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.update(
        MINIDIST_KERNEL="1",
        MINIDIST_RUN_DIR=config["run_dir"],
    )
    if config.get("rank_init"):
        os.environ["MINIDIST_RANK_INIT"] = config["rank_init"]


def _end_everything(config: dict[str, Any]) -> None:
    """The front is gone: end all descendants, remove the directories, and exit."""
    kill_descendants(os.getpid())
    for path in config.get("remove", []):
        shutil.rmtree(path, ignore_errors=True)
    os._exit(1)


def _serve(link: Link, config: dict[str, Any], orders: queue.Queue[dict[str, Any]]) -> None:
    """Thread: obey the front, and end everything when it has gone."""
    while (message := link.receive()) is not None:
        if message.get("do") == "start":
            orders.put(message)
        elif message.get("do") == "stop":
            kill_descendants(os.getpid())
            left = len(descendants(os.getpid()))
            link.send({"id": message.get("id"), "stopped": not left})
    _end_everything(config)


def _report_exits(link: Link, agent: int, ranks: int, generation: Any) -> None:
    """Thread: tell the front how the agent and each rank ended, without collecting them (WNOWAIT).

    Each report names its generation, because ends of one generation may be reported while the next
    one starts. Ranks that ended before this thread saw them are found, too: they stay zombies,
    because nobody collects them.
    """
    watched: dict[int, int] = {}
    seen: set[int] = set()
    while watched or not seen:
        everyone = len(seen) > ranks
        for pid in () if everyone else {agent, *children(agent)} - seen:
            seen.add(pid)
            with contextlib.suppress(OSError):
                watched[os.pidfd_open(pid)] = pid
        timeout_s = None if everyone else _LOOK_AGAIN_S
        for fd in multiprocessing.connection.wait(list(watched), timeout_s):
            pid = watched.pop(fd)  # type: ignore[arg-type]
            with contextlib.suppress(OSError):
                end = {"exit": pid, "code": _exit_code(pid), "agent": pid == agent}
                link.send({**end, "generation": generation})
            os.close(fd)  # type: ignore[arg-type]


def _exit_code(pid: int) -> int | None:
    """Exit status of an ended process, negative for a signal; None if it is unknown."""
    try:  # only the parent may ask, so the status of a grandchild comes from /proc
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
    except ChildProcessError:
        pass
    try:
        with open(f"/proc/{pid}/stat") as file:
            status = int(file.read().rpartition(")")[2].split()[-1])
    except (OSError, ValueError):
        return None
    return os.waitstatus_to_exitcode(status)


def _launch(config: dict[str, Any]) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from minidist.kernel.inside import rank

    # A static rendezvous on the loopback address needs no name look-up, so it also works in a
    # sandbox that has only `lo`. The port is free when it is chosen; if a different process has
    # taken it since, the loop tries again. Several nodes must agree on one port, so the front has
    # chosen it.
    share = config.get("share")
    if not share:
        os.environ.update(gloo_at_home() | os.environ)
    for attempt in range(1 if share else 5):
        own = f"127.0.0.1:{free_port()}"
        num_nodes, node = (share["num_nodes"], share["node"]) if share else (1, 0)
        launch = LaunchConfig(
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            nproc_per_node=config["ranks"],
            run_id="minidist" if share else f"minidist-{os.getpid()}-{attempt}",
            rdzv_backend="static",
            rdzv_endpoint=endpoint(share["master"], share["port"]) if share else own,
            rdzv_configs={"rank": node, "timeout": 180 if share else 60},
            local_addr=None if share else "127.0.0.1",
            start_method="fork",
            max_restarts=0,
            monitor_interval=_NEVER_S,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        )
        try:
            elastic_launch(launch, rank.main)(config, os.getpid())
            return
        except RuntimeError as error:  # torch's DistNetworkError
            if "EADDRINUSE" not in str(error) or attempt == 4 or share:
                raise


def _fork_agent(link: Link, config: dict[str, Any]) -> int:
    """Fork the fork server of the ranks and the process that runs torch's agent.

    Returns:
        The pid of the agent's process.
    """
    requests, served = socket.socketpair()

    def serve() -> None:
        os.close(link.fileno())
        requests.close()
        fork_server.serve(served)

    def launch() -> None:
        os.close(link.fileno())
        served.close()
        os.environ["MINIDIST_GENERATION"] = str(config["generation"])
        os.environ[fork_server.VARIABLE] = fork_server.name_of(requests)
        _launch(config)

    with requests, served:
        fork_server.fork_child(serve)
        return fork_server.fork_child(launch)


def _load(more: Iterable[str] = ()) -> None:
    """Import what ranks need, once, before they are forked."""
    needed = ["torch.distributed", "ipykernel.debugger", "minidist.kernel.inside.rank"]
    needed += ["torch.distributed.launcher.api"]  # for the agent
    needed += ["stack_data", "pygments.formatters.terminal256"]  # for the first traceback
    # Keep debugpy from being imported: the front refuses debugger requests.
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    fork_server.import_for_good([*needed, *more])
    del sys.modules["debugpy"]


def main() -> int:
    """Serve the front until it is gone."""
    config = json.loads(sys.stdin.buffer.readline())
    # Neither ranks nor what they start may read from the front's pipe.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    config["key"] = base64.b64decode(config["key"])
    adopt_orphans()
    _set_environment(config)
    link = Link(config["run_dir"], config["key"], "launcher", 0)
    orders: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_serve, args=(link, config, orders), daemon=True).start()

    _load(filter(None, os.environ.get("MINIDIST_PRELOAD", "").split(",")))
    while True:
        order = orders.get()
        config.update({key: order.get(key) for key in ("ranks", "generation", "share")})
        watch = (link, _fork_agent(link, config), order["ranks"], order["generation"])
        threading.Thread(target=_report_exits, args=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
