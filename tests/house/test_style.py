"""Style, types, and built files: what `make lint` and `make build` look after."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(3000)  # types take 90 s of one core; beside ten processes on two, 1,000 s
@pytest.mark.parametrize(
    ("command", "mends_it"),
    [
        pytest.param("pyright", "", marks=pytest.mark.xdist_group("types")),  # long: begins first
        ("ruff check --quiet", "ruff check --fix"),
        ("ruff format --check --quiet", "ruff format"),
        ("autograder.authoring --check", "make build"),
    ],
)
def test_nothing_is_left_to_do_for(command, mends_it):
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{mends_it}\n{done.stdout}{done.stderr}"
