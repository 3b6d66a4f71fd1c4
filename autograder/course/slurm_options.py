"""The table `[slurm]` of `course.toml`: what `autograder grade --executor slurm` asks Slurm for.

    [slurm]
    partition = "gpu"           also: account, qos, constraint, reservation, nodelist, exclude
    gpus = 1                    of a job's node; or gres = "gpu:a100:1"
    memory = "12 GiB"           of a job
    array_parallelism = 32      submissions that run at once
    setup = ["module load cuda"]

Every key may be left out. A key that is not one of these is refused: a typing error would
otherwise send a class to the wrong partition.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from autograder.criteria.limits import GIB, MIB, Limits

_SIZE = re.compile(r"([1-9]\d{0,5}) ?([MG])iB")
# A margin for Slurm, which ends a job at a whole minute: by then the job has ended itself.
TIME_MARGIN_S = 120
_STARTING_S = 600  # for imports, the box, fresh ranks and a last check, beyond the notebook's time
_OVERHEAD_BYTES = 2 * GIB  # of the grader beside the box


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What a course asks of Slurm; an empty text or 0 leaves it to Slurm or to the lab.

    Attributes:
        partition, account, qos, constraint, reservation, nodelist, exclude, gres: as sbatch's.
        gpus: GPUs of a job.
        cpus: processors of a job; 0 for one a rank.
        memory: bytes of a job; 0 for what the lab's box may use with /tmp and /dev/shm, and 2 GiB.
        exclusive: whether a job has its node for itself.
        time_s: time for one submission; 0 for the time of the lab's notebook and 10 minutes more.
        array_size: submissions in one array at most; 1 for a job of its own each.
        array_parallelism: jobs of an array that run at once.
        tries: jobs for one submission at most.
        backoff_s: wait after a submission's first lost job; twice as long after each further one.
        poll_s: time between two questions to Slurm, each of which is about all jobs.
        settle_s: how long a result may take to be seen here after its job has ended.
        pending_s: how long a job may wait for its turn.
        silent_s: how long Slurm's controller may not answer.
        setup: lines of shell that a job runs first.
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
        """What a job gives one submission of a lab with these limits."""
        return self.time_s or limits.wall_s + _STARTING_S

    def minutes(self, limits: Limits) -> int:
        """The time limit for Slurm, after which nothing can be written any more."""
        return -(-(self.seconds(limits) + TIME_MARGIN_S) // 60)

    def megabytes(self, limits: Limits) -> int:
        """The memory of a job, in Slurm's unit."""
        box_bytes = limits.box_memory_bytes + limits.tmp_bytes + limits.shm_bytes
        return -(-(self.memory or box_bytes + _OVERHEAD_BYTES) // MIB)


def read_slurm(entries: dict[str, Any], where: str) -> SlurmOptions:
    """What the table says.

    Raises:
        ValueError: a key that there is not, or a value that cannot be.
    """
    kinds = {each.name: each.default for each in dataclasses.fields(SlurmOptions)}
    found: dict[str, Any] = {}
    for name, value in entries.items():
        if name not in kinds:
            raise ValueError(f"{where}: {name}: no such key; there are: {', '.join(kinds)}")
        found[name] = _value(name, value, kinds[name], f"{where}: {name}")
    options = SlurmOptions(**found)
    if options.gpus and options.gres:
        raise ValueError(f"{where}: expected gpus or gres, got both")
    return options


def _value(name: str, value: Any, default: Any, where: str) -> Any:
    if name == "setup":
        if not isinstance(value, list) or not all(_is_line(line) for line in value):
            raise ValueError(f'{where}: expected a list of lines such as ["module load cuda"], '
                             f"got {value!r}")  # fmt: skip
        return tuple(value)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{where}: expected true or false, got {value!r}")
        return value
    if isinstance(default, str):
        if not _is_line(value) or " " in value:
            raise ValueError(f"{where}: expected a text without spaces, got {value!r}")
        return value
    size = _SIZE.fullmatch(value) if name == "memory" and isinstance(value, str) else None
    number = int(size[1]) * (GIB if size[2] == "G" else MIB) if size else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        or_size = ' or a size such as "12 GiB"' if name == "memory" else ""
        raise ValueError(f"{where}: expected a whole number from 1 up{or_size}, got {value!r}")
    return number


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value.isprintable()
