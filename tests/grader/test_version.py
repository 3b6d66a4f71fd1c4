"""What a grade depends on: an edit there grades again, and an edit elsewhere does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from course import copy_package
from source import imports_of

import autograder
import minidist
from autograder.criteria import lab_names
from autograder.records import version
from autograder.records.version import graded_by, grader_version

LAB = "lab1_ddp"


@pytest.fixture
def house(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A copy of the grader and of minidist, which may be edited."""
    for package in (autograder, minidist):
        source = Path(package.__file__).parent
        copy_package(source, tmp_path / source.name)
    monkeypatch.setattr(version, "__file__", str(tmp_path / "autograder/records/version.py"))
    monkeypatch.setattr(minidist, "__file__", str(tmp_path / "minidist/__init__.py"))
    grader_version.cache_clear()
    yield tmp_path
    grader_version.cache_clear()


def _now(lab: str = LAB, **more: bytes) -> str:
    grader_version.cache_clear()
    return grader_version(lab, **more)


def _edited(house: Path, names: Callable[[Path], list[Path]], lab: str = LAB) -> set[str]:
    """Of these files, the names of those after whose edit the lab grades again."""
    again = set()
    for file in names(house):
        before, content = _now(lab), file.read_bytes() if file.exists() else None
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((content or b"") + b"\n# edited\n")
        if _now(lab) != before:
            again.add(file.relative_to(house).as_posix())
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        assert _now(lab) == before
    return again


def test_every_file_that_a_submission_passes_counts(house):
    names = [
        "autograder/box/sandbox.py",
        "autograder/course/course_toml.py",
        "autograder/inside/probe.py",
        "autograder/referee/judging.py",
        "autograder/submission/engine.py",
        "autograder/criteria/criterion.py",
        "autograder/criteria/common/oracle.py",
        f"autograder/criteria/{LAB}/table.py",
        "minidist/__init__.py",
        "minidist/errors.py",
        "minidist/emulate/broker.py",
        "minidist/kernel/inside/rank.py",
        "minidist/processes/lifetime.py",
        # New ones, called what they like.
        f"autograder/criteria/{LAB}/status.py",
        "autograder/criteria/common/report.py",
        "autograder/criteria/new.py",
        "autograder/referee/zoo.py",
        "autograder/box/deeper/batch.py",
        "minidist/kernel/new.py",
    ]
    assert _edited(house, lambda at: [at / name for name in names]) == set(names)


def test_no_file_that_a_submission_does_not_pass_counts(house):
    def others(at: Path) -> list[Path]:
        folders = [
            "authoring",
            "batch",
            "cli",
            "gradebook",
            "proof",
            "records",
            "regrading",
            "report",
        ]
        found = [file for name in folders for file in (at / "autograder" / name).rglob("*.py")]
        found += [at / "autograder/__main__.py", at / "autograder/plain_text.py"]
        found += [at / "autograder/cli/new.py", at / "autograder/referee/notes.txt"]
        return [*found, at / "minidist/plots/new.py", at / "minidist/train/config.py"]

    assert _edited(house, others) == set()


def test_a_lab_s_criteria_count_for_that_lab_alone(house):
    """And for the one that borrows them."""
    before = {lab: _now(lab) for lab in lab_names()}
    for name in lab_names():
        file = house / f"autograder/criteria/{name}/table.py"
        content = file.read_bytes()
        file.write_bytes(content + b"\n# edited\n")
        again = {lab for lab in lab_names() if _now(lab) != before[lab]}
        file.write_bytes(content)
        borrows = {"bonus_debug_ddp"} if name == "lab2_accumulation" else set()
        assert again == {name} | borrows


def test_what_the_master_imports_counts(house):
    code = b"import minidist.model as m\nfrom minidist import (  # both\n    data, sampler\n)\n"
    before = _now(code=code)
    assert before != _now()
    for name in ("model.py", "data.py", "sampler.py"):
        file = house / "minidist" / name
        file.write_text(file.read_text() + "# edited\n")
        assert _now(code=code) != before
        before = _now(code=code)
    assert grader_version(LAB, b"master") != grader_version(LAB)


@pytest.mark.parametrize("lab", lab_names())
def test_whatever_grading_imports_is_in_the_version(lab):
    """Read with Python's own parser, from both ends of a grade to the last file of ours."""
    ours, lib = Path(autograder.__file__).parent, Path(minidist.__file__).parent
    known = set(graded_by(lab))
    todo = [ours / "submission/attempt.py", *(ours / f"criteria/{lab}").glob("*.py")]
    seen: set[Path] = set()
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        for _, imported in imports_of(file):
            for name in (imported, imported.rpartition(".")[0]):
                root = ours if name.startswith("autograder.") else lib
                if name.split(".")[0] in ("autograder", "minidist"):
                    at = root.joinpath(*name.split(".")[1:])
                    todo += [f for f in (at.with_suffix(".py"), at / "__init__.py") if f.is_file()]
    needed = {
        file.relative_to((ours if file.is_relative_to(ours) else lib).parent).as_posix()
        for file in seen
    }
    # These file what was graded: they give no verdict.
    filing = {name for name in needed if name.startswith("autograder/records/")}
    assert needed - filing - {"autograder/files.py"} <= known
