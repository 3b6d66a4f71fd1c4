"""What the tests of all labs do: run the solution as a script, make a case for a judge."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from course import ROOT
from leftovers import assert_nothing_left, find_leftovers

from autograder.criteria import lab_names
from autograder.criteria.criterion import Case, Criterion, Lab, Values
from autograder.referee.referee import draw_for
from minidist.emulate.trace import Trace


def sizes(*in_ci: int) -> list[Any]:
    """World sizes at which a solution is run as a script: in CI these, in `make nightly` others."""
    return [
        pytest.param(n, marks=[pytest.mark.nightly] * (n not in in_ci)) for n in (1, 2, 3, 4, 8)
    ]


def labs_and_bonuses() -> list[Any]:
    """Their names, for a slow test: CI runs it for the labs, `make nightly` for bonuses."""
    return [
        pytest.param(n, marks=pytest.mark.nightly if n.startswith("bonus") else pytest.mark.slow)
        for n in lab_names()
    ]


# A rank whose process group outlives `destroy_process_group` (DDP keeps it) may be aborted by torch
# at its very end: a gloo thread gives back a tensor while the interpreter goes (pytorch #190489).
_ABORTED_BY_TORCH = "terminate called without an active exception"


def run_solution(lab: str, num_ranks: int, folder: Path) -> str:
    """What the lab's solution prints under torchrun; it reaches all points and leaves nothing."""
    before = find_leftovers()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for is_last in (False, True):
        done = subprocess.run(
            [
                *command,
                f"--nproc-per-node={num_ranks}",
                str(ROOT / "solutions" / lab / f"{lab}.py"),
            ],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if is_last or done.returncode == 0 or _ABORTED_BY_TORCH not in done.stderr:
            break
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-20000:]
    assert "(100 of 100 points so far)" in done.stdout, done.stdout[-6000:]
    assert_nothing_left(before)
    return done.stdout


class SameUnderEveryKey(dict[str, Any]):
    """An answer of a rank that has one value for whatever a judge looks up."""

    def __init__(self, value: Any) -> None:
        super().__init__(value=value)
        self.value = value

    def get(self, key: str, default: Any = None) -> Any:
        return self.value

    def __getitem__(self, key: str) -> Any:
        return self.value

    def __contains__(self, key: object) -> bool:
        return True


def make_case(
    lab: Lab, criterion: Criterion, answers: Sequence[Values], world_size: int | None = None
) -> Case:
    """What the judge sees when ranks have answered this and sent nothing."""
    world_size = len(answers) if world_size is None else world_size
    draw = draw_for(b"test", lab.name, criterion.name, "test", world_size)
    trace = Trace(world_size=world_size, events=[[] for _ in range(world_size)])
    plan = criterion.plan(draw) if criterion.plan else None
    return Case(world_size, criterion.draw(draw), answers, trace, plan)


def assert_none_confuses(
    lab: Lab, criterion: Criterion, values: Sequence[Any], world_size: int
) -> None:
    """Fails if a criterion passes for ranks with one of these for every answer, or says nothing."""
    for value in values:
        answers = [SameUnderEveryKey(value) for _ in range(world_size)]
        findings = criterion.findings(make_case(lab, criterion, answers))
        assert findings, f"{value!r} for every answer passed"
        assert all(f.message for f in findings)
