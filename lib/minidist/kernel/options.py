"""The front's options, from the command line, the launcher's file and the environment."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidist.kernel.membership import MultiNodeJob, rank_environment, read_job
from minidist.kernel.rank_count import DEFAULT_RANKS, count_ranks

# A unix socket's path has at most 107 bytes; our file names add up to 40 to the directory's path.
MAX_RUN_DIR_BYTES = 66


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """How to start ranks.

    Attributes:
        connection_file: Jupyter's file with addresses and key of this kernel.
        num_ranks: how many ranks a cell runs on.
        job: the nodes that the ranks run on; None for this node alone.
        prefix: a command put before the launcher's own, such as a sandbox's; may be empty.
        env: whole environment of the launcher; None passes the front's on.
        cwd: directory in which the launcher starts; None keeps the front's.
        run_dir: directory of the sockets that ranks connect to; None makes a fresh private one.
        fixed_ranks: cells cannot ask for fresh ranks; a grader can, with a `minidist_request`.
        client: pid of the process that starts the front; the front ends when that process ends.
            None: Jupyter's client.
        deadline_s: longest time of one cell in seconds; None sets no limit.
    """

    connection_file: str
    num_ranks: int = 2
    job: MultiNodeJob | None = None
    prefix: tuple[str, ...] = ()
    env: dict[str, str] | None = None
    cwd: str | None = None
    run_dir: str | None = None
    fixed_ranks: bool = False
    client: int | None = None
    deadline_s: float | None = None
    rank_init: str | None = field(default=None)

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"--ranks: expected a whole number >= 1, got {self.num_ranks}")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ValueError(f"--deadline: expected seconds > 0, got {self.deadline_s}")
        if self.run_dir is not None:
            check_run_dir(self.run_dir)


def check_run_dir(path: str) -> None:
    """Raise ValueError if sockets in `path` could not be bound."""
    size = len(os.fsencode(path))
    if not os.path.isabs(path) or size > MAX_RUN_DIR_BYTES or not os.path.isdir(path):
        raise ValueError(
            f"run_dir: expected an existing absolute directory of at most {MAX_RUN_DIR_BYTES} "
            f"bytes (a unix socket's path is limited to 107), got {path!r} ({size} bytes)"
        )


def make_run_dir() -> str:
    """A fresh directory of mode 0700 whose path is short enough for unix sockets."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), "/tmp"):
        fits = base and len(os.fsencode(base)) + 20 <= MAX_RUN_DIR_BYTES
        if base and fits and os.access(base, os.W_OK | os.X_OK) and os.path.isdir(base):
            return tempfile.mkdtemp(prefix="minidist-", dir=base)
    return tempfile.mkdtemp(prefix="minidist-")


def parse(argv: list[str]) -> KernelOptions:
    """Options from the command line; unknown arguments are ignored, because Jupyter adds some.

    Raises:
        ValueError: a value or the launcher's file is not of the form described in `KernelOptions`.
    """
    parser = argparse.ArgumentParser(prog="python -m minidist.kernel", allow_abbrev=False)
    parser.add_argument("-f", "--f", dest="connection_file", required=True)
    parser.add_argument("--ranks", default=str(DEFAULT_RANKS), help="a number, or auto")
    parser.add_argument("--launcher", default=None, help="JSON file: see KernelOptions")
    parser.add_argument("--deadline", type=float, default=None, help="seconds per cell")
    known, _ = parser.parse_known_args(argv)
    if known.ranks != "auto" and not known.ranks.removeprefix("-").isdecimal():
        raise ValueError(f"--ranks: expected a whole number >= 1 or auto, got {known.ranks!r}")
    num_ranks = count_ranks(os.environ) if known.ranks == "auto" else int(known.ranks)
    job = read_job(os.environ) if known.ranks == "auto" else None
    launcher: dict[str, Any] = {}
    if known.launcher:
        launcher = json.loads(Path(known.launcher).read_text())
        if not isinstance(launcher, dict):
            raise ValueError(f"--launcher: expected a JSON object in {known.launcher}")
    env = launcher.get("env")
    if job is not None:
        _check_job(job, launcher)
        num_ranks *= job.num_nodes
        env = rank_environment(job, os.environ)
    return KernelOptions(
        connection_file=known.connection_file,
        num_ranks=num_ranks,
        job=job,
        prefix=tuple(map(str, launcher.get("prefix", ()))),
        env=None if env is None else {str(k): str(v) for k, v in env.items()},
        cwd=launcher.get("cwd"),
        run_dir=launcher.get("run_dir"),
        fixed_ranks=launcher.get("fixed_ranks") is True,
        client=launcher.get("client"),
        deadline_s=known.deadline,
        rank_init=(os.environ if env is None else env).get("MINIDIST_RANK_INIT"),
        # If the launcher's file gives an environment, as a grader's does, only that one counts.
    )


def _check_job(job: MultiNodeJob, launcher: dict[str, Any]) -> None:
    if job.node != 0:
        raise ValueError(
            f"--ranks auto: expected node 0 of the job, got node {job.node}: the notebook's kernel "
            "runs on node 0, and the others run python -m minidist.kernel.nodes.agent"
        )
    if launcher:
        raise ValueError("--launcher: expected one node: on others, ranks start without it")
