"""`autograder publish`: the files that Canvas, Moodle and Gradescope import."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
from course import LAB
from made_records import file_record, hand_in, made_record, make_course, take_in

from autograder.__main__ import main
from autograder.criteria import get_lab
from autograder.gradebook.database import open_gradebook
from autograder.gradebook.lms_files import Column, file_name, number, safe
from autograder.gradebook.publish import PublishOptions, _columns, publish
from autograder.gradebook.roster import read_roster
from autograder.records.grading import latest, read_history
from autograder.submission.attempt import Submission, grade
from autograder.submission.class_run import ClassRun

ROSTER = """Student,ID,SIS User ID,SIS Login ID,Section,Lab one (77),Final Score
    Points Possible,,,,,102,(read only)
"=HYPERLINK(""x""), Ada",101,s1,ada,A,,
"Ng, Kim",102,s2,KIM,A,,
"Nobody, Ned",103,s3,ned,B,,
"""
HEAD = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three handed in, of whom eve is in no roster; lea did not."""
    course = make_course(tmp_path_factory.mktemp("course"))
    lost = {"ada": {}, "kim": {"ddp_unused": "TIMEOUT"}, "eve": {"*": "WRONG"}}
    for student, missed in lost.items():
        file_record(course, student, missed)
        record = latest(read_history(course), LAB, 3)[student].record
        take_in(course, record, by_person={"ada": 1.25, "kim": None, "eve": 0.0}[student])
    with open_gradebook(course) as book:
        for student in ("ada", "kim", "eve"):
            person = book.find_student(student)
            person.email, person.lms_user_id = f"{student}@x.org", None
        book.update_or_create_student("lea", email="lea@x.org")
        book.find_submission_notebook(LAB, LAB, "kim").late_submission_penalty = 10.0
        book.db.commit()
    return course


@pytest.fixture
def course(made, monkeypatch):
    monkeypatch.setenv("AUTOGRADER_COURSE", str(made.root))
    return made


@pytest.fixture
def roster(tmp_path):
    path = tmp_path / "roster.csv"
    path.write_text(ROSTER)
    return path


def rows(data):
    return list(csv.reader(io.StringIO(data.decode())))


def of(course, system, path=None, **more):
    options = PublishOptions(roster=read_roster(path) if path else None, **{"columns": {}} | more)
    return publish(course, system, options)


def test_canvas_gets_its_columns_and_points_and_nobody_is_lost_unseen(course, roster):
    done = of(course, "canvas", roster, columns={LAB: "Lab one"})
    head, points, *people = rows(done.made.data)
    assert head == [*HEAD, "Lab one (77)"]  # with Canvas's id: no second assignment there
    assert points == ["    Points Possible", "", "", "", "", "100"]
    assert people == [
        ['\'=HYPERLINK("x"), Ada', "101", "s1", "ada", "A", "101.25"],  # with a person's points
        ["Ng, Kim", "102", "s2", "KIM", "A", "86"],  # 96 less the late penalty
        ["Nobody, Ned", "103", "s3", "ned", "B", ""],  # changes nothing in Canvas
    ]
    assert done.unknown == ("eve",)
    assert not done.complete
    said = "\n".join(done.explain())
    assert f"{LAB}: no submission: lea, ned" in said
    assert f"{LAB}: still to be graded by a person: kim" in said
    assert "NOT IN THE ROSTER, and so not in it: eve" in said
    assert done.new_columns == ()
    assert rows(of(course, "canvas", roster, zero=True).made.data)[4][-1] == "0"


def test_a_lab_that_the_roster_does_not_have_is_said_to_be_new(course, roster):
    done = of(course, "canvas", roster)
    assert done.new_columns == (LAB,)
    assert rows(done.made.data)[0][-1] == LAB
    done = of(course, "canvas", roster, columns={LAB: "=Lab 7"})
    assert rows(done.made.data)[0][-1] == "'=Lab 7"


def test_two_labs_in_one_column_stop_everything():
    options = PublishOptions(roster=None, columns={LAB: "HW", "lab2_accumulation": "hw (12)"})
    with pytest.raises(ValueError, match=f"one column for {LAB}, lab2_accumulation"):
        _columns({LAB: [], "lab2_accumulation": []}, options)


def test_the_one_column_that_is_meant():
    def column(names, chosen=None, lab=LAB):
        roster = SimpleNamespace(columns=names)
        options = PublishOptions(roster=roster, columns={lab: chosen} if chosen else {})
        return _columns({lab: []}, options)[0][0].name

    twice = ("Lab 1 (111)", "Lab 1 (222)")
    assert [column(twice, name) for name in twice] == list(twice)
    with pytest.raises(ValueError, match=r"'Lab 1' could be 'Lab 1 \(111\)', 'Lab 1 \(222\)'"):
        column(twice, "Lab 1")
    moodle = tuple(f"Assignment: {LAB} ({kind})" for kind in ("Real", "Percentage", "Letter"))
    assert column(moodle) == moodle[0]
    both = {LAB: twice[0], "lab2_accumulation": twice[1]}
    options = PublishOptions(roster=SimpleNamespace(columns=twice), columns=both)
    assert [c.name for c in _columns({lab: [] for lab in both}, options)[0]] == list(twice)


def test_a_canvas_number_is_nobodys_student_number(course, roster):
    """eve, who is not in the list, is called as a number of Canvas."""
    roster.write_text(ROSTER.replace(",103,", ",eve,"))
    done = of(course, "canvas", roster)
    assert done.unknown == ("eve",)
    assert [row[-1] for row in rows(done.made.data) if row[1] == "eve"] == [""]


def test_two_students_with_one_address_stop_everything(course):
    with open_gradebook(course) as book:
        book.find_student("kim").email = "Ada@X.org "
        book.db.commit()
    try:
        with pytest.raises(ValueError, match=r"two students have the address ada@x\.org"):
            of(course, "gradescope")
    finally:
        with open_gradebook(course) as book:
            book.find_student("kim").email = "kim@x.org"
            book.db.commit()


def test_who_could_be_two_stops_everything(course, roster):
    roster.write_text(ROSTER + '"Other, Ada",104,ada@x.org,ada2,B,,\n')
    with pytest.raises(ValueError, match="ada could be line 3 and 6"):
        of(course, "canvas", roster)
    with open_gradebook(course) as book:
        book.find_student("lea").lms_user_id = "102"
        book.db.commit()
    roster.write_text(ROSTER)
    try:
        with pytest.raises(ValueError, match=r"line 4 could be .* and "):
            of(course, "canvas", roster)
    finally:
        with open_gradebook(course) as book:
            book.find_student("lea").lms_user_id = None
            book.db.commit()


def test_moodle_gets_no_line_that_would_stop_it_or_hit_somebody_else(course, tmp_path):
    done = of(course, "moodle")
    head, *people = rows(done.made.data)
    assert head == ["First name", "Last name", "ID number", "Email address", LAB]
    assert [(row[3], row[4]) for row in people] == [
        ("ada@x.org", "101.25"),
        ("eve@x.org", "0"),
        ("kim@x.org", "86"),
    ]
    assert done.made.left_out == {"lea": "no submission"}
    assert "above 100 (101.25)" in done.made.warnings[0]
    done = of(course, "moodle", out_of=100)  # full marks are 100 anyway: nothing is scaled
    assert [row[4] for row in rows(done.made.data)[1:]] == ["101.25", "0", "86"]
    done = of(course, "moodle", cap=True)
    assert [row[4] for row in rows(done.made.data)[1:]] == ["100", "0", "86"]
    assert done.made.warnings == []
    path = tmp_path / "moodle.csv"
    header = "First name,Last name,ID number,Email address,Username,Assignment: lab1_ddp (Real)\n"
    path.write_text(header + "A,L,7,ada@x.org,ada,-\nE,V,8,,eve,-\n-2,N,9,-2+3@x.org,kim,-\n")
    done = of(course, "moodle", path)
    assert rows(done.made.data)[0][-1] == "Assignment: lab1_ddp (Real)"
    assert done.made.written == ["ada"]
    assert done.made.left_out == {
        "eve": "no email address",
        "kim": "its address or id would be a formula in a spreadsheet",
    }


def test_a_plain_table(course):
    head, *lines = rows(of(course, "csv").made.data)
    table = {line[1]: dict(zip(head, line, strict=True)) for line in lines}
    assert table["kim"]["score"] == "86"
    assert table["kim"]["late_penalty"] == "10"
    assert table["kim"]["to_grade_by_hand"] == "reflect_1"
    assert (table["lea"]["submitted"], table["lea"]["score"]) == ("no", "")


def gradescope_runs(root, email, content):
    """What Gradescope does with a notebook: the process, and results.json if there is one."""
    users = [{"email": email, "id": 1, "name": "K"}]
    (root / "submission_metadata.json").write_text(json.dumps({"users": users}))
    (root / "submission").mkdir(exist_ok=True)
    (root / "submission" / "any.ipynb").write_bytes(content)
    result = root / "results" / "results.json"
    result.unlink(missing_ok=True)
    ran = subprocess.run(
        [sys.executable, str(root / "source" / "run_autograder")],
        text=True,
        capture_output=True,
        env=os.environ | {"AUTOGRADER_ROOT": str(root)},
    )
    return ran, json.loads(result.read_text()) if result.exists() else None


def test_gradescope_runs_an_autograder_that_hands_out_what_was_graded(course, tmp_path):
    done = of(course, "gradescope")
    assert done.made.data == of(course, "gradescope").made.data
    assert sorted(done.made.written) == ["ada", "eve", "kim"]
    root = tmp_path / "autograder"
    with zipfile.ZipFile(io.BytesIO(done.made.data)) as archive:
        assert {"setup.sh", "run_autograder"} < set(archive.namelist())
        assert archive.getinfo("run_autograder").external_attr >> 16 == 0o100755
        archive.extractall(root / "source")
    handed_in = course.root / "handed_in" / "kim" / f"{LAB}.ipynb"
    _, result = gradescope_runs(root, "KIM@x.org", handed_in.read_bytes())
    assert result["score"] == 86
    assert "10 taken off for handing in late" in result["output"]
    tests = {test["name"].partition(":")[0]: test for test in result["tests"]}
    assert sum(test["score"] for test in result["tests"]) == 96
    assert tests["ddp_unused"]["status"] == "failed"
    assert "ddp_unused: it is TIMEOUT" in tests["ddp_unused"]["output"]
    assert tests["setup"]["status"] == "passed"
    assert "A person has not graded this yet." in tests["reflect_1"]["output"]
    known = {"score", "output", "output_format", "tests", "extra_data"}
    assert set(result) <= known | {"visibility", "stdout_visibility", "execution_time"}
    sha256 = hashlib.sha256(handed_in.read_bytes()).hexdigest()
    assert result["extra_data"]["sha256"] == sha256
    ran, result = gradescope_runs(root, "kim@x.org", b"{}")
    assert (ran.returncode, result) == (1, None)
    assert "not the notebook that was graded" in ran.stderr
    ran, result = gradescope_runs(root, "nobody@x.org", b"{}")
    assert (ran.returncode, result) == (1, None)
    assert "No result for nobody@x.org" in ran.stderr


def test_the_zero_of_what_is_no_notebook_is_for_that_file_alone(tmp_path):
    """Nothing of it ran, so there is no seed to tell the file by."""
    course = make_course(tmp_path / "course")
    path = hand_in(course, "lea")
    path.write_text("{}")
    class_run = ClassRun(course, LAB, get_lab(LAB).grading_world_size, True)
    record = grade(Submission("lea", path), class_run)
    assert {c.status for c in record.criteria} == {"INVALID"}
    take_in(course, record)
    with open_gradebook(course) as book:
        book.find_student("lea").email = "lea@x.org"
        book.db.commit()
    with zipfile.ZipFile(io.BytesIO(of(course, "gradescope").made.data)) as archive:
        archive.extractall(tmp_path / "source")
    _, result = gradescope_runs(tmp_path, "lea@x.org", b"{}")
    assert result["score"] == 0
    ran, result = gradescope_runs(tmp_path, "lea@x.org", hand_in(course, "lea").read_bytes())
    assert (ran.returncode, result) == (1, None)
    assert "not the notebook that was graded" in ran.stderr


def test_nothing_is_overwritten_unless_forced(course, tmp_path, capsys):
    out = tmp_path / "grades.csv"
    publish_ = ["publish", "--to", "csv", "--out", str(out)]
    assert main(publish_) == 0
    out.write_text("mine")
    assert main(publish_) == 2
    assert "exists already: say --force" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main([*publish_, "--force"]) == 0
    assert out.read_text().startswith("lab,student")
    assert [path.name for path in tmp_path.iterdir()] == ["grades.csv"]


def test_who_has_a_grade_and_is_left_out_is_exit_code_1(course, roster, tmp_path, capsys):
    out = ["--out", str(tmp_path / "canvas.csv")]
    assert main(["publish", "--to", "canvas", "--roster", str(roster), *out]) == 1
    assert "NOT IN THE ROSTER" in capsys.readouterr().out
    assert main(["publish", "--to", "canvas", *out, "--force"]) == 1
    assert "LEFT OUT: ada: no id that Canvas knows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "word"], "invalid choice"),
        (["--to", "csv", "--out-of", "0"], "above 0"),
        (["--to", "csv", "--lab", "lab9"], "the gradebook has no lab9"),
        (["--to", "csv", "--column", "lab9=x"], "lab9, which is not published"),
        (["--to", "csv", "--column", "lab9"], "expected LAB=NAME"),
    ],
)
def test_wrong_usage_is_exit_code_2(course, capsys, arguments, says):
    try:
        code = main(["publish", *arguments])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert says in capsys.readouterr().err


def test_without_a_gradebook_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTOGRADER_COURSE", str(tmp_path))
    make_course(tmp_path)
    assert main(["publish", "--to", "csv"]) == 2
    assert "there is no gradebook yet" in capsys.readouterr().err


def test_cells_are_safe_and_numbers_plain():
    for text in ("=1+1", " +x", "-x", "@x", "|x", "\t=x", "\x1b[2J=x", "\u202e=x"):
        assert safe(text).startswith("'"), text
    assert safe("x;=cmd|'/C calc'!A0; +1") == "x;'=cmd|'/C calc'!A0; '+1"
    assert safe("a - b; c") == "a - b; c"
    assert safe("Ng, K\nim") == "Ng, K im"
    assert [number(x) for x in (0.0, 10.0, 86.5, 99.999, 1 / 3)] == [
        "0",
        "10",
        "86.5",
        "100",
        "0.33",
    ]
    assert file_name("A+b/../C@x.org") == "a%2bb%2f..%2fc@x.org"
    grade = made_record("ada")
    assert grade.score == 100
    assert Column(lab=LAB, name="x", max_score=0, out_of=10).cell(None, zero=True) == "0"
