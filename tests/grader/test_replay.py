"""`autograder replay`: the same notebook, the same draws, held against the record."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import nbformat
import pytest
from course import LAB, TestCourse, statuses
from made_records import file_record, made_record, make_course

from autograder.__main__ import main
from autograder.course.course import CourseError
from autograder.criteria import get_lab
from autograder.criteria.criterion import Status, Verdict
from autograder.proof.zoo import load_zoo
from autograder.records.grading import latest, read_history
from autograder.records.journal import Journal
from autograder.regrading import replay as module
from autograder.regrading.find_gradings import find_grading
from autograder.regrading.replay import NOTHING, explain, replay

CRITERIA = get_lab(LAB).criteria


@pytest.fixture
def course(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOGRADER_COURSE", str(tmp_path))
    return make_course(tmp_path)


@pytest.fixture
def runs(monkeypatch):
    """Stands for the box: `ends` says how criteria end, and `asked` keeps what was run."""

    class Runs:
        ends: dict[str, Status]
        asked: list[tuple]

    runs = Runs()
    runs.ends, runs.asked = {}, []

    def run_once(notebook, class_run, seed_id, executed, note):
        runs.asked.append((notebook, class_run, seed_id))
        nbformat.write(notebook, executed)
        return [
            Verdict(
                c.name,
                status := runs.ends.get(c.name, Status.PASS),
                c.points if status == Status.PASS else 0.0,
                c.points,
                "" if status == Status.PASS else f"now {status}",
            )
            for c in CRITERIA
        ]

    monkeypatch.setattr(module, "run_once", run_once)
    return runs


def files(course):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in course.root.rglob("*")
        if path.is_file()
    }


def test_the_same_notebook_and_seeds_agree_and_nothing_is_written(course, runs, capsys):
    key = file_record(course, "ada", {"ddp_weights": "WRONG"})
    # Something else has been handed in since; it is not what was graded.
    file = course.root / "handed_in" / "ada" / f"{LAB}.ipynb"
    file.write_text("{}")
    before = files(course)
    runs.ends["ddp_weights"] = Status.WRONG
    assert main(["replay", "ada"]) == 0
    [(notebook, class_run, seed_id)] = runs.asked
    assert seed_id.startswith("ada:")
    assert seed_id == find_grading(read_history(course), "ada").seed_id
    assert (class_run.lab_name, class_run.world_size) == (LAB, 3)
    assert any("whose = 'ada'" in cell.source for cell in notebook.cells)
    assert files(course) == before
    said = capsys.readouterr().out
    assert f"all {len(CRITERIA)} criteria agree" in said
    assert key[:12] in said
    assert "DIFFERS" not in said


def test_a_difference_is_exit_code_1_and_named(course, runs, capsys):
    key = file_record(course, "ada", {"ddp_weights": "WRONG"})
    runs.ends["ddp_overlap"] = Status.TIMEOUT
    assert main(["replay", key[:8]]) == 1
    said = capsys.readouterr().out
    assert said.count("DIFFERS") == 2
    assert "ddp_weights, record: ddp_weights: it is WRONG" in said
    assert "ddp_overlap, replay: now TIMEOUT" in said
    assert f"2 of {len(CRITERIA)} criteria differ" in said


def test_a_grader_that_has_changed_is_named_and_so_are_criteria_that_came_and_went(course, runs):
    file_record(course, "ada")
    grading = find_grading(read_history(course), "ada")
    first, *more = grading.record.criteria
    criteria = (dataclasses.replace(first, criterion="of_old"), *more)
    record = dataclasses.replace(grading.record, criteria=criteria)
    old = module.Grading(grading.key, record, grading.seed_id, "older")
    result = replay(old, course, sandboxed=False)
    rows = {row.name: (row.then, row.now) for row in result.rows}
    assert rows["of_old"] == ("PASS", NOTHING)
    assert rows[CRITERIA[0].name] == (NOTHING, "PASS")
    assert not result.agrees
    said = "\n".join(explain(result))
    assert "the grader has changed since (then older" in said
    assert "was graded in the sandbox and is replayed without" in said
    assert "no longer has of_old" in said


def test_outputs_and_verdicts_of_the_first_run_are_not_run_again(course, runs):
    key = file_record(course, "ada")
    path = course.build / "executed" / LAB / f"{key}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [nbformat.v4.new_output("stream", text="old")]
            cell.metadata.setdefault("minidist", {})["verdict"] = {"status": "PASS"}
    nbformat.write(notebook, path)
    replay(find_grading(read_history(course), "ada"), course, sandboxed=True)
    [(ran, *_)] = runs.asked
    assert "verdict" not in json.dumps([c.metadata for c in ran.cells])
    assert not any(cell.get("outputs") for cell in ran.cells)


def test_without_what_was_run_the_file_does_if_it_is_the_same(course, runs):
    key = file_record(course, "ada")
    (course.build / "executed" / LAB / f"{key}.ipynb").unlink()
    grading = find_grading(read_history(course), "ada")
    assert replay(grading, course, sandboxed=True).agrees
    file = course.root / "handed_in" / "ada" / f"{LAB}.ipynb"
    file.write_text(file.read_text().replace("whose", "mine"))
    with pytest.raises(CourseError, match="is not what was graded"):
        replay(grading, course, sandboxed=True)


def test_a_file_that_could_not_be_graded_is_read_again(course, runs):
    path = course.root / "latin.ipynb"
    path.write_bytes(b"{ this is not JSON")
    record = made_record("kim", {"*": "INVALID"}, path=path)
    Journal(course.journal_path).append_record("f00dcafe", record)
    grading = find_grading(read_history(course), "f00dcafe")
    assert replay(grading, course, sandboxed=True).agrees
    path.write_bytes((course.root / "labs" / LAB / f"{LAB}.ipynb").read_bytes())
    assert not replay(grading, course, sandboxed=True).agrees
    assert runs.asked == []


def test_who_or_what_is_meant(course):
    first, second = file_record(course, "ada"), file_record(course, "ada", text="again = 1")
    file_record(course, "kim")
    # nbgrader gets a stand-in for what it cannot read: filed twice, run once.
    Journal(course.journal_path).append_record("0" * 32, read_history(course)[2].record)
    history = read_history(course)
    assert find_grading(history, "ada").key == second
    assert find_grading(history, first[:10]).key == first
    assert find_grading(history, "kim").seed_id.startswith("kim:")
    assert latest(history, LAB, 3).keys() == {"ada", "kim"}
    assert latest(history, LAB, 2) == {}
    with pytest.raises(ValueError, match=r"no record of 'eve'.*ada, kim"):
        find_grading(history, "eve")
    with pytest.raises(ValueError, match="no record of 'ada' in lab9"):
        find_grading(history, "ada", "lab9")
    with pytest.raises(ValueError, match="no record of"):
        find_grading(history, first[:3])  # too short to name one
    other = module.Grading(
        "1" * 32, dataclasses.replace(history[0].record, lab="lab2_accumulation")
    )
    with pytest.raises(ValueError, match="--lab"):
        find_grading([*history, other], "ada")


def test_wrong_usage_is_exit_code_2(course, capsys, tmp_path):
    assert main(["replay", "eve"]) == 2
    assert "nobody" in capsys.readouterr().err
    file_record(course, "ada")
    (tmp_path / "kept.ipynb").touch()
    assert main(["replay", "ada", "--notebook", str(tmp_path / "kept.ipynb")]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_grading_agrees_with_its_replay(tmp_path):
    course = TestCourse.make(tmp_path / "course")
    [entry] = load_zoo(LAB, "wrong_sum")
    path = course.submit("ada", nbformat.writes(entry.notebook).encode())
    record = course.grade(str(path), "--no-gradebook")["ada"]
    assert {n for n, s in statuses(record).items() if s != "PASS"} == entry.loses
    journal = course.root / "build" / "journal.jsonl"
    before = journal.read_bytes()
    done = course.run("-m", "autograder", "replay", "ada", "--trusted")
    assert f"all {len(CRITERIA)} criteria agree" in done.stdout
    assert journal.read_bytes() == before
