"""Two "nodes" on this machine, for the criteria of task 5 of lab 5: they start, end, and die.

Each node has its own data file. The script saves its checkpoints through a stand-in for the
student's checkpointing.py, so that a bug there does not count twice. The stand-in can stop the job
at a save, and can make a checkpoint count as damaged.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autograder.criteria.common.launched import find_script, write_to
from autograder.criteria.common.script_worker import ScriptError, work
from autograder.criteria.common.survivors import wait_for_ends
from autograder.criteria.criterion import Values
from autograder.criteria.not_started import is_not_started
from minidist.processes.fork_server import Child, fork
from minidist.processes.ports import free_port
from minidist.processes.tree import descendants

NODES = 2
PER_NODE = 2  # processes per node under torchrun; a node that is killed has only one process
RUN_DEADLINE_S = 90.0
GRACE_S = 10.0  # after one node has failed, the other node gets this long to end

STAND_IN = """
import io, os, threading, time
from pathlib import Path
import torch

def _bytes_of(state):
    torch.save(state, file := io.BytesIO())
    return file.getvalue()

def save_checkpoint(folder, step, state, keep=3):
    folder, rank = Path(folder), os.environ.get("RANK")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"saved-{step}-by-{rank}").touch()
    if keep < 2:
        (folder / f"keep-{keep}").touch()
    if threading.current_thread() is not threading.main_thread():
        before, end_s = _bytes_of(state), time.monotonic() + 1.0
        while time.monotonic() < end_s and _bytes_of(state) == before:
            time.sleep(0.02)  # training goes on: is the state a copy?
    path = folder / f"stand-in-{step}.pt"
    unfinished = folder / f"unfinished-{rank}"
    torch.save(state, unfinished)
    unfinished.replace(path)
    if (folder / f"stop-{step}").exists():
        (folder / "stopped").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)
    return path

def load_newest(folder):
    steps = [int(path.stem.split("-")[2]) for path in Path(folder).glob("stand-in-*.pt")]
    steps = [step for step in steps if not Path(folder, f"damaged-{step}").exists()]
    if not steps:
        return None
    path = Path(folder, f"stand-in-{max(steps)}.pt")
    return max(steps), torch.load(path, map_location="cpu", weights_only=False)
"""


class NodeDeath(NamedTuple):
    """When the only rank of a node dies: in which step, counted from 1, and where in it."""

    step: int
    moment: str


DEATHS = ("in its forward pass", "before it changes the parameters", "when it has changed them")


class NodesJob:
    """A folder with the script, the stand-in, a data file per node, and the shared checkpoints."""

    def __init__(self, path: Any, inputs: Values, folder: Path) -> None:
        script = find_script(path)
        self.name, self.inputs, self.folder = script.name, inputs, folder
        self.codes: list[int | None] = []  # the nodes' exit codes, set by `wait`
        self.checkpoints = folder / "checkpoints"
        shutil.copy(script, folder / script.name)
        (folder / "checkpointing.py").write_text(STAND_IN)
        self.write_data(0)

    def write_data(self, first_step: int, *, shared: bool = False) -> None:
        """Writes each node's data: rows from `first_step` on; all other rows are nan.

        Args:
            shared: every node has all rows, else only its own.
        """
        batch = self.inputs["job"]["batch-size"]
        for node in range(NODES):
            arrays: Any = {k: v.copy() for k, v in self.inputs.items() if isinstance(v, np.ndarray)}
            step, place = np.divmod(np.arange(len(arrays["x"])), batch)
            others = np.zeros(len(step), bool) if shared else place // (batch // NODES) != node
            absent = others | (step < first_step)
            arrays["x"][absent] = np.nan
            arrays["y"][absent] = np.nan
            np.savez(self.folder / f"data-{node}.npz", **arrays)

    def arguments(self, node: int) -> list[str]:
        """The script's arguments on a node."""
        options = [f"--{k}={v}" for k, v in self.inputs["job"].items()]
        return [
            f"--data={self.folder / f'data-{node}.npz'}",
            f"--out={self.folder / f'out-{node}.npz'}",
            f"--checkpoints={self.checkpoints}",
            *options,
        ]

    def start(self, node: int, port: int, *, agent: bool, death: NodeDeath | None = None) -> Child:
        """Starts a node: torchrun's agent and its workers, or a single rank without an agent.

        Args:
            death: that of the node's single rank.
        """
        given = (self.log(node), str(self.folder / self.name), self.arguments(node))
        place = {"cwd": self.folder, "new_session": True}
        if agent:
            return fork(be_agent, *given, node, port, env=_environment(), **place)
        more = {
            "RANK": node,
            "WORLD_SIZE": NODES,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": NODES,
            "MASTER_PORT": port,
            "MASTER_ADDR": "127.0.0.1",
        }
        # Every launcher sets these variables in a rank's environment.
        env = _environment() | {k: str(v) for k, v in more.items()}
        return fork(be_rank, *given, death, env=env, **place)

    def log(self, node: int) -> Path:
        return self.folder / f"log-{node}.txt"

    def failure(self, what: str) -> Exception:
        """The error for a script that did `what`; it shows what the nodes said last."""
        told: dict[str, list[int]] = {}
        for node in range(NODES):
            text = self.log(node).read_text(errors="replace")
            if is_not_started(text):
                return NotImplementedError()
            told.setdefault(first_traceback(text) or text[-900:] or "nothing", []).append(node)
        ends = [f"node {n} {end}" for n, code in enumerate(self.codes) if (end := _end(code))]
        what = "; ".join([what, *ends])
        texts = [f"--- node {', '.join(map(str, nodes))} said:\n{t}" for t, nodes in told.items()]
        return RuntimeError("\n".join([f"{self.name} {what}", *texts]))

    def clear(self) -> None:
        """Removes what runs have left: checkpoints, results, logs."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        self.checkpoints.mkdir()
        for file in (*self.folder.glob("out-*.npz"), *self.folder.glob("log-*.txt")):
            file.unlink()

    def saves(self) -> list[str]:
        """The names of the marks that calls of save_checkpoint have left, sorted."""
        return sorted(p.name for p in self.checkpoints.glob("saved-*"))

    def results(self, what: str = "") -> Values:
        """The losses and parameters in the --out file of node 0.

        Args:
            what: when the job ran, in words.
        """
        out = self.folder / "out-0.npz"
        if not out.is_file():
            raise self.failure(f"wrote no file to rank 0's --out{what}")
        with np.load(out, allow_pickle=False) as saved:
            wanted = {"losses", *(k for k in self.inputs if k[0] == "p" and k[1:].isdigit())}
            return {k: saved[k] for k in saved.files if k in wanted}


def steps_saved(marks: Iterable[str], rank: int | None = None) -> list[int]:
    """The steps for which a rank, or any, called save_checkpoint, from the marks of its calls."""
    words = [mark.split("-") for mark in marks]
    calls = [(int(w[1]), w[3]) for w in words if len(w) == 4 and w[1].isdigit()]
    return sorted({step for step, by in calls if rank is None or by == str(rank)})


def _end(code: int | None) -> str:
    """Names the signal in an exit code, which is -number or 128 + number; "" if there is none."""
    for number, words in ((-(code or 0), "was ended by"), ((code or 0) - 128, "ended as if by")):
        if number in set(signal.Signals):
            return f"{words} {signal.Signals(number).name} (exit code {code})"
    return ""


def first_traceback(text: str) -> str:
    """The first traceback in an output, which is the script's own; launchers add more."""
    _, found, rest = text.partition("Traceback (most recent call last):\n")
    if not found:
        return ""
    lines = rest.splitlines()
    end = next((n for n, line in enumerate(lines) if line[:1].strip()), len(lines) - 1)
    return "\n".join(lines[: end + 1])[-1500:]


def _environment() -> dict[str, str]:
    """This process's environment, without variables of torchrun and minidist, without GPUs."""
    ours = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "GROUP_",
        "ROLE_",
        "MASTER_",
        "TORCHELASTIC_",
        "MINIDIST_",
        "NODE_RANK",
        "PET_",
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    # Two nodes on one machine would both take its first GPU, which nccl refuses.
    return env | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def be_rank(
    _: Any, log: Path, script: str, arguments: list[str], death: NodeDeath | None = None
) -> None:
    """Runs the script as the rank that the environment describes."""
    write_to(log)
    if death is not None:
        _prepare(death)
    _work(script, arguments)


def _prepare(death: NodeDeath) -> None:
    steps_done = 0

    def die_in(step: int, moment: str) -> None:
        if death == (step, moment):
            os.kill(os.getpid(), signal.SIGKILL)

    def count(*_: Any) -> None:
        nonlocal steps_done
        steps_done += 1
        die_in(steps_done, DEATHS[2])

    register_module_forward_pre_hook(lambda *_: die_in(steps_done + 1, DEATHS[0]))
    register_optimizer_step_pre_hook(lambda *_: die_in(steps_done + 1, DEATHS[1]))
    register_optimizer_step_post_hook(count)


def be_agent(_: Any, log: Path, script: str, arguments: list[str], node: int, port: int) -> None:
    """Runs torchrun's agent of one node; forked workers need not import torch again."""
    write_to(log)
    config = LaunchConfig(
        min_nodes=NODES,
        max_nodes=NODES,
        nproc_per_node=PER_NODE,
        run_id="none",
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": node, "timeout": RUN_DEADLINE_S},
        local_addr="127.0.0.1",
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, _work)(script, arguments)
    except ChildFailedError:  # the script has printed the reason
        sys.exit(1)


def _work(script: str, arguments: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # the fork inherited the agent's handlers
    try:
        work(script, arguments)
    except ScriptError as error:
        sys.exit(error.code)


@contextlib.contextmanager
def nodes(
    job: NodesJob, *, torchrun: bool, death: NodeDeath | None = None
) -> Iterator[list[Child]]:
    """Runs both nodes of a job, with or without torchrun's agents; kills them at the end.

    Args:
        death: that of node 1.
    """
    port = free_port()
    processes: list[Child] = []
    try:
        for node in range(NODES):
            dies = death if node == 1 else None
            processes.append(job.start(node, port, agent=torchrun, death=dies))
        yield processes
    finally:
        kill_trees([process.pid for process in processes])
        for process in processes:
            process.join(10.0)
            process.close()


def kill_trees(pids: list[int]) -> None:
    """Kills processes and all their descendants without warning, as a power cut would."""
    family: list[int] = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)  # so that it starts no new processes meanwhile
        family += [pid, *descendants(pid)]
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:  # processes that outlived their parent but kept its group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def wait(job: NodesJob, processes: list[Child], what: str = "") -> None:
    """Waits until all nodes have ended, or until GRACE_S after a node has failed.

    Args:
        what: when the job runs, in words.

    Raises:
        RuntimeError: no node has failed, and some are still running at the deadline.
    """
    job.codes = wait_for_ends(processes, RUN_DEADLINE_S, GRACE_S)
    late = [str(node) for node, code in enumerate(job.codes) if code is None]
    if late and all(code in (None, 0) for code in job.codes):
        where = f"node{'s' * (len(late) > 1)} {', '.join(late)}"
        raise job.failure(f"was still running on {where} after {RUN_DEADLINE_S:.0f} s{what}")
