"""Runs a student's script as torchrun would, for the criteria of a script.

The ranks are forked from a server that has imported torch (`minidist.launch`). They get everything
that torchrun's workers get: environment, arguments and a folder. This takes a third of the time of
torchrun, because torchrun's agent and each of its workers import torch anew.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from autograder.criteria.common.places import meeting_place
from autograder.criteria.common.script_worker import ScriptError, work
from autograder.criteria.common.survivors import wait_for_ends
from minidist.errors import LaunchDeadlineError, LaunchError
from minidist.launch import rank_environment, run
from minidist.processes.fork_server import fork
from minidist.processes.ports import free_port, let_go

ELSEWHERE = ".elsewhere"  # ending of a rank's file that says where it was to meet the others
GRACE_S = 10.0  # after a rank has died, the others get this long to end: a busy machine is slow
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}  # a check may have more ranks than there are GPUs


def find_script(path: Any) -> Path:
    """
    Raises:
        FileNotFoundError: the student's script is not there.
    """
    script = Path(path)
    if not script.is_file():
        raise FileNotFoundError(f"{script}: expected a script in {Path.cwd()}; run the cell above")
    return script


def run_script(
    script: Path,
    arguments: list[str],
    log: Path,
    nprocs: int,
    *,
    deadline_s: float,
    env: Mapping[str, str] | None = None,
    folders: Path | None = None,
) -> str:
    """Runs the script to its end.

    Args:
        log: file for the output of all ranks.
        folders: each rank works in a subfolder of its own, named after its rank, which shows
            which rank writes which file. In this mode, the environment of the last rank says that
            it is alone on a second machine, and a rank that is to meet the others elsewhere than
            the environment says leaves a file here (see ELSEWHERE).

    Returns:
        what went wrong, in a few words; "" if nothing went wrong.

    Raises:
        TimeoutError: the script ran longer than `deadline_s`.
    """
    log.touch()
    try:
        run(
            _be_worker,
            nprocs,
            str(script.resolve()),
            arguments,
            str(log),
            folders,
            deadline_s=deadline_s,
            env=env,
        )
    except LaunchDeadlineError:
        late = f"{script.name} was still running after {deadline_s:.0f} s"
        raise TimeoutError(late) from None
    except LaunchError as error:
        why = str(error).partition("\nalso failed")[0].strip().splitlines()[-1]
        return f"failed on rank {error.rank} ({why.rpartition('ScriptError: ')[2]})"
    return ""


def run_to_a_death(
    script: Path,
    arguments: list[str],
    log: Path,
    nprocs: int,
    *,
    deadline_s: float,
    env: Mapping[str, str] | None = None,
    folders: Path | None = None,
) -> list[int]:
    """Runs the script, one rank of which is going to be killed, until all ranks have ended.

    Callers judge what the other ranks do after the death; `run_script` would give them only a
    second to end. The arguments are those of `run_script`.

    Returns:
        each rank's exit code; negative: the signal that ended it, which is SIGKILL also for a rank
        that was still running `GRACE_S` after the death: torchrun's agent would have ended it, too.

    Raises:
        TimeoutError: nobody has died, and the script ran longer than `deadline_s`.
    """
    log.touch()
    port = free_port()
    processes = []
    job = (str(script.resolve()), arguments, str(log), folders)
    try:
        for rank in range(nprocs):
            variables = rank_environment(rank, nprocs, port, env)
            processes.append(fork(_be_forked_worker, *job, env=variables))
        codes = wait_for_ends(processes, deadline_s, GRACE_S)
    finally:
        for process in processes:
            process.kill()
            process.join(GRACE_S)
            process.close()
        let_go(port)
    if None in codes and not any(codes):
        raise TimeoutError(f"{script.name} was still running after {deadline_s:.0f} s")
    return [-signal.SIGKILL if code is None else code for code in codes]


def _be_forked_worker(_: Any, *job: Any) -> None:
    """Runs the script as a process of its own, whose exit code is the script's."""
    import torch

    torch.set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        _be_worker(*job)
    except ScriptError as error:
        sys.exit(error.code)


def _be_worker(script: str, arguments: list[str], log: str, folders: Path | None) -> None:
    """Runs the script as a worker of torchrun would run it."""
    write_to(Path(log))
    os.environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    complete_environment()
    if folders:
        rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
        place = folders / str(rank)
        place.mkdir()
        os.chdir(place)
        if rank == last > 0:
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
        elif last > 0:
            os.environ["LOCAL_WORLD_SIZE"] = str(last)
        os.environ["GROUP_WORLD_SIZE"] = "2" if last > 0 else "1"
        _note_meeting_place(folders / f"{rank}{ELSEWHERE}")
    work(script, arguments)


def complete_environment() -> None:
    """Adds what torchrun tells a worker beside its place, and removes what only our launch says."""
    for name in [name for name in os.environ if name.startswith("MINIDIST_")]:
        del os.environ[name]
    os.environ |= {
        "ROLE_NAME": "default",
        "ROLE_RANK": os.environ["RANK"],
        "ROLE_WORLD_SIZE": os.environ["WORLD_SIZE"],
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": "1",
    }


def _note_meeting_place(file: Path) -> None:
    """From now on, `init_process_group` writes to `file` if ranks are to meet elsewhere.

    On one machine the ranks may come together there all the same; on several they would not.
    """
    import torch.distributed as dist

    given, original = meeting_place(), dist.init_process_group

    @wraps(original)
    def init_process_group(
        backend: Any = None, init_method: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if (place := meeting_place(init_method)) != given:
            file.write_text(f"{place}, where torchrun says {given}")
        original(backend, init_method, *args, **kwargs)

    dist.init_process_group = init_process_group


def write_to(log: Path) -> None:
    """Appends the output of this process, and of the processes that it starts, to `log`."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    os.close(output)
