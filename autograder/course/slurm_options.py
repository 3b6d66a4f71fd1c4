"""The table `[slurm]` of `course.toml`: what `autograder grade --executor slurm` asks Slurm for.

    [slurm]
    partition = "gpu"           also: account, qos, constraint, reservation, nodelist, exclude
    gpus = 1                    of a job's node; or gres = "gpu:a100:1"
    memory = "12 GiB"           of a job
    array_parallelism = 32      submissions that run at once
    setup = ["module load cuda"]

Every key is optional. An unknown key is an error, because a typing error could otherwise send a
class to the wrong partition.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from autograder.course.values import OptionsError, whole_number
from autograder.criteria.limits import GIB, MIB, Limits

# Slurm's time limit is this much longer than the job's own, so that the job ends itself before
# Slurm, which counts in whole minutes, ends it.
TIME_MARGIN_S = 120
_STARTING_S = 600  # for imports, the box, fresh ranks and a last check, beyond the notebook's time
_OVERHEAD_BYTES = 2 * GIB  # memory of the grader, which runs outside the box


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What a course asks Slurm for; with an empty text or 0, Slurm or the lab decides.

    Attributes:
        partition, account, qos, constraint, reservation, nodelist, exclude, gres: as in sbatch.
        gpus: GPUs of a job.
        cpus: processors of a job; 0 means one per rank.
        memory: bytes of a job; 0 means what the lab's box, /tmp and /dev/shm may use, plus 2 GiB.
        exclusive: whether no other job may use the job's node.
        time_s: time for one submission; 0 means the lab's time for a notebook plus 10 minutes.
        array_size: maximum number of submissions in one array; 1 means single jobs.
        array_parallelism: jobs of an array that run at once.
        tries: maximum number of jobs for one submission.
        backoff_s: wait after a submission's first lost job; doubles after each further one.
        poll_s: time between two questions to Slurm; each question is about all jobs.
        settle_s: how long a result may take to become visible here after its job has ended.
        pending_s: how long a job may wait in the queue.
        silent_s: how long Slurm's controller may stay silent.
        setup: shell lines that a job runs first.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    nodelist: str = ""
    exclude: str = ""
    gres: str = ""
    gpus: int = 0
    cpus: int = 0
    memory: int = 0
    exclusive: bool = False
    time_s: int = 0
    array_size: int = 1000
    array_parallelism: int = 16
    tries: int = 3
    backoff_s: int = 30
    poll_s: int = 5
    settle_s: int = 60
    pending_s: int = 7 * 24 * 3600
    silent_s: int = 1800
    setup: tuple[str, ...] = ()

    def seconds(self, limits: Limits) -> int:
        """The time that a job gives one submission of a lab with these limits."""
        return self.time_s or limits.wall_s + _STARTING_S

    def minutes(self, limits: Limits) -> int:
        """The time limit for Slurm, after which Slurm ends the job."""
        return -(-(self.seconds(limits) + TIME_MARGIN_S) // 60)

    def megabytes(self, limits: Limits) -> int:
        """The memory of a job in MiB, Slurm's unit."""
        box_bytes = limits.box_memory_bytes + limits.tmp_bytes + limits.shm_bytes
        return -(-(self.memory or box_bytes + _OVERHEAD_BYTES) // MIB)


def read_slurm(entries: dict[str, Any], where: str) -> SlurmOptions:
    """Reads the table.

    Raises:
        OptionsError: a key is unknown, or a value is invalid.
    """
    kinds = {each.name: each.default for each in dataclasses.fields(SlurmOptions)}
    found: dict[str, Any] = {}
    for name, value in entries.items():
        if name not in kinds:
            raise OptionsError(f"{where}: {name}: no such key; there are: {', '.join(kinds)}")
        found[name] = _value(name, value, kinds[name], f"{where}: {name}")
    options = SlurmOptions(**found)
    if options.gpus and options.gres:
        raise OptionsError(f"{where}: expected gpus or gres, got both")
    return options


def _value(name: str, value: Any, default: Any, where: str) -> Any:
    if name == "setup":
        if not isinstance(value, list) or not all(_is_line(line) for line in value):
            raise OptionsError(
                f'{where}: expected a list of lines such as ["module load cuda"], got {value!r}'
            )
        return tuple(value)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise OptionsError(f"{where}: expected true or false, got {value!r}")
        return value
    if isinstance(default, str):
        if not _is_line(value) or " " in value:
            raise OptionsError(f"{where}: expected a text without spaces, got {value!r}")
        return value
    return whole_number(value, where, or_size=name == "memory")


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()
