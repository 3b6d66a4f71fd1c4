"""The launcher: imports torch and ipykernel once, then torch's elastic agent forks the ranks.

It is the same agent that `torchrun` runs, so ranks find torchrun's own environment. Everything that
the launcher has to know comes as one JSON line on its standard input; afterwards its link to the
front tells it when the front is gone.
"""

from __future__ import annotations

import base64
import contextlib
import json
import multiprocessing.connection
import os
import shutil
import socket
import sys
import threading
import time
from typing import Any

from minidist.kernel.process import adopt_orphans, descendants, kill_descendants
from minidist.kernel.wire import Link


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _set_environment(config: dict[str, Any]) -> None:
    """What has to be set before torch and numpy are imported, and what ranks are promised."""
    threads = str(max(1, _cores() // config["ranks"]))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, threads)
    # Counting GPUs must not initialise CUDA in the process that forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.update(
        MINIDIST_KERNEL="1",
        MINIDIST_RUN_DIR=config["run_dir"],
        MINIDIST_GENERATION=str(config["generation"]),
    )
    if config.get("rank_init"):
        os.environ["MINIDIST_RANK_INIT"] = config["rank_init"]


def _end_everything(config: dict[str, Any]) -> None:
    """The front is gone: leave nothing behind."""
    kill_descendants(os.getpid())
    if config.get("remove_run_dir"):
        shutil.rmtree(config["run_dir"], ignore_errors=True)
    os._exit(1)


def _serve(link: Link, config: dict[str, Any]) -> None:
    """Thread: report how ranks ended; end everything when the front has gone."""
    while (message := link.receive()) is not None:
        if message.get("do") == "watch":
            threading.Thread(target=_report_exits, args=(link,), daemon=True).start()
    _end_everything(config)


def _report_exits(link: Link) -> None:
    """Tell the front each child's exit status, without taking it from the agent (WNOWAIT)."""
    watched: dict[int, int] = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            watched[os.pidfd_open(pid)] = pid
    while watched:
        for fd in multiprocessing.connection.wait(list(watched)):
            pid = watched.pop(fd)  # type: ignore[arg-type]
            with contextlib.suppress(OSError):
                result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
                if result is not None:
                    exited = result.si_code == os.CLD_EXITED
                    link.send(
                        {"exit": pid, "code": result.si_status if exited else -result.si_status}
                    )
            os.close(fd)  # type: ignore[arg-type]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _launch(config: dict[str, Any]) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from minidist.kernel import rank

    # A static rendezvous on the loopback address needs no name look-up, so it also works in a
    # sandbox that has only `lo`. The port is free when it is drawn; if it was taken since, again.
    for attempt in range(5):
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config["ranks"],
            run_id=f"minidist-{os.getpid()}-{attempt}",
            rdzv_backend="static",
            rdzv_endpoint=f"127.0.0.1:{_free_port()}",
            rdzv_configs={"rank": 0, "timeout": 60},
            local_addr="127.0.0.1",
            start_method="fork",
            max_restarts=0,
            monitor_interval=0.5,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        )
        try:
            elastic_launch(launch, rank.main)(config, os.getpid())
            return
        except RuntimeError as error:  # torch's DistNetworkError
            if "EADDRINUSE" not in str(error) or attempt == 4:
                raise


def main() -> int:
    config = json.loads(sys.stdin.buffer.readline())
    config["key"] = base64.b64decode(config["key"])
    # Neither ranks nor what they start may read from the front's pipe.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    adopt_orphans()
    _set_environment(config)
    link = Link(config["run_dir"], config["key"], "launcher", config["generation"])
    threading.Thread(target=_serve, args=(link, config), daemon=True).start()

    import torch.distributed  # noqa: F401  (imported once, before the fork)
    from ipykernel.kernelapp import IPKernelApp  # noqa: F401

    try:
        _launch(config)
    except BaseException as error:
        with contextlib.suppress(OSError):
            link.send({"failed": f"{type(error).__name__}: {error}"[:4000]})
        time.sleep(0.2)  # let the exit reports go out before the front sees this process end
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
