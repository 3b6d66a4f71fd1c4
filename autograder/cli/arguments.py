"""Exit codes and argument types that several commands share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
EXCHANGE = "exchange"  # `autograder watch exchange` watches nbgrader's exchange, not a folder
# What exit code 1 of a command means, besides a failure of the machine, such as a full disk.
FAILURES = {
    "init": "",
    "verify": "a lab is not proven",
    "release": "",
    "doctor": "something is missing",
    "collect": "",
    "grade": "somebody was not graded, by our failure (INFRA)",
    "watch": "with `--once`, somebody was not graded or got no feedback, by our failure",
    "replay": "a criterion ends in another way than in the record",
    "status": "",
    "publish": "somebody who has a grade is not in the file, or nobody has one",
    "roster": "",
    "extend": "",
}


def exit_codes() -> list[tuple[int, str]]:
    """Every exit code with its meaning; `--help` and the guide show this table."""
    failures = ", ".join(f"{what} (`{name}`)" for name, what in FAILURES.items() if what)
    return [
        (EXIT_OK, "done"),
        (EXIT_FAILED, f"the grader or the machine failed, or: {failures}"),
        (EXIT_USAGE, "refused, and why is told: wrong usage, or what was given cannot be taken"),
        (EXIT_INTERRUPTED, "interrupted; what was graded is kept"),
    ]


def add_how_to_grade(command: argparse.ArgumentParser) -> None:
    """Adds the options that `grade` and `watch` share: how many at once, where, which sandbox."""
    command.add_argument(
        "--jobs",
        type=positive,
        help="submissions at once (default: what cores and GPUs are enough for)",
    )
    command.add_argument(
        "--executor",
        choices=("pool", "slurm", "local"),
        default="pool",
        help="processes of this one (default), jobs of a Slurm cluster ([slurm] in course.toml), "
        "or the same jobs without Slurm",
    )
    add_trusted(command, "grade")


def add_trusted(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument(
        "--trusted", action="store_true", help=f"{what} without a sandbox where there is none"
    )


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def writable(text: str) -> Path:
    """A path that can be written to; checked before grading, which may take an hour."""
    path = Path(text)
    if text == "-":
        return path  # standard output
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"no folder {path.parent}: {error.strerror}") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, and {path} is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written to")
    return path
