"""A class from grading to returned feedback, by nbgrader's own commands, from every source."""

from __future__ import annotations

import csv
import os
import re
import shutil
import stat
import subprocess
import sys

import nbformat
import pytest
from course import LAB, ROOT
from made_records import file_record, hand_in, make_course, stub_grading
from nbformat import v4

from autograder.__main__ import main
from autograder.criteria import get_lab
from autograder.gradebook import not_graded
from autograder.gradebook.database import open_gradebook

OTHER = "lab2_accumulation"


def use(course, monkeypatch):
    monkeypatch.setenv("AUTOGRADER_COURSE", str(course.root))
    monkeypatch.chdir(course.root)
    return stub_grading(monkeypatch)


def feedback(course, student):
    return (course.build / "nbgrader" / "feedback" / student / LAB / f"{LAB}.html").read_text(
        "utf-8"
    )


def nbgrader(course, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", *arguments],
        cwd=course.root,
        env=os.environ | {"AUTOGRADER_COURSE": str(course.root)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.slow
def test_a_class_gets_its_grades_and_its_feedback(tmp_path, monkeypatch, capsys):
    course = make_course(tmp_path / "course")
    stub = use(course, monkeypatch)
    (course.root / "course.toml").write_text(
        f"[calendar.{LAB}]\ndue = 2026-10-26\nlate_per_day = 10\n"
    )
    stub.lost = {"kim": {"setup": "WRONG"}}
    for student in ("ada", "kim", "bad", "bob"):
        path = hand_in(course, student)
        if student == "ada":  # who has answered one question
            notebook = nbformat.read(path, as_version=4)
            [cell] = [c for c in notebook.cells if c.get("id") == "reflect_1"]
            cell.source = cell.source.replace("YOUR ANSWER HERE", "It grows.")
            nbformat.write(notebook, path)
        if student == "bad":
            path.write_text('{"not a notebook": 1}')
        if student == "kim":  # as git writes it; nbgrader would take -0800 for 800 seconds
            path.with_name("timestamp.txt").write_text("2026-10-27 20:00:00 -0800")
        if student == "bob":
            path.with_name("timestamp.txt").write_text("05/12/2026")
    assert main(["grade", "--lab", LAB, str(course.root / "handed_in")]) == 0
    said = capsys.readouterr()
    assert "kim, 1 d 4 h: 20 points off" in said.out
    assert "bob/timestamp.txt: expected a time, got '05/12/2026'" in said.err
    with open_gradebook(course) as book:
        listed = {each["student"]: each for each in book.submission_dicts(LAB)}
        assert book.average_assignment_score(LAB) == (100 + 95 + 0 + 100) / 4  # before penalties
    assert {each["max_score"] for each in listed.values()} == {100}
    # Who handed in no notebook waits for a person, who sees what it is.
    assert {s: e["needs_manual_grade"] for s, e in listed.items()} == {
        "ada": True,
        "kim": False,
        "bad": True,
        "bob": False,
    }
    assert "not a notebook" in feedback(course, "bad")
    assert "<dd>100 of 100</dd>" in feedback(course, "ada")
    assert "<dd>75 of 100</dd>" in feedback(course, "kim")
    assert "Not graded yet" in feedback(course, "ada")
    assert feedback(course, "ada").count(">not graded yet<") == 1
    # Who grades answers sees the model answer below each; who handed in does not.
    autograded = course.build / "nbgrader" / "autograded" / "ada" / LAB / f"{LAB}.ipynb"
    cells = nbformat.read(autograded, as_version=4).cells
    own = next(i for i, cell in enumerate(cells) if cell.get("id") == "reflect_1")
    assert "It grows." in cells[own].source
    assert "**Model answer**" in cells[own + 1].source
    assert "linearly, for SGD" in cells[own + 1].source
    assert "Model answer" not in feedback(course, "ada")
    assert feedback(course, "ada").count(">not answered<") == 2
    report = (course.build / "report.html").read_text("utf-8")
    assert re.findall(r"</td><td class=num>(to give|0|)</td><td title", report) == [
        *("to give", "", "0", "0")  # ada, bad, bob, kim
    ]
    assert f'href="nbgrader/feedback/ada/{LAB}/{LAB}.html"' in report
    # Nobody else on the machine reads any of it.
    assert stat.S_IMODE(course.build.stat().st_mode) == 0o700
    assert stat.S_IMODE((course.root / "solutions").stat().st_mode) == 0o700

    # Somebody else came through the exchange, with a secret, and is graded by nbgrader alone.
    submitted = course.build / "nbgrader" / "submitted" / "eva" / LAB
    submitted.mkdir(parents=True)
    shutil.copy(course.root / "handed_in" / "kim" / f"{LAB}.ipynb", submitted)
    (submitted / "timestamp.txt").write_text("Wed, 28 Oct 2026 04:00:00 +0000")
    (submitted / "submission_secret.txt").write_text("secret of eva")
    file_record(course, "eva", {"setup": "WRONG"}, text="whose = 'kim'")
    with open_gradebook(course) as book:
        book.update_or_create_student("eva")
        book.db.commit()
    assert main(["extend", "eva", LAB, "2026-10-26T12:00:00-11:00"]) == 2  # before it is due
    assert main(["extend", "eva", LAB, "2026-10-27T12:00:00Z"]) == 0  # before nbgrader sees eva
    nbgrader(course, "generate_assignment", LAB, "--force")
    nbgrader(course, "autograde", LAB, "--force", "--student=eva")
    nbgrader(course, "generate_feedback", LAB, "--force")
    with open_gradebook(course) as book:
        assert book.find_submission(LAB, "eva").total_seconds_late == 16 * 3600
    assert "<dd>85 of 100</dd>" in feedback(course, "eva")
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    exchange.chmod(0o777)
    nbgrader(course, "release_feedback", LAB, f"--Exchange.root={exchange}")
    released = list((exchange / "minidist" / "feedback").glob("*.html"))
    assert len(released) == 5  # everybody's
    nbgrader(course, "release_feedback", LAB, f"--Exchange.root={exchange}")
    assert set((exchange / "minidist" / "feedback").glob("*.html")) == set(released)


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return [(row["lab"], row["student"], float(row["score"])) for row in csv.DictReader(file)]


def test_late_notebooks_and_another_lab_leave_the_class_in_its_report(
    tmp_path, monkeypatch, capsys
):
    course = make_course(tmp_path / "course")
    for kind in ("labs", "solutions"):
        shutil.copytree(ROOT / kind / OTHER, course.root / kind / OTHER)
    stub = use(course, monkeypatch)
    stub.lost = {"ada": {"setup": "WRONG"}}
    for student in ("ada", "kim"):
        hand_in(course, student)
    handed_in = course.root / "handed_in"
    (handed_in / "lea").mkdir()
    (handed_in / "max.zip").write_text("x")
    assert main(["grade", "--no-gradebook", "--lab", LAB, str(handed_in)]) == 0
    late = hand_in(course, "zoe")
    assert main(["grade", "--no-gradebook", "--lab", LAB, str(late)]) == 0
    shutil.rmtree(handed_in)
    hand_in(course, "kim", lab=OTHER)
    assert main(["grade", "--no-gradebook", "--lab", OTHER, str(handed_in)]) == 0
    said = capsys.readouterr().out
    assert f"lea: not graded: there is no {LAB}.ipynb" in said
    assert "max.zip: not graded: a loose file" in said
    build = course.build
    first = [(LAB, "ada", 95.0), (LAB, "kim", 100.0), (LAB, "zoe", 100.0)]
    second = [(OTHER, "kim", 100.0)]
    assert rows(build / "reports" / f"{LAB}.csv") == first
    assert rows(build / "reports" / f"{OTHER}.csv") == second
    assert sorted(rows(build / "grades.csv")) == sorted(first + second)
    page = (build / "report.html").read_text("utf-8")
    for student in ("ada", "kim", "zoe"):
        assert page.count(f"{student}</th>") or student in page
    assert "All labs" in page
    assert f"reports/{LAB}.html" in page
    assert stat.S_IMODE((build / "report.html").stat().st_mode) == 0o600


def test_who_has_no_grade_is_named_by_publish_and_nobody_gets_a_zero(tmp_path, monkeypatch, capsys):
    course = make_course(tmp_path / "course")
    use(course, monkeypatch)
    not_graded.note(course, LAB, graded=[], failed={"ina": "no space"}, nothing={"lea": "no file"})
    with open_gradebook(course, create=True) as book:
        book.update_or_create_assignment(LAB)
        book.update_or_create_notebook(LAB, LAB)
        book.update_or_create_grade_cell("setup", LAB, LAB, max_score=5, cell_type="code")
        book.db.commit()
    out = tmp_path / "grades.csv"
    command = ["publish", "--to", "csv", "--lab", LAB, "--out", str(out)]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "2 students are in it, none of them with a grade" in said
    assert f"{LAB}: THE GRADER FAILED, so grade them again: ina" in said
    assert f"{LAB}: no submission: lea" in said
    assert not out.exists()  # and so it does not block the next
    with open_gradebook(course) as book:
        book.update_or_create_submission(LAB, "ina")
        book.find_grade("setup", LAB, LAB, "ina").auto_score = 5
        book.db.commit()
    not_graded.note(course, LAB, graded=["ina"], failed={}, nothing={})
    assert main(command) == 0
    assert "2 students are in it, 1 of them with a grade" in capsys.readouterr().out
    assert out.exists()


def test_a_release_for_students_stays_readable(tmp_path):
    course = make_course(tmp_path / "course")
    (course.root / "solutions").chmod(0o755)
    (course.root / ".released-by-autograder").touch()
    course.make_private()
    assert stat.S_IMODE((course.root / "solutions").stat().st_mode) == 0o755


# --- Validate -----------------------------------------------------------------------------------


def test_a_warning_fails_no_check(tmp_path, monkeypatch):
    """By nbgrader's own Validator with this course's settings, as the button in JupyterLab runs."""
    from nbgrader.apps import NbGrader
    from nbgrader.validator import Validator

    course = make_course(tmp_path / "course")
    monkeypatch.chdir(course.root)
    notebook = v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "x"}})
    about = {"schema_version": 3, "grade": True, "locked": True, "solution": False, "task": False}
    for name, source in (
        ("warns", "import warnings; warnings.warn('mind this'); print('passed')"),
        ("fails", "import sys; print('a line', file=sys.stderr); assert False, 'wrong'"),
        ("waits", "import sys; print('○ x  0/5  y\\nnot started, not written', file=sys.stderr)"),
    ):
        cell = v4.new_code_cell(source, id=name)
        cell.metadata["nbgrader"] = about | {"grade_id": name, "points": 5, "cell_type": "code"}
        notebook.cells.append(cell)
    path = tmp_path / "work.ipynb"
    nbformat.write(notebook, path)
    app = NbGrader()
    app.load_config_file()
    found = Validator(config=app.config).validate(str(path))
    assert [each["source"][:24] for each in found["failed"]] == [
        "import sys; print('a lin",
        "import sys; print('○ x  ",
    ]
    assert app.config.Execute.timeout >= max(c.deadline_s for c in get_lab(LAB).criteria) + 60
