"""Criteria for task 5 of lab 5: the training script on two nodes, and after a node was lost.

Rank 0 starts new processes: two "nodes" on this machine, each with its own data file, in which the
other node's rows are nan. The script saves its checkpoints through a stand-in for the student's
checkpointing.py, so that a bug there does not count twice. The stand-in also stops the job at a
drawn step, where both nodes are killed. When the job is started again, the stand-in ignores the
last checkpoint, as if this checkpoint were damaged.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autograder.criteria.common import oracle
from autograder.criteria.common.launched import write_to
from autograder.criteria.common.script_worker import ScriptError, work
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from minidist.processes.fork_server import Child, fork
from minidist.processes.ports import free_port
from minidist.processes.tree import descendants

NODES = 2
PER_NODE = 2  # processes per node under torchrun; a node that is killed has only one process
RUN_DEADLINE_S = 90.0
GRACE_S = 10.0  # after one node has failed, the other node gets this long to end
MOMENTUM = 0.9

STAND_IN = """
import os, time
from pathlib import Path
import torch

def save_checkpoint(folder, step, state, keep=3):
    folder, rank = Path(folder), os.environ.get("RANK")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"saved-{step}-by-{rank}").touch()
    path = folder / f"stand-in-{step}.pt"
    if rank == "0":
        torch.save(state, path)
        if (folder / f"stop-{step}").exists():
            (folder / "stopped").touch()
            time.sleep(200)
    return path

def load_newest(folder):
    steps = [int(path.stem.split("-")[2]) for path in Path(folder).glob("stand-in-*.pt")]
    steps = [step for step in steps if not Path(folder, f"damaged-{step}").exists()]
    if not steps:
        return None
    path = Path(folder, f"stand-in-{max(steps)}.pt")
    return max(steps), torch.load(path, map_location="cpu", weights_only=False)
"""


def draw(source: Draw) -> list[Values]:
    """A model, rows for every step, and how often checkpoints are saved; all for rank 0."""
    rng = source.shared()
    sizes = (int(rng.integers(3, 7)), int(rng.integers(4, 9)), 1)
    every = int(rng.integers(2, 5))
    batch = NODES * PER_NODE * int(rng.integers(1, 4))
    steps = 3 * every + int(rng.integers(1, every))
    inputs = oracle.draw_parameters(rng, sizes) | oracle.draw_batch(rng, steps * batch, sizes)
    inputs["job"] = {
        "steps": steps,
        "every": every,
        "batch-size": batch,
        "lr": float(rng.uniform(0.05, 0.2)),
    }
    return [inputs] + [{} for _ in range(source.world_size - 1)]


# --- starting and ending nodes -------------------------------------------------------------------


class _Job:
    """A folder with the script, the stand-in, a data file per node, and the shared checkpoints."""

    def __init__(self, path: Any, inputs: Values, folder: Path) -> None:
        script = Path(path)
        if not script.is_file():
            raise FileNotFoundError(
                f"{script}: expected a script in {Path.cwd()}; run the cell above"
            )
        self.name, self.inputs, self.folder = script.name, inputs, folder
        self.checkpoints = folder / "checkpoints"
        shutil.copy(script, folder / script.name)
        (folder / "checkpointing.py").write_text(STAND_IN)
        self.write_data(0)

    def write_data(self, first_step: int) -> None:
        """Writes each node's data: its own rows from `first_step` on; all other rows are nan."""
        batch = self.inputs["job"]["batch-size"]
        for node in range(NODES):
            arrays: Any = {k: v.copy() for k, v in self.inputs.items() if isinstance(v, np.ndarray)}
            step, place = np.divmod(np.arange(len(arrays["x"])), batch)
            absent = (place // (batch // NODES) != node) | (step < first_step)
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

    def start(self, node: int, port: int, *, agent: bool) -> Child:
        """Starts a node: torchrun's agent and its workers, or a single rank without an agent."""
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
        return fork(be_rank, *given, env=env, **place)

    def log(self, node: int) -> Path:
        return self.folder / f"log-{node}.txt"

    def failure(self, what: str) -> Exception:
        """The error for a script that did `what`; it shows the end of both nodes' output."""
        texts = []
        for node in range(NODES):
            text = self.log(node).read_text(errors="replace")
            if "\nNotImplementedError" in text or "]: NotImplementedError" in text:
                return NotImplementedError(f"{self.name}: not written yet")
            texts.append(f"--- node {node}:\n{text[-900:]}")
        return RuntimeError("\n".join([f"{self.name} {what}:", *texts]))

    def results(self) -> Values:
        """The losses and parameters in the --out file of node 0."""
        out = self.folder / "out-0.npz"
        if not out.is_file():
            raise self.failure("wrote no file to rank 0's --out")
        with np.load(out, allow_pickle=False) as saved:
            wanted = {"losses", *(k for k in self.inputs if k[0] == "p" and k[1:].isdigit())}
            return {k: saved[k] for k in saved.files if k in wanted}


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


def be_rank(_: Any, log: Path, script: str, arguments: list[str]) -> None:
    """Runs the script as the rank that the environment describes."""
    write_to(log)
    _work(script, arguments)


def be_agent(_: Any, log: Path, script: str, arguments: list[str], node: int, port: int) -> None:
    """Runs torchrun's agent of one node; it forks its workers because torch is imported."""
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
def _nodes(job: _Job, *, torchrun: bool) -> Iterator[list[Child]]:
    """Runs both nodes of a job, with or without torchrun's agents; kills them at the end."""
    port = free_port()
    processes: list[Child] = []
    try:
        for node in range(NODES):
            processes.append(job.start(node, port, agent=torchrun))
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


def _wait(job: _Job, processes: list[Child]) -> None:
    """Waits until all nodes have ended, or until GRACE_S after a node has failed.

    Raises:
        RuntimeError: no node has failed, and some are still running at the deadline.
    """
    end_s = time.monotonic() + RUN_DEADLINE_S
    while any(process.poll() is None for process in processes):
        now_s = time.monotonic()
        if any(process.poll() not in (None, 0) for process in processes):
            end_s = min(end_s, now_s + GRACE_S)
        if now_s > end_s:
            if all(process.poll() in (None, 0) for process in processes):
                raise job.failure(f"was still running after {RUN_DEADLINE_S:.0f} s")
            return
        time.sleep(0.05)


# --- node_script ---------------------------------------------------------------------------------


def observe_script(path: Any, inputs: Values, context: Context) -> Values:
    """Runs the job with two torchrun agents on this machine, from the first step to the last."""
    if context.rank != 0:
        return {}
    with tempfile.TemporaryDirectory(prefix="nodes-") as name:
        job = _Job(path, inputs, Path(name))
        with _nodes(job, torchrun=True) as processes:
            _wait(job, processes)
        marks = (
            [p.name for p in job.checkpoints.glob("saved-*")] if job.checkpoints.is_dir() else []
        )
        return job.results() | {
            "saved": sorted(marks),
            "other_out": (job.folder / "out-1.npz").exists(),
        }


def expected_training(inputs: Values) -> tuple[list[np.ndarray], np.ndarray]:
    """Final parameters and all losses of one process that trains on the global batches."""
    job = inputs["job"]
    model = oracle.mlp(inputs, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=job["lr"], momentum=MOMENTUM)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10 / (10 + step))
    losses = []
    for step in range(job["steps"]):
        rows = slice(step * job["batch-size"], (step + 1) * job["batch-size"])
        x, y = (torch.from_numpy(inputs[k][rows]).double() for k in "xy")
        optimizer.zero_grad()
        loss = oracle.mse(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return [p.detach().numpy() for p in model.parameters()], np.array(losses)


def judge_script(case: Case) -> list[Finding]:
    """Losses and parameters equal those of one process, and only rank 0 writes files."""
    given, answer = case.inputs[0], case.answers[0]
    findings: list[Finding] = []
    _judge_training(
        findings,
        given,
        answer,
        (
            "Rank r takes the r-th of the equal parts of each global batch, gradients and the "
            "reported loss are means over all ranks. (Each node has only its own rows here.)"
        ),
    )
    job, saved = given["job"], answer.get("saved")
    steps = range(job["every"], job["steps"] + 1, job["every"])
    wanted = {f"saved-{step}-by-0" for step in steps}
    marks = set(saved) if isinstance(saved, list) else set()
    if missing := sorted(wanted - marks):
        findings.append(
            Finding(
                f"--every={job['every']} --steps={job['steps']}: save_checkpoint should be called "
                f"with steps {[*steps]}, the number of steps done; {len(missing)} of these calls "
                "did not come.",
                0,
            )
        )
    if any(not str(mark).endswith("-by-0") for mark in marks):
        findings.append(
            Finding(
                "a rank other than 0 called save_checkpoint: two writers of one file spoil it. All "
                "ranks have the same state, so rank 0 saves it.",
                0,
            )
        )
    if answer.get("other_out") is not False:
        findings.append(
            Finding("rank 1 wrote --out too. On another node local rank 0 is not rank 0.", 0)
        )
    return findings


def _judge_training(findings: list[Finding], given: Values, answer: Values, hint: str) -> None:
    parameters, losses = expected_training(given)
    if wrong := oracle.differs(0, "losses in --out", answer.get("losses"), losses, hint=hint):
        findings.append(wrong)
        return
    for i, expected in enumerate(parameters):
        if wrong := oracle.differs(
            0,
            f"p{i} in --out",
            answer.get(f"p{i}"),
            expected,
            hint=hint,
            terms=[given[f"p{i}"]],
        ):
            findings.append(wrong)
            break


# --- node_lost -----------------------------------------------------------------------------------


def observe_lost(path: Any, inputs: Values, context: Context) -> Values:
    """Kills both nodes after the second checkpoint; resumes from the first."""
    if context.rank != 0:
        return {}
    every = inputs["job"]["every"]
    with tempfile.TemporaryDirectory(prefix="nodes-") as name:
        job = _Job(path, inputs, Path(name))
        job.checkpoints.mkdir()
        (job.checkpoints / f"stop-{2 * every}").touch()
        with _nodes(job, torchrun=False) as processes:
            _wait_for_stop(job, processes)
        # Only now, because no process of the first run is alive: damage its last checkpoint.
        (job.checkpoints / f"stop-{2 * every}").unlink()
        (job.checkpoints / f"damaged-{2 * every}").touch()
        for out in job.folder.glob("out-*.npz"):
            out.unlink()
        job.write_data(every)
        with _nodes(job, torchrun=False) as processes:
            _wait(job, processes)
        return job.results()


def _wait_for_stop(job: _Job, processes: list[Child]) -> None:
    """Waits until the stand-in has stopped the job at its second checkpoint.

    Raises:
        RuntimeError: the job ended, or the deadline passed, before the second checkpoint.
    """
    end_s = time.monotonic() + RUN_DEADLINE_S
    while not (job.checkpoints / "stopped").exists():
        ended = all(process.poll() is not None for process in processes)
        failed = any(process.poll() not in (None, 0) for process in processes)
        if failed:
            end_s = min(end_s, time.monotonic() + GRACE_S)
        if ended or time.monotonic() > end_s:
            step = 2 * job.inputs["job"]["every"]
            raise job.failure(f"never called save_checkpoint for step {step} on rank 0")
        time.sleep(0.05)


def judge_lost(case: Case) -> list[Finding]:
    """The loss curve of the killed and resumed run equals that of a run without a break."""
    given, answer = case.inputs[0], case.answers[0]
    every, steps = given["job"]["every"], given["job"]["steps"]
    _, losses = expected_training(given)
    got = answer.get("losses")
    hint = "The state needs model, optimizer, scheduler, step and the losses so far."
    if isinstance(got, np.ndarray) and got.dtype.kind == "f" and got.ndim == 1:
        if got.size and np.isnan(got).any():
            hint = (
                "It began again at step 0, whose data is gone by now: load_newest() first, and "
                "begin at the step that it gives, on every rank."
            )
        elif len(got) == steps - every:
            hint = "The losses before the break are missing: they belong to the state."
        elif len(got) == steps and not np.allclose(
            got[: every + 1], losses[: every + 1], rtol=1e-3
        ):
            hint = "The first loss after the break differs: the model is not the saved one."
        elif len(got) == steps and not np.allclose(got, losses, rtol=1e-3):
            hint = (
                "The curve leaves its path soon after the break: is the optimizer's momentum "
                "restored, and how far the scheduler had come?"
            )
    findings: list[Finding] = []
    _judge_training(
        findings,
        given,
        answer,
        (
            f"(Both nodes were killed after step {2 * every}, the checkpoint of that step was "
            f"damaged, and the job was started again: it should go on from step {every}.) {hint}"
        ),
    )
    return findings
