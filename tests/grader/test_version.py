"""What a grade depends on: an edit there grades again, and an edit elsewhere does not."""

from __future__ import annotations

from collections.abc import Iterator
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


def _edit(file: Path) -> None:
    """Adds a line; a file that is not there is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as at:
        at.write("\n# edited\n")


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
    now = _now()
    for name in names:
        _edit(house / name)
        before, now = now, _now()
        assert now != before, name


def test_no_file_that_a_submission_does_not_pass_counts(house):
    folders = ["authoring", "batch", "cli", "gradebook", "proof", "records", "regrading", "report"]
    others = [f for name in folders for f in (house / "autograder" / name).rglob("*.py")]
    others += [house / "autograder/__main__.py", house / "autograder/plain_text.py"]
    others += [house / "autograder/cli/new.py", house / "autograder/referee/notes.txt"]
    others += [house / "minidist/plots/new.py", house / "minidist/train/config.py"]
    before = _now()
    for file in others:
        _edit(file)
    assert not graded_by(LAB).keys() & {f.relative_to(house).as_posix() for f in others}
    assert _now() == before


@pytest.mark.parametrize("lab", lab_names())
def test_of_criteria_only_those_of_the_lab_and_those_it_borrows_count(lab):
    places = [name.split("/")[1:-1] for name in graded_by(lab)]
    folders = {place[1] for place in places if place[:1] == ["criteria"] and place[1:]}
    borrowed = {"lab2_accumulation"} if lab == "bonus_debug_ddp" else set()
    assert folders == {lab, "common"} | borrowed


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
