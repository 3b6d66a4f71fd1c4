"""Jobs of `autograder grade`, through submitit: on Slurm, or as processes of this machine.

submitit writes the batch scripts and submits them. For Slurm jobs, submitit is never asked for
states: it would ask Slurm once per job. Nor is it ever asked for return values, which are pickles
from a machine that ran submissions. One `squeue` asks about all jobs together, and one `sacct`
about the jobs that `squeue` no longer knows.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from autograder.batch.slurm.on_node import run_task
from autograder.box.gpus import ALL, VISIBLE, divide, visible_gpus
from autograder.course.slurm_options import SlurmOptions
from autograder.criteria.limits import Limits
from autograder.signals import handling

COMMAND_WITHIN_S = 60.0
CANCEL_WITHIN_S = 60.0
QUEUED, RUNNING, ENDED = "queued", "running", "ended"
_SIGNAL_S = 30  # Slurm signals a job this long before its time limit; the job ends itself earlier

# End state of a job -> (what it means, whether a new job may do better).
ENDS = {
    "BOOT_FAIL": ("its node did not start", True),
    "CANCELLED": ("somebody cancelled it", False),
    "COMPLETED": ("it ended, and no result came", True),
    "DEADLINE": ("it could not be done before its deadline", False),
    "FAILED": ("it failed before it could say why", True),
    "INTERRUPTED": ("its process was killed", True),
    "LAUNCH_FAILED": ("its node could not start it", True),
    "LOST": ("Slurm does not know it any more", True),
    "NODE_FAIL": ("its node failed", True),
    "OUT_OF_MEMORY": ("it had too little memory: raise `memory` of [slurm] in course.toml", True),
    "PREEMPTED": ("another job took its place", True),
    "REVOKED": ("another cluster took it", True),
    "TIMEOUT": ("Slurm ended it at its time limit", True),
}
_NODES_FAULT = frozenset({"BOOT_FAIL", "COMPLETED", "FAILED", "LAUNCH_FAILED", "NODE_FAIL"})
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"})
# Messages of sbatch if the controller is away or busy; it may accept the same job later.
_AWAY = re.compile(
    r"unable to contact|connection (refused|timed out|reset)|socket timed out|zero bytes|"
    r"communication (failure|connection)|temporarily|slurm controller|try again",
    re.IGNORECASE,
)
_TOO_MANY = re.compile(r"limit|too many|array", re.IGNORECASE)


class Refused(Exception):
    """Slurm did not accept jobs; the message is Slurm's.

    Attributes:
        away: the controller did not answer, so the same jobs may be submitted again.
        too_many: Slurm may accept fewer jobs at once.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.away = bool(_AWAY.search(message))
        self.too_many = not self.away and bool(_TOO_MANY.search(message))


@dataclass(frozen=True)
class Seen:
    """The last known state of a job.

    Attributes:
        phase: "queued", "running" or "ended".
        state: Slurm's name of the state.
        note: why the job waits, if it does.
    """

    phase: str
    state: str
    node: str = ""
    note: str = ""

    def tell(self) -> str:
        """How the job ended, in one sentence."""
        where = f" on {self.node}" if self.node else ""
        return f"{self.state}{where}: {ENDS.get(self.state, ('it ended', True))[0]}"

    @property
    def may_try_again(self) -> bool:
        return ENDS.get(self.state, ("", True))[1]

    @property
    def may_be_its_node(self) -> bool:
        """Whether the node may be to blame, so that a different node may do better."""
        return self.state in _NODES_FAULT


class Backend(Protocol):
    """Where jobs run.

    Attributes:
        array_size: maximum number of jobs in one `submit`.
        capacity: maximum number of submitted jobs that have not ended.
    """

    array_size: int
    capacity: int

    def submit(self, tasks: Sequence[Path], avoid: Collection[str] = ()) -> list[str]:
        """Submits a job for each task, on no node in `avoid`; returns the job ids.

        Raises:
            Refused: the jobs were not accepted.
        """
        ...

    def look(self, ids: Collection[str]) -> Mapping[str, Seen] | None:
        """The states of the known jobs, or None if there was no answer."""
        ...

    def cancel(self, ids: Collection[str] | None = None) -> bool:
        """Cancels these jobs, or all jobs of this grader if `ids` is None; whether that worked."""
        ...


class SlurmJobs:
    """Job arrays on a Slurm cluster; all jobs have the same name."""

    def __init__(self, name: str, folder: Path, options: SlurmOptions) -> None:
        self.name, self.folder, self.options = name, folder, options
        self.array_size = min(options.array_size, _max_array_size())
        # Slurm limits how many jobs of an array run at once, but not how many single jobs do.
        self.capacity = self.array_size if self.array_size > 1 else options.array_parallelism
        self._parameters: dict[str, Any] = {}

    def ask_for(self, ranks: int, limits: Limits) -> SlurmJobs:
        """Sets what a job asks for: one task, with one processor per rank unless `cpus` is set."""
        options = self.options
        cpus = options.cpus or ranks
        names = ("partition", "account", "qos", "constraint", "nodelist", "gres")
        more: dict[str, Any] = {"no-requeue": True, "mem": f"{options.megabytes(limits)}M"}
        if options.reservation:
            more["reservation"] = options.reservation
        self._parameters = {
            "job_name": self.name,
            "time": options.minutes(limits),
            "nodes": 1,
            "ntasks_per_node": 1,
            "cpus_per_task": cpus,
            # Since Slurm 22.05, srun does not inherit this option from sbatch.
            "srun_args": [f"--cpus-per-task={cpus}"],
            "signal_delay_s": _SIGNAL_S,
            "array_parallelism": options.array_parallelism,
            "wckey": None,
            "additional_parameters": more,
            **{name: value for name in names if (value := getattr(options, name))},
        }
        if options.gpus:
            self._parameters["gpus_per_node"] = options.gpus
        if options.exclusive:
            self._parameters["exclusive"] = True
        if options.setup:
            self._parameters["setup"] = list(options.setup)
        return self

    def submit(self, tasks: Sequence[Path], avoid: Collection[str] = ()) -> list[str]:
        exclude = ",".join(filter(None, [self.options.exclude, *sorted(avoid)]))
        more = {"exclude": exclude} if exclude else {}
        try:
            executor = submitit.SlurmExecutor(folder=self.folder)
            executor.update_parameters(**self._parameters, **more)
            jobs = executor.map_array(run_task, [str(task) for task in tasks])
        except (FailedJobError, FailedSubmissionError, RuntimeError, OSError) as error:
            raise Refused(_last_words(str(error))) from None
        return [job.job_id for job in jobs]

    def look(self, ids: Collection[str]) -> Mapping[str, Seen] | None:
        said = _run(
            [
                "squeue",
                "--noheader",
                "--array",
                "--states=all",
                f"--name={self.name}",
                "--format=%i|%T|%N|%r",
            ],
        )
        if said is None:
            return None
        seen = dict(_read(said))
        if gone := [each for each in ids if each not in seen]:
            parents = ",".join(sorted({each.partition("_")[0] for each in gone}))
            said = _run(["sacct", "-X", "-n", "-P", "-j", parents, "-o", "JobID,State,NodeList"])
            known = dict(_read(said or ""))
            seen |= {each: known[each] for each in gone if each in known}
        return seen

    def cancel(self, ids: Collection[str] | None = None) -> bool:
        if ids is not None:
            return _run(["scancel", *sorted(ids)]) is not None
        # Cancel by name: only our jobs have it, and a job may exist whose id never reached us.
        _run(["scancel", f"--name={self.name}"])
        ends_at = time.monotonic() + CANCEL_WITHIN_S
        while time.monotonic() < ends_at:
            said = _run(["squeue", "--noheader", f"--name={self.name}", "--format=%i"])
            if said is not None and not said.strip():
                return True
            time.sleep(0.2)
        return False


class LocalJobs:
    """Runs the same jobs as processes of this machine, a few at a time."""

    def __init__(self, folder: Path, jobs: int, time_s: int) -> None:
        self.folder, self._time_s = folder, time_s
        self.array_size, self.capacity = 1, jobs
        self._jobs: dict[str, Any] = {}
        # submitit knows GPUs by number only, and its jobs see only the GPUs that they are given.
        gpus = [name for name in visible_gpus() if name.isdecimal()]
        shares = divide(gpus, jobs)
        os.environ.update({ALL: shares[0][ALL]} if gpus else {})  # the jobs inherit this
        self._shares = [[int(n) for n in s.get(VISIBLE, "").split(",") if n] for s in shares]
        self._share_of: dict[str, int] = {}

    def submit(self, tasks: Sequence[Path], avoid: Collection[str] = ()) -> list[str]:
        return [self._submit(task) for task in tasks]

    def _submit(self, task: Path) -> str:
        for name in [name for name in self._share_of if self._jobs[name].done()]:
            del self._share_of[name]
        taken = Counter(self._share_of.values())
        share = min(range(len(self._shares)), key=lambda index: taken[index])
        gpus = self._shares[share]
        executor = submitit.LocalExecutor(folder=self.folder)
        executor.update_parameters(
            timeout_min=self._time_s / 60 + 2, gpus_per_node=len(gpus), visible_gpus=gpus
        )
        # submitit cancels with SIGINT. A grader in the background (nohup, cron) ignores SIGINT, and
        # its jobs would inherit that.
        with handling([signal.SIGINT], signal.SIG_DFL, instead_of=signal.SIG_IGN):
            job = executor.submit(run_task, str(task))
        self._jobs[job.job_id], self._share_of[job.job_id] = job, share
        return job.job_id

    def look(self, ids: Collection[str]) -> Mapping[str, Seen] | None:
        states = {"FINISHED": Seen(ENDED, "COMPLETED"), "INTERRUPTED": Seen(ENDED, "INTERRUPTED")}
        return {each: states.get(self._jobs[each].state, Seen(RUNNING, "RUNNING")) for each in ids}

    def cancel(self, ids: Collection[str] | None = None) -> bool:
        chosen = [job for name, job in self._jobs.items() if ids is None or name in ids]
        alive = [job for job in chosen if not job.done()]
        for job in alive:
            with contextlib.suppress(OSError):
                job.cancel()
        ends_at = time.monotonic() + CANCEL_WITHIN_S
        while time.monotonic() < ends_at and not all(job.done() for job in alive):
            time.sleep(0.1)
        return all(job.done() for job in alive)


def cancel_by_name(name: str) -> bool:
    """Cancels the Slurm jobs that a dead grader left, if any; returns whether Slurm answered."""
    return _run(["scancel", f"--name={name}"]) is not None


def _read(said: str) -> list[tuple[str, Seen]]:
    """Parses lines of `squeue` or `sacct`: 12_3|RUNNING|n1|reason."""
    found = []
    for line in said.splitlines():
        name, _, rest = line.strip().partition("|")
        words = [*rest.split("|"), "", "", ""]
        state = (words[0].split() or [""])[0].rstrip("+")  # "CANCELLED by 0" in sacct
        node, note = words[1], words[2]
        if not name or not state:
            continue
        if state == "PENDING" and note.startswith("launch failed"):
            # Slurm holds such a job until an administrator acts; we submit a new job instead.
            found.append((name, Seen(ENDED, "LAUNCH_FAILED", node)))
        elif state in ENDS:
            found.append((name, Seen(ENDED, state, node)))
        elif state in _WAITING:
            found.append((name, Seen(QUEUED, state, "", note)))
        else:  # RUNNING, CONFIGURING, COMPLETING, SUSPENDED, and states of later Slurm versions
            found.append((name, Seen(RUNNING, state, node)))
    return found


def _run(command: Sequence[str]) -> str | None:
    """The output of a Slurm command; None if the command failed or took too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _max_array_size() -> int:
    """The largest array size that Slurm allows: an array's index must be below MaxArraySize."""
    match = re.search(r"MaxArraySize\s*=\s*(\d+)", _run(["scontrol", "show", "config"]) or "")
    return max(1, int(match[1]) - 1) if match else 1000


def _last_words(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if "sbatch:" in line]
    return " ".join(lines) or " ".join(message.split())[-500:]
