"""Full marks mean one thing: in report, terminal, gradebook, formgrader and every export."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from types import SimpleNamespace

import pytest
from course import LAB
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_records import hand_in, made_record, make_course, take_in

from autograder.course.gates import apply_gates
from autograder.criteria import get_lab
from autograder.gradebook.database import open_gradebook
from autograder.gradebook.full_marks import leave_reflections_out, offer_reflection_points
from autograder.gradebook.publish import PublishOptions, publish
from autograder.gradebook.roster import read_roster
from autograder.records.record import Record
from autograder.report.page import Part, write_page
from autograder.report.terminal import rich_table, score_of, write_csv

NAMES = [criterion.name for criterion in get_lab(LAB).criteria]
LOST = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["WRONG", "TIMEOUT", "NOT_RUN"]))
WHOLE = st.sampled_from(["INVALID", "INFRA", "BLOCKED", ""])


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    made = make_course(tmp_path_factory.mktemp("course"))
    hand_in(made, "ada")
    take_in(made, made_record("ada"), by_person=None)
    with open_gradebook(made) as book:
        book.find_student("ada").email = "ada@x.org"
        book.db.commit()
    return made


def put(course, record: Record, reflection: float | None, penalty: float) -> None:
    """What nbgrader leaves of this record, after a person and the late policy."""
    with open_gradebook(course) as book:
        for verdict in record.criteria:
            grade = book.find_grade(verdict.criterion, LAB, LAB, "ada")
            grade.auto_score = None if verdict.status == "BLOCKED" else verdict.points
            grade.needs_manual_grade = grade.auto_score is None
        answer = book.find_grade("reflect_1", LAB, LAB, "ada")
        answer.manual_score, answer.needs_manual_grade = reflection, reflection is None
        notebook = book.find_submission_notebook(LAB, LAB, "ada")
        notebook.late_submission_penalty = penalty
        book.db.commit()


def exports(course, **more):
    """Export -> (score, full marks), for ada."""
    roster = course.root / "roster.csv"
    roster.write_text("Student,ID,SIS User ID,SIS Login ID,Section\nA,1,s,ada,x\n")
    of = {
        system: publish(course, system, PublishOptions(columns={}, roster=path, **more)).made.data
        for system, path in [
            ("csv", None),
            ("moodle", None),
            ("gradescope", None),
            ("canvas", read_roster(roster)),
        ]
    }
    rows = {s: list(csv.reader(io.StringIO(of[s].decode()))) for s in ("csv", "canvas", "moodle")}
    table = dict(zip(*rows["csv"], strict=True))
    with zipfile.ZipFile(io.BytesIO(of["gradescope"])) as archive:
        [name] = [name for name in archive.namelist() if name.startswith("results/")]
        scope = json.loads(archive.read(name))
    return {
        "csv": (float(table["score"]), float(table["max_score"])),
        "canvas": (float(rows["canvas"][2][-1]), float(rows["canvas"][1][-1])),
        "moodle": (float(rows["moodle"][1][-1]), None),
        "gradescope": (scope["score"], float(scope["output"].split(" of ")[1].split(" ")[0])),
    }


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lost=LOST,
    whole=WHOLE,
    reflection=st.none() | st.sampled_from([0.0, 0.5, 2.0]),
    penalty=st.sampled_from([0.0, 10.0, 200.0]),
)
def test_everything_that_shows_a_score_agrees(
    course, tmp_path_factory, lost, whole, reflection, penalty
):
    folder = tmp_path_factory.mktemp("report")
    record = made_record("ada", lost | ({"*": whole} if whole else {}))
    record = Record(**vars(record) | {"criteria": apply_gates(get_lab(LAB), record.criteria)})
    full = get_lab(LAB).max_score
    assert record.max_score == full == 100
    # Report, terminal and table.
    write_page([Part([record])], folder / "report.html")
    page = (folder / "report.html").read_text("utf-8")
    assert f">{score_of(record)}</td>" in page
    assert score_of(record).endswith(" / 100")
    assert [str(cell) for cell in rich_table([record]).columns[1].cells] == [score_of(record)]
    write_csv([record], folder / "grades.csv")
    [row] = csv.DictReader((folder / "grades.csv").open(newline="", encoding="utf-8"))
    if record.score is None:  # nobody gets a zero for our failure, not even in a mean
        assert row["score"] == ""
        assert "<dt>mean</dt>" not in page
        return
    assert (float(row["score"]), float(row["max_score"])) == (record.score, full)
    assert f"<dt>mean</dt><dd>{record.score:.0f} %</dd>" in page  # INVALID counts, as everywhere
    # The gradebook, as formgrader lists it, and what is published from it.
    put(course, record, reflection, penalty)
    wanted = max(0.0, record.score + (reflection or 0.0) - penalty)
    with open_gradebook(course) as book:
        [listed] = book.submission_dicts(LAB)
        assert listed["max_score"] == full
        assert listed["score"] == pytest.approx(record.score + (reflection or 0.0))
        assert listed["needs_manual_grade"] == (reflection is None or whole == "BLOCKED")
        [student] = book.student_dicts()
        assert student["max_score"] == full
        assert book.find_assignment(LAB).max_score == full
    for where, (score, most) in exports(course).items():
        assert score == pytest.approx(wanted, abs=0.006), where
        assert most in (None, full), where
    for where, (score, most) in exports(course, out_of=100.0).items():
        assert score == pytest.approx(wanted, abs=0.006), where
        assert most in (None, full), where
    for where, (score, _) in exports(course, out_of=20.0).items():
        assert score == pytest.approx(wanted / 5, abs=0.006), where


def test_a_gradebook_of_an_earlier_version_is_read_with_the_same_full_marks(course):
    with open_gradebook(course) as book:
        book.find_graded_cell("reflect_1", LAB, LAB).max_score = 2
        book.db.commit()
        assert book.find_assignment(LAB).max_score == 102
    try:
        assert exports(course)["canvas"][1] == 100
    finally:
        with open_gradebook(course) as book:
            leave_reflections_out(book, LAB)
            assert book.find_assignment(LAB).max_score == 100


def test_formgrader_still_offers_the_points_of_a_reflection(course):
    offer_reflection_points()
    offer_reflection_points()  # as each app of a Jupyter server reads the settings again
    with open_gradebook(course) as book:
        offered = {
            name: book.find_grade(name, LAB, LAB, "ada").to_dict()["max_score"]
            for name in ("reflect_1", "setup")
        }
    assert offered == {"reflect_1": 2, "setup": get_lab(LAB)["setup"].points}


def test_capped_grades_end_at_full_marks():
    from autograder.gradebook.lms_files import Column

    column = Column(lab=LAB, name="x", max_score=100, out_of=20, cap=True)
    grades = [SimpleNamespace(submitted=True, score=score) for score in (101.5, 100, 50)]
    assert [column.cell(grade, zero=False) for grade in grades] == ["20", "20", "10"]
