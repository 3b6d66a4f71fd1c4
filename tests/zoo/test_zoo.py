"""A class of lab 1 is graded once, as `make grade` does; everything here looks at the result.

Every submission says in its docstring what it must lose: those criteria and no other. Here are the
few that the tests below look at; `test_verify.py` proves that every criterion can be lost.
"""

from __future__ import annotations

import csv
import sqlite3
import time

import pytest
from course import LAB, TestCourse, statuses
from leftovers import assert_nothing_left, find_leftovers

from autograder.box.sandbox import probe_support
from autograder.criteria import get_lab
from autograder.proof.zoo import load_zoo, write_class
from autograder.records.journal import Journal

pytestmark = pytest.mark.timeout(2400)
CLASS = [
    "reference",
    "starter",
    "wrong_rank1_exits",
    "wrong_rank1_only",
    "wrong_skipped_collective",
    "wrong_sum",
]
CRITERIA = [criterion.name for criterion in get_lab(LAB).criteria]


@pytest.fixture(scope="module")
def zoo():
    return {entry.name: entry for entry in load_zoo(LAB)}


@pytest.fixture(scope="module")
def graded(zoo, tmp_path_factory):
    """The course and one record per student."""
    before = find_leftovers()
    course = TestCourse.make(tmp_path_factory.mktemp("course"))
    write_class(LAB, course.root / "class", "flat", entries=[zoo[name] for name in CLASS])
    records = course.grade(str(course.root / "class"))
    assert_nothing_left(before)
    return course, records


@pytest.mark.parametrize("name", CLASS)
def test_each_submission_loses_exactly_what_it_breaks(zoo, graded, name):
    record, entry = graded[1][name], zoo[name]
    found = statuses(record)
    lost = {criterion for criterion, status in found.items() if status != "PASS"}
    expected = set(CRITERIA) if entry.loses == "everything" else set(entry.loses)
    why = {c["name"]: c["message"] for c in record["criteria"] if c["name"] in lost ^ expected}
    assert lost == expected, why
    for criterion, status in entry.statuses.items():
        assert found[criterion] == status
    points = {criterion.name: criterion.points for criterion in get_lab(LAB).criteria}
    assert record["score"] == pytest.approx(entry.expected_score(points, get_lab(LAB).gates))


def test_the_class_has_right_and_wrong_ones(zoo):
    right = [name for name, entry in zoo.items() if not entry.loses]
    assert {"reference", "right_torch_ddp", "right_own_flattening"} <= set(right)
    assert zoo["starter"].loses == "everything"
    assert len(zoo) >= 15
    example = {name for name, entry in zoo.items() if entry.in_example}
    assert len(example) >= 10
    assert {"reference", "starter", "wrong_skipped_collective"} <= example


def test_records_have_the_public_form(graded):
    for record in graded[1].values():
        assert set(record) == {
            "submission",
            "student",
            "lab",
            "world_size",
            "score",
            "max_score",
            "seconds",
            "sandboxed",
            "num_gpus",
            "criteria",
        }
        assert record["lab"] == LAB
        assert record["world_size"] == 3
        assert record["max_score"] == 100
        assert [c["name"] for c in record["criteria"]] == CRITERIA
        for criterion in record["criteria"]:
            assert set(criterion) == {"name", "points", "max_points", "status", "message", "ranks"}
            assert [r["rank"] for r in criterion["ranks"]] == [0, 1, 2]


def test_it_was_sandboxed(graded):
    assert probe_support().works, probe_support().reason
    assert all(record["sandboxed"] for record in graded[1].values())


def test_a_deadlock_is_explained_by_rank_line_and_collective(graded):
    course, records = graded
    record = records["wrong_skipped_collective"]
    for criterion in record["criteria"]:
        if criterion["status"] != "TIMEOUT":
            continue
        message = criterion["message"]
        # Ranks 0 and 2 wait; the number is the cell's own, also after it was run again.
        assert "rank 0: waits in all_reduce (float64 [" in message, message
        assert "rank 1: finished the cell after" in message, message
        assert "dist.all_reduce(" in message
        numbers = {part.split("]")[0] for part in message.split("Cell In[")[1:]}
        assert numbers == {_number_of_cell(course, record, "task4_train")}, message
    page = _feedback(course, "wrong_skipped_collective")
    assert "waits in all_reduce" in page


def _number_of_cell(course, record, grade_id):
    import nbformat

    for path in (course.root / "build" / "executed" / LAB).glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        verdicts = [
            cell.metadata.minidist.verdict
            for cell in notebook.cells
            if "verdict" in cell.metadata.get("minidist", {})
        ]
        if {v["name"]: v["message"] for v in verdicts} == {
            c["name"]: c["message"] for c in record["criteria"]
        }:
            cells = {c.metadata.get("minidist", {}).get("grade_id"): c for c in notebook.cells}
            return str(cells[grade_id].execution_count)
    raise AssertionError("no run notebook has these verdicts")


def _feedback(course, student):
    path = course.root / "build" / "nbgrader" / "feedback" / student / LAB / f"{LAB}.html"
    return path.read_text(encoding="utf-8")


def test_a_rank_that_exits_is_named(graded):
    record = graded[1]["wrong_rank1_exits"]
    lost = next(c for c in record["criteria"] if c["status"] == "RANK_LOST")
    assert lost["message"].startswith("rank 1 ended with exit code 3")
    assert lost["ranks"][1] == {"rank": 1, "status": "RANK_LOST"}


def test_wrong_on_one_rank_is_blamed_on_that_rank(graded):
    record = graded[1]["wrong_rank1_only"]
    wrong = next(c for c in record["criteria"] if c["name"] == "ddp_gradients")
    assert [r["status"] for r in wrong["ranks"]] == ["PASS", "WRONG", "PASS"]


def test_the_gradebook_has_the_same_scores(graded):
    course, records = graded
    database = sqlite3.connect(course.root / "build" / "nbgrader" / "gradebook.db")
    rows = database.execute(
        "select s.student_id, sum(g.auto_score) from grade g"
        " join submitted_notebook n on n.id = g.notebook_id"
        " join submitted_assignment s on s.id = n.assignment_id"
        " where g.cell_id in (select id from grade_cells) group by s.student_id"
    ).fetchall()
    scores = {name: record["score"] for name, record in records.items()}
    assert dict(rows) == pytest.approx(scores)


def test_feedback_says_why(graded):
    for name, record in graded[1].items():
        page = _feedback(graded[0], name)
        for criterion in record["criteria"]:
            if criterion["status"] != "PASS":
                assert criterion["status"] in page
    assert "the gradients were summed, not averaged" in _feedback(graded[0], "wrong_sum")


def test_report_and_csv(graded):
    course, records = graded
    with open(course.root / "build" / "grades.csv", newline="", encoding="utf-8") as file:
        rows = {row["student"]: float(row["score"]) for row in csv.DictReader(file)}
    assert rows == {name: record["score"] for name, record in records.items()}
    page = (course.root / "build" / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in records)


def test_a_second_run_grades_nothing_again(graded):
    course, records = graded
    journal = Journal(course.root / "build" / "journal.jsonl")
    entries = list(journal.iter_entries())
    began = time.monotonic()
    again = course.grade(str(course.root / "class"), "--no-gradebook")
    assert again == records
    new = list(journal.iter_entries())[len(entries) :]
    assert [entry["kind"] for entry in new] == ["batch", "batch_end"]  # for `autograder status`
    assert time.monotonic() - began < sum(r["seconds"] for r in records.values())
