"""Grading again: what is printed, what nbgrader is asked to touch, and `grade --student`."""

from __future__ import annotations

import io
import os
import shutil
import time
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from course import LAB
from made_records import file_record, hand_in, made_record, make_course, stub_grading, take_in
from rich.console import Console

from autograder.__main__ import main
from autograder.batch import grade_class
from autograder.course.course import Course, CourseError
from autograder.criteria import get_lab
from autograder.criteria.criterion import Status, Verdict
from autograder.gradebook import fill
from autograder.gradebook.commands import NbGrader
from autograder.gradebook.database import TIMESTAMP, note_lateness, noted_lateness, open_gradebook
from autograder.gradebook.settled import find_settled
from autograder.records.grading import Grading, latest, read_history
from autograder.records.journal import Journal
from autograder.regrading.changes import changes_table, find_changes, summary
from autograder.regrading.find_gradings import find_grading
from autograder.submission.attempt import grade as grade_one
from autograder.submission.engine import InfrastructureError
from autograder.submission.find import Submission, find_submissions

CRITERIA = get_lab(LAB).criteria


@pytest.fixture
def course(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOGRADER_COURSE", str(tmp_path))
    return make_course(tmp_path)


def gradings(course):
    return latest(read_history(course), LAB, 3)


def shown(changes):
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(changes_table(changes))
    return console.export_text()


def test_old_and_new_scores_are_named(course):
    for student in ("ada", "kim", "lea"):
        file_record(course, student, {"ddp_overlap": "WRONG", "ddp_unused": "TIMEOUT"})
    before = gradings(course)
    file_record(course, "ada", {"ddp_unused": "TIMEOUT"})
    file_record(course, "kim", {"ddp_overlap": "TIMEOUT", "ddp_unused": "TIMEOUT"})
    changes = find_changes(before, gradings(course))
    assert [change.student for change in changes] == ["ada", "kim"]
    [ada, kim] = changes
    assert ada.score == (91, 96)
    assert ada.criteria == {"ddp_overlap": (("WRONG", 0.0), ("PASS", 5))}
    assert kim.score == (91, 91)
    text = shown(changes)
    assert "91 → 96" in text
    assert "ddp_overlap ✗ WRONG → ✓ PASS" in text
    assert "ddp_overlap ✗ WRONG → ∞ TIMEOUT" in text
    assert text.count("graded again") == 2
    assert summary(changes, 3).startswith("1 of 3 scores")
    assert "1 with other verdicts" in summary(changes, 3)


def test_what_is_different_is_named(course):
    file_record(course, "ada", {"ddp_unused": "TIMEOUT"})
    old = gradings(course)["ada"]
    file_record(course, "ada")
    new = gradings(course)["ada"]

    def cause(**changed):
        later = Grading(**{**vars(new), **changed})
        [change] = find_changes({"ada": old}, {"ada": later})
        return change.cause

    assert cause() == "graded again"
    assert cause(key="other", grader_version="other") == "the grader has changed"
    assert cause(key="other", seed_id="ada:other") == "a different notebook"
    assert cause(key="other", seed_id="") == "a different notebook"
    assert cause(key="other") == "the lab has changed"


def test_other_points_and_other_criteria_are_changes(course):
    file_record(course, "ada")
    old = gradings(course)["ada"]
    first, *others = old.record.criteria
    more = (replace(first, points=10, max_points=10), *others)
    points = replace(old.record, criteria=more)
    [change] = find_changes({"ada": old}, {"ada": Grading("k", points, old.seed_id, "new")})
    assert "100/100 → 105/105" in shown([change])
    assert "5 → 10 points" in shown([change])
    fewer = replace(old.record, criteria=tuple(others))
    [change] = find_changes({"ada": old}, {"ada": Grading("k", fewer, old.seed_id, "new")})
    assert change.criteria == {first.criterion: (("PASS", 5), ("–", 0.0))}


# --- nbgrader -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Two who were graded, and whom nbgrader has taken in."""
    course = make_course(tmp_path_factory.mktemp("template"))
    for student in ("ada", "kim"):
        file_record(course, student, {"ddp_unused": "TIMEOUT"})
        take_in(course, gradings(course)[student].record)
    return course


@pytest.fixture
def taken(template, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOGRADER_COURSE", str(tmp_path))
    shutil.copytree(template.root, tmp_path, dirs_exist_ok=True)
    return Course(tmp_path)


@pytest.fixture
def settled(taken):
    course, before = taken, gradings(taken)

    def find():
        now = gradings(course)
        submissions = find_submissions([course.root / "handed_in"], LAB).submissions
        records = [now[s.student].record for s in submissions]
        return find_settled(course, LAB, submissions, records, before)

    assert find() == {"ada", "kim"}
    return find


def test_without_a_gradebook_nobody_is_settled(course):
    path = hand_in(course, "ada")
    record = made_record("ada", path=path)
    before = {"ada": Grading("k", record, "s", "v")}
    assert find_settled(course, LAB, [Submission("ada", path)], [record], before) == set()
    assert not (course.build / "nbgrader").exists()


def test_who_has_the_same_verdicts_is_left_to_nbgrader_as_it_is(taken, settled):
    file_record(taken, "ada", {"ddp_unused": "TIMEOUT"})  # graded again, as before
    assert settled() == {"ada", "kim"}
    file_record(taken, "ada")
    assert settled() == {"kim"}


def test_another_notebook_is_taken_in(taken, settled):
    file_record(taken, "ada", {"ddp_unused": "TIMEOUT"}, text="another = 1")
    assert settled() == {"kim"}


def test_a_new_configuration_has_nbgrader_look_again(taken, settled):
    path = taken.root / "nbgrader_config.py"
    path.write_text("# edited")
    os.utime(path, (time.time() + 10,) * 2)
    assert settled() == set()


def leave_out(monkeypatch):
    """Leaves nbgrader's commands out."""
    monkeypatch.setattr(NbGrader, "begin", lambda *_: None)


def test_another_time_of_handing_in_has_nbgrader_look_again(taken, settled, monkeypatch):
    """However old the file is in which it stands, and also when it is taken away."""
    leave_out(monkeypatch)
    submissions = find_submissions([taken.root / "handed_in"], LAB).submissions
    records = [gradings(taken)[s.student].record for s in submissions]
    stamp = next(s.path for s in submissions if s.student == "ada").with_name(TIMESTAMP)
    copy = taken.build / "nbgrader" / "submitted" / "ada" / LAB / TIMESTAMP
    for text in ("2026-11-23 10:00:00 UTC", "2026-11-24 11:00:00 Europe/Berlin", ""):
        if text:
            stamp.write_text(text)
            os.utime(stamp, (1, 1))
        else:
            stamp.unlink()
        assert settled() == {"kim"}
        fill.fill_gradebook(submissions, records, stub_grading.class_run(taken))
        assert copy.is_file() == bool(text)
        for student in ("ada", "kim"):  # as nbgrader does
            graded = taken.build / "nbgrader" / "autograded" / student / LAB / f"{LAB}.ipynb"
            os.utime(graded, (time.time() + 10,) * 2)
        assert settled() == {"ada", "kim"}


@pytest.mark.parametrize(
    "said",
    [b"garbage", b"\xff\xfe", b"9" * 60, pytest.param(b"2026-01-01 " * 10**6, id="very long")],
)
def test_a_time_that_is_none_is_told_and_stops_nobody(taken, settled, monkeypatch, capsys, said):
    """nbgrader would end there, for the whole class."""
    leave_out(monkeypatch)
    submissions = find_submissions([taken.root / "handed_in"], LAB).submissions
    records = [gradings(taken)[s.student].record for s in submissions]
    stamp = next(s.path for s in submissions if s.student == "ada").with_name(TIMESTAMP)
    stamp.write_bytes(said)
    fill.fill_gradebook(submissions, records, stub_grading.class_run(taken))
    assert f"{stamp}: expected a time, got" in capsys.readouterr().err
    assert not (taken.build / "nbgrader" / "submitted" / "ada" / LAB / TIMESTAMP).exists()
    assert settled() == {"ada", "kim"}


def test_what_nbgrader_cannot_take_keeps_nobody_from_feedback(taken, monkeypatch):
    asked = []

    def nbgrader(_, command, *_arguments):
        asked.append(command)
        if command == "autograde":
            raise CourseError("one of them")

    monkeypatch.setattr(NbGrader, "begin", nbgrader)
    submissions = find_submissions([taken.root / "handed_in"], LAB).submissions
    records = [gradings(taken)[s.student].record for s in submissions]
    with pytest.raises(CourseError, match="one of them"):
        fill.fill_gradebook(submissions, records, stub_grading.class_run(taken))
    assert asked == ["generate_assignment", "autograde", "generate_feedback"]
    assert noted_lateness(taken, LAB).keys() == {"ada", "kim"}


def test_another_due_date_has_nbgrader_look_again(taken, settled):
    handed_in = datetime(2026, 3, 2)
    with open_gradebook(taken) as book:
        for student in ("ada", "kim"):
            book.update_or_create_submission(LAB, student, timestamp=handed_in)
        book.update_or_create_assignment(LAB, duedate=handed_in - timedelta(hours=1))
    assert settled() == set()
    note_lateness(taken, LAB, {"ada", "kim"})  # nbgrader has taken the points off
    assert settled() == {"ada", "kim"}
    with open_gradebook(taken) as book:
        book.grant_extension(LAB, "ada", hours=2)
    assert settled() == {"kim"}


def test_a_score_that_is_not_in_the_gradebook_is_put_there(taken, settled):
    with open_gradebook(taken) as book:
        book.find_grade("ddp_unused", LAB, LAB, "kim").auto_score = 4.0
        book.db.commit()
    assert settled() == {"ada"}


def test_nbgrader_is_asked_for_the_others_only(taken, settled, monkeypatch):
    asked = []
    monkeypatch.setattr(NbGrader, "begin", lambda _, *arguments: asked.append(arguments))
    submissions = find_submissions([taken.root / "handed_in"], LAB).submissions
    records = [gradings(taken)[s.student].record for s in submissions]
    class_run = stub_grading.class_run(taken)
    fill.fill_gradebook(submissions, records, class_run, settled={"kim"})
    exclude = "--CourseDirectory.student_id_exclude="
    assert [command for command, *_ in asked] == [
        "generate_assignment",
        "autograde",
        "generate_feedback",
    ]
    assert f"{exclude}kim" in asked[1]
    assert exclude in asked[2]
    asked.clear()
    fill.fill_gradebook(submissions, records, class_run, settled={"ada", "kim"})
    assert [command for command, *_ in asked] == ["generate_assignment", "generate_feedback"]


# --- the command --------------------------------------------------------------------------------


def test_one_student_is_graded_anew_and_the_difference_is_printed(course, monkeypatch, capsys):
    stub = stub_grading(monkeypatch)
    stub.lost = {"ada": {"ddp_unused": "TIMEOUT"}, "kim": {}}
    for student in ("ada", "kim"):
        hand_in(course, student)
    handed_in = str(course.root / "handed_in")
    grade = ["grade", "--lab", LAB, "--no-gradebook"]
    assert main([*grade, handed_in]) == 0
    assert stub.asked == ["ada", "kim"]
    assert "scores that were there before" not in capsys.readouterr().out
    stub.lost["ada"] = {}
    assert main([*grade, handed_in, "--student", "ada"]) == 0
    said = capsys.readouterr().out
    assert stub.asked == ["ada", "kim", "ada"]
    assert stub.again == [False, True]
    assert "96 → 100" in said
    assert "1 of 1 scores that were there before have changed" in said
    # The report is still the class's.
    assert "kim" in (course.build / "report.html").read_text()
    assert len((course.build / "grades.csv").read_text().splitlines()) == 3
    # Without a path: the notebook that was graded last.
    assert main([*grade, "--student", "kim"]) == 0
    assert stub.asked[-1] == "kim"


def test_who_is_not_there_is_exit_code_2(course, capsys, monkeypatch):
    stub_grading(monkeypatch)
    file_record(course, "ada")
    grade = ["grade", "--lab", LAB, "--no-gradebook", "--student", "eve"]
    assert main([*grade, str(course.root / "handed_in")]) == 2
    assert "no submission by eve; there are: ada" in capsys.readouterr().err
    assert main(grade) == 2
    assert "no record of eve" in capsys.readouterr().err


# --- whose record it is -------------------------------------------------------------------------


def table(course):
    """Student -> score, as the class's CSV has it."""
    lines = (course.build / "grades.csv").read_text().splitlines()
    return {line.split(",")[0]: float(line.split(",")[4]) for line in lines[1:]}


def test_who_hands_in_the_same_bytes_is_in_the_class_too(course, monkeypatch):
    """An untouched lab, or a copy: it is run once, and both have a record of their own."""
    stub = stub_grading(monkeypatch)
    for student in ("ada", "bob", "cy"):
        hand_in(course, student, text="same = 1" if student != "cy" else "")
    grade = ["grade", "--lab", LAB, "--no-gradebook", str(course.root / "handed_in")]
    assert main(grade) == 0
    assert main(grade) == 0  # bob's is known by now
    file = course.journal_path
    size = file.stat().st_size
    assert main(grade) == 0
    assert file.stat().st_size - size < 2000  # a batch, and nothing of the three
    assert main([*grade, "--student", "cy"]) == 0
    assert set(table(course)) == {"ada", "bob", "cy"}
    history = read_history(course)
    assert find_grading(history, "bob").record.student == "bob"
    assert {g.seed_id.split(":")[0] for g in history if g.student == "ada"} == {"ada"}
    assert main([*grade[:-1], "--student", "bob"]) == 0  # without a path
    assert stub.asked[-1] == "bob"


def test_who_goes_back_to_an_earlier_version_has_its_points(course, monkeypatch):
    stub = stub_grading(monkeypatch)
    hand_in(course, "eve")
    grade = ["grade", "--lab", LAB, "--no-gradebook", str(course.root / "handed_in")]
    stub.lost = {"dave": {"*": "WRONG"}}
    for text, lost in (("v = 1", {"*": "WRONG"}), ("v = 2", {}), ("v = 1", {})):
        hand_in(course, "dave", text=text)
        stub.lost["dave"] = lost
        assert main(grade) == 0
    assert table(course)["dave"] == 0  # known, and not run again
    assert main([*grade, "--student", "eve"]) == 0
    assert table(course)["dave"] == 0


def test_a_file_of_another_name_is_found_again(course, monkeypatch):
    stub = stub_grading(monkeypatch)
    path = hand_in(course, "erin")
    path = path.rename(path.with_name("my solution.ipynb"))
    grade = ["grade", "--lab", LAB, "--no-gradebook"]
    assert main([*grade, str(course.root / "handed_in")]) == 0
    assert main([*grade, "--student", "erin"]) == 0
    assert stub.asked == ["erin", "erin"]


def test_when_it_was_handed_in_goes_along(course, monkeypatch):
    """nbgrader counts late penalties by it."""
    with open_gradebook(course, create=True) as book:
        book.add_assignment(LAB)
    leave_out(monkeypatch)
    path = hand_in(course, "ada")
    path.with_name(TIMESTAMP).write_text("2026-11-23 10:00:00 UTC")
    record = made_record("ada", path=path)
    fill.fill_gradebook([Submission("ada", path)], [record], stub_grading.class_run(course))
    taken = course.build / "nbgrader" / "submitted" / "ada" / LAB / TIMESTAMP
    assert taken.read_text() == "2026-11-23 10:00:00 UTC"


# --- one that kills its worker ------------------------------------------------------------------


def test_who_kills_a_worker_is_tried_again_alone(course, monkeypatch, capsys):
    """Those whose workers fell with it are graded."""
    stub = stub_grading(monkeypatch)
    rounds = []

    def pool(todo, class_run, jobs, done):
        rounds.append([s.student for s in todo.values()])
        falls = [i for i, s in todo.items() if s.student == "aaron"]
        if falls and len(todo) > 1:
            falls.append(next(i for i, s in todo.items() if s.student == "bea"))
        stub._run_pool({i: s for i, s in todo.items() if i not in falls}, class_run, jobs, done)
        return dict.fromkeys(falls, "a worker was killed")

    monkeypatch.setattr(grade_class, "_run_pool", pool)
    waits = []
    monkeypatch.setattr("autograder.submission.attempt.time.sleep", waits.append)
    for student in ("aaron", "bea", "cy", "dan"):
        hand_in(course, student)
    grade = ["grade", "--lab", LAB, "--no-gradebook", "--jobs", "2"]
    assert main([*grade, str(course.root / "handed_in")]) == 1
    assert sorted(stub.asked) == ["bea", "cy", "dan"]
    assert rounds == [["aaron", "bea", "cy", "dan"], *[["aaron"]] * grade_class.POOL_TRIES, ["bea"]]
    assert waits == [2.0, 4.0]
    assert "aaron was not graded: a worker was killed, 3 times in a row" in capsys.readouterr().err


def test_the_grader_waits_longer_after_each_failure_of_its_own(course, monkeypatch):
    """What it was short of may be there again, and then nothing is lost."""
    happened = []

    def run_once(*_):
        happened.append("tried")
        if len(happened) < 5:
            raise InfrastructureError("no more processes")
        return [Verdict(c.name, Status.PASS, c.points, c.points, "") for c in CRITERIA]

    monkeypatch.setattr("autograder.submission.attempt.run_once", run_once)
    monkeypatch.setattr("autograder.submission.attempt.time.sleep", happened.append)
    handed_in = Submission("ada", hand_in(course, "ada"))
    record = grade_one(handed_in, stub_grading.class_run(course))
    assert happened == ["tried", 2.0, "tried", 4.0, "tried"]
    assert record.score == sum(c.points for c in CRITERIA)

    happened.clear()
    monkeypatch.setattr("autograder.submission.attempt.INFRA_TRIES", 2)
    record = grade_one(Submission("kim", hand_in(course, "kim")), stub_grading.class_run(course))
    assert happened == ["tried", 2.0, "tried"]
    assert {c.status for c in record.criteria} == {"INFRA"}
    assert "failed 2 times: no more processes" in record.criteria[0].message


def test_a_disk_that_is_full_at_the_last_line_is_told(course, monkeypatch):
    """Of a file that is no notebook; what was graded before it is not lost."""
    path = course.root / "handed_in" / "odd" / f"{LAB}.ipynb"
    path.parent.mkdir(parents=True)
    path.write_text("no notebook")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    record = grade_one(Submission("odd", path), stub_grading.class_run(course))
    assert {c.status for c in record.criteria} == {"INFRA"}
    assert "No space left" in record.criteria[0].message
