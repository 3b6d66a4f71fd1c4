"""nbgrader's own commands, as an instructor types them, on a course of their own."""

from __future__ import annotations

import re
import shutil
import sqlite3

import nbformat
import pytest
from course import LAB, ROOT, TestCourse
from nbgrader.api import Gradebook

from autograder.authoring.notebooks import REFLECT_POINTS
from autograder.criteria import get_lab
from autograder.proof.zoo import load_zoo, write_class

pytestmark = pytest.mark.timeout(900)
STUDENTS = ("starter", "wrong_sum", "wrong_rank1_exits")


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return TestCourse.make(tmp_path_factory.mktemp("course"))


@pytest.mark.slow
def test_generate_assignment_gives_what_is_committed(course):
    course.run("-m", "nbgrader", "generate_assignment", LAB, "--force")
    released = course.root / "labs" / LAB
    assert [path.name for path in released.iterdir()] == [f"{LAB}.ipynb"]  # no answers
    committed = ROOT / "labs" / LAB / f"{LAB}.ipynb"
    assert (released / f"{LAB}.ipynb").read_bytes() == committed.read_bytes()


@pytest.mark.slow
def test_autograde_gives_the_referees_scores(course):
    everyone = course.root / "everyone"
    write_class(LAB, everyone)
    submitted = course.root / "build" / "nbgrader" / "submitted"
    for student in STUDENTS:
        shutil.copytree(everyone / student, submitted / student)
    # A copied check cell stops stock nbgrader; here it is an ordinary cell of the student's.
    path = submitted / "starter" / LAB / f"{LAB}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    checks = [c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade")]
    notebook.cells.append(checks[0])
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    answer(submitted / "starter" / LAB / f"{LAB}.ipynb", "reflect_1", "The global batch grows.")
    for command in ("generate_assignment", "autograde", "generate_feedback"):
        course.run("-m", "nbgrader", command, LAB, "--force")
    database = sqlite3.connect(course.root / "build" / "nbgrader" / "gradebook.db")
    scores = dict(
        database.execute(
            "select s.student_id, sum(g.auto_score) from grade g"
            " join submitted_notebook n on n.id = g.notebook_id"
            " join submitted_assignment s on s.id = n.assignment_id group by s.student_id"
        )
    )
    points = {criterion.name: criterion.points for criterion in get_lab(LAB).criteria}
    gates = get_lab(LAB).gates
    expected = {e.name: e.expected_score(points, gates) for e in load_zoo(LAB, *STUDENTS)}
    assert scores == pytest.approx(expected)
    for student in STUDENTS:
        page = course.root / "build" / "nbgrader" / "feedback" / student / LAB / f"{LAB}.html"
        assert f"<dd>{expected[student]:g} of 100</dd>" in page.read_text(encoding="utf-8")
    # The same submissions, graded by our own command: nothing is run again, the scores agree.
    records = course.grade(str(submitted), "--no-gradebook")
    assert {name: r["score"] for name, r in records.items()} == pytest.approx(expected)


def answer(path, name, text):
    notebook = nbformat.read(path, as_version=4)
    [cell] = [c for c in notebook.cells if c.get("id") == name]
    assert "YOUR ANSWER HERE" in cell.source
    assert cell.metadata.nbgrader.points == REFLECT_POINTS
    cell.source = cell.source.replace("YOUR ANSWER HERE", text)
    path.write_text(nbformat.writes(notebook), encoding="utf-8")


@pytest.mark.slow
def test_a_person_grades_the_reflections_and_grading_again_keeps_it(course):
    path = course.root / "build" / "nbgrader" / "gradebook.db"

    def grades():
        with Gradebook(f"sqlite:///{path}") as book:
            cells = book.find_submission_notebook(LAB, LAB, "starter").grades
            return {g.name: (g.needs_manual_grade, g.score) for g in cells if "reflect" in g.name}

    assert grades() == {"reflect_1": (True, 0), "reflect_2": (False, 0), "reflect_3": (False, 0)}
    with Gradebook(f"sqlite:///{path}") as book:
        grade = book.find_grade("reflect_1", LAB, LAB, "starter")
        grade.manual_score, grade.needs_manual_grade = 1.5, False
        book.db.commit()
    only = ("--force", "--student", "starter")
    course.run("-m", "nbgrader", "autograde", LAB, *only)
    assert grades()["reflect_1"][1] == 1.5


@pytest.mark.slow
def test_validate_tells_a_student_what_is_missing(course):
    lab = f"labs/{LAB}/{LAB}.ipynb"
    done = course.run("-m", "nbgrader", "validate", lab, code=None)
    said = done.stdout + done.stderr
    assert "VALIDATION FAILED" in said
    assert re.search(r"setup  0/5  every rank joins one process group\n\s*not started", said), said


@pytest.mark.nightly
def test_validate_passes_the_solution(course):
    solution = f"solutions/{LAB}/{LAB}.ipynb"
    done = course.run("-m", "nbgrader", "validate", solution)
    said = done.stdout + done.stderr
    assert "Success" in said, said
