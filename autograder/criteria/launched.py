"""Runs a student's script as torchrun would, for the criteria of a script.

The ranks are forked from a server that has imported torch (`minidist.launch`) and get all that
torchrun's workers get: environment, arguments and a folder. That takes a third of the time of
torchrun itself, where the agent and each worker import torch anew.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from minidist.errors import LaunchError
from minidist.launch import run


def run_script(
    script: Path,
    arguments: list[str],
    log: Path,
    nprocs: int,
    *,
    deadline_s: float,
    env: Mapping[str, str] | None = None,
) -> str:
    """Runs the script to its end; what went wrong, in a few words, "" if nothing.

    What it says goes into `log`.

    Raises:
        TimeoutError: it ran longer than `deadline_s`.
    """
    log.touch()
    start_s = time.monotonic()
    try:
        run(_be_worker, nprocs, str(script), arguments, str(log), deadline_s=deadline_s, env=env)
    except LaunchError as error:
        if time.monotonic() - start_s >= deadline_s:
            late = f"{script.name} was still running after {deadline_s:.0f} s"
            raise TimeoutError(late) from None
        why = str(error).partition("\nalso failed")[0].strip().splitlines()[-1]
        return f"failed on rank {error.rank} ({why})"
    return ""


def _be_worker(script: str, arguments: list[str], log: str) -> None:
    """What one of torchrun's workers does; says all it has to say in the log."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    for name in [name for name in os.environ if name.startswith("MINIDIST_")]:
        del os.environ[name]
    os.environ |= {
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default",
        "ROLE_RANK": os.environ["RANK"], "ROLE_WORLD_SIZE": os.environ["WORLD_SIZE"],
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    _keep_groups()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            print(end.code, file=sys.stderr)
            raise
    except BaseException as error:
        of_script = error.__traceback__
        while of_script and of_script.tb_frame.f_code.co_filename != script:
            of_script = of_script.tb_next
        rank = os.environ.get("RANK")
        text = traceback.format_exception(error.with_traceback(of_script))
        print(f"rank {rank}: {''.join(text)}", file=sys.stderr)
        raise


_kept: list[dist.ProcessGroup] = []


def _keep_groups() -> None:
    """Lets a group live as long as its process, though the script destroys it.

    The last owner of a gloo group may be DDP's reducer. Its destructor joins gloo's thread and
    holds the GIL meanwhile, for which that thread may wait to drop the last all-reduce: on a busy
    machine a right script hung at its end.
    """
    destroy = distributed_c10d.destroy_process_group

    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        _kept.extend(distributed_c10d._world.pg_map)
        destroy(group)

    dist.destroy_process_group = destroy_process_group
    distributed_c10d.destroy_process_group = destroy_process_group
