"""A course of its own for a test: nothing that grading leaves lands in the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAB = "lab1_ddp"


def copy_package(package: Path, to: Path) -> None:
    """Copies sources alone: other tests write and rename compiled files beside them."""
    shutil.copytree(package, to, ignore=shutil.ignore_patterns("__pycache__"))


@dataclass(frozen=True)
class TestCourse:
    """A folder with the released labs and nbgrader's settings."""

    __test__ = False
    root: Path
    lab: str = LAB

    @classmethod
    def make(cls, root: Path, lab: str = LAB) -> TestCourse:
        root.mkdir(exist_ok=True)
        shutil.copy(ROOT / "nbgrader_config.py", root)
        for name in ("labs", "solutions"):
            shutil.copytree(ROOT / name, root / name)
        course = cls(root, lab)
        course.run("-m", "autograder", "init")
        return course

    def run(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Runs `python …` in the course; fails the test if it ends with another code."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=os.environ | {"AUTOGRADER_COURSE": str(self.root)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        said = f"{arguments}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert code is None or done.returncode == code, f"ended with {done.returncode}: {said}"
        return done

    def grade(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """`autograder grade … --lab LAB`; one record per student."""
        path = self.root / "records.json"
        path.unlink(missing_ok=True)
        self.run(
            *("-m", "autograder", "grade", *arguments, "--lab", self.lab, "--json", str(path)),
            code=code,
        )
        records = json.loads(path.read_text()) if path.exists() else []
        return {record["student"]: record for record in records}

    def submit(self, student: str, content: bytes) -> Path:
        """Hands in a notebook."""
        path = self.root / "handed_in" / student / f"{self.lab}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


def statuses(record: dict[str, Any]) -> dict[str, str]:
    """Status of every criterion of a record."""
    return {criterion["name"]: criterion["status"] for criterion in record["criteria"]}
