"""`course.toml`: points and limits that an instructor sets, and where they arrive."""

from __future__ import annotations

import json
import shutil

import nbformat
import pytest
from course import LAB, ROOT
from made_records import file_record, hand_in, keep, made_record, make_course, stub_grading

from autograder.__main__ import main
from autograder.authoring import notebooks
from autograder.course.course import Course, CourseError
from autograder.course.course_toml import NAME, Options, OptionsError, read_options
from autograder.criteria import get_lab
from autograder.criteria.limits import GIB, Limits
from autograder.records.journal import Journal
from autograder.referee.practice import lab_of
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission
from autograder.submission.without_run import known_record

POINTS = f"[points.{LAB}]\nddp_scaling = 10\nwrap_model = 0\n"


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course whose notebooks were built after its points were changed."""
    made = make_course(tmp_path / "course")
    monkeypatch.setenv("AUTOGRADER_COURSE", str(made.root))
    monkeypatch.setattr("autograder.submission.choose_box.choose_sandbox", lambda *_, **__: True)
    return made


def set_points(course: Course, text: str = POINTS) -> Course:
    (course.root / NAME).write_text(text)
    assert notebooks.build_course(course.root)[1] == []
    return Course(course.root)


def test_without_a_file_a_lab_stays_as_it_is(tmp_path):
    assert read_options(tmp_path) == Options()
    assert Options().apply(get_lab(LAB)) is get_lab(LAB)


def test_a_byte_order_mark_is_none_of_it(tmp_path):
    (tmp_path / NAME).write_text(POINTS)
    plain = read_options(tmp_path)
    (tmp_path / NAME).write_text(POINTS, encoding="utf-8-sig")
    assert read_options(tmp_path) == plain != Options()


def test_the_courses_own_file_changes_nothing():
    assert read_options(ROOT) == Options()


def test_points_and_limits(tmp_path):
    (tmp_path / NAME).write_text(
        f'{POINTS}[limits.{LAB}]\nwall_s = 60\nbox_memory_bytes = "3 GiB"\nfile_bytes = 1000\n'
    )
    lab = read_options(tmp_path).apply(get_lab(LAB))
    assert lab["ddp_scaling"].points == 10
    assert lab["wrap_model"].points == 0
    assert lab.max_score == 100 + 4 - 5
    assert lab.limits == Limits(wall_s=60, box_memory_bytes=3 * GIB, file_bytes=1000)
    assert get_lab(LAB).max_score == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("points = 3", "points: expected a table, got 3"),
        ("[point.lab1_ddp]", "got 'point'"),
        ("[points.lab9]", r"\[points.lab9\]: no such lab; there are: .*lab1_ddp"),
        ("[points]\nlab1_ddp = 3", r"\[points.lab1_ddp\]: expected a table, got 3"),
        ("[points.lab1_ddp]\nscaling = 3", "scaling: no such criterion; there are: .*ddp_scaling"),
        ("[points.lab1_ddp]\nsetup = -1", "setup: expected points from 0 up, got -1"),
        ("[points.lab1_ddp]\nsetup = nan", "setup: expected points from 0 up, got nan"),
        ("[points.lab1_ddp]\nsetup = true", "setup: expected points from 0 up, got True"),
        ("[points.lab1_ddp]\nsetup = '3'", "setup: expected points from 0 up, got '3'"),
        (
            "[points.lab1_ddp]\n" + "".join(f"{c.name} = 0\n" for c in get_lab(LAB).criteria),
            "nothing in lab1_ddp is worth anything",
        ),
        ("[limits.lab1_ddp]\nwall = 3", "wall: no such limit; there are: .*wall_s"),
        ("[limits.lab1_ddp]\nwall_s = 0", "wall_s: expected a whole number from 1 up, got 0"),
        ("[limits.lab1_ddp]\nwall_s = '3 GiB'", "wall_s: expected a whole number"),
        ("[limits.lab1_ddp]\ntmp_bytes = '3 GB'", "or a size such as .* got '3 GB'"),
        ("points =", "cannot be read: "),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(OptionsError, match=message) as error:
        read_options(tmp_path)
    assert str(tmp_path / NAME) in str(error.value)
    with pytest.raises(CourseError, match=message):
        Course(tmp_path).lab(LAB)


def test_notebooks_carry_the_points_and_say_when_they_do_not(course):
    (course.root / NAME).write_text(POINTS)
    with pytest.raises(CourseError, match=r"wrap_model is worth 5, but 0 is set .*make build"):
        Course(course.root).master(LAB)
    course = set_points(course)
    for kind in ("labs", "solutions"):
        notebook = nbformat.read(course.root / kind / LAB / f"{LAB}.ipynb", as_version=4)
        points = {c.id: c.metadata.get("nbgrader", {}).get("points") for c in notebook.cells}
        assert points["ddp_scaling"] == 10
        assert points["wrap_model"] == 0
        assert points["setup"] == get_lab(LAB)["setup"].points
    course.master(LAB)


def test_practice_counts_the_same_points(course):
    assert lab_of("ddp_scaling")["ddp_scaling"].points == 6
    set_points(course)
    assert lab_of("ddp_scaling").max_score == 99


def test_students_get_the_points(course, tmp_path):
    from autograder.authoring.release import COPIED, write_release

    set_points(course)
    (course.root / ".devcontainer").mkdir()
    for name in {*COPIED, "Makefile"} - {"nbgrader_config.py"}:
        shutil.copy(ROOT / name, course.root / name)
    for name in ("lib", "autograder"):
        (course.root / name).symlink_to(ROOT / name)
    write_release(course, tmp_path / "students", [LAB])
    assert Course(tmp_path / "students").lab(LAB).max_score == 99


def test_other_points_run_nothing_again_and_are_told(course, monkeypatch, capsys):
    file_record(course, "ada", {"ddp_scaling": "WRONG"})
    file_record(course, "kim", {"wrap_model": "WRONG"})
    course = set_points(course)
    grading = stub_grading(monkeypatch)
    arguments = ["grade", str(course.root / "handed_in"), "--lab", LAB, "--no-gradebook"]
    for round_ in range(2):
        records = course.root / "records.json"
        assert main([*arguments, "--json", str(records)]) == 0
        by_student = {r["student"]: r for r in json.loads(records.read_text())}
        assert (by_student["ada"]["score"], by_student["ada"]["max_score"]) == (89, 99)
        assert (by_student["kim"]["score"], by_student["kim"]["max_score"]) == (99, 99)
        assert by_student["kim"]["criteria"][1]["max_points"] == 0
        said = capsys.readouterr().out
        assert ("94/100 → 89/99" in said) == (round_ == 0)
        assert ("points of criteria" in said) == (round_ == 0)
    assert grading.asked == []
    kinds = [e["kind"] for e in Journal(course.journal_path).iter_entries()]
    assert kinds.count("submission") == 4


def test_other_limits_run_again(course):
    submission = Submission("ada", hand_in(course, "ada"))
    class_run = ClassRun(course, LAB, 3, True)
    keep(class_run, submission, made_record("ada", path=submission.path))
    assert known_record(submission, class_run) is not None
    (course.root / NAME).write_text(f"[limits.{LAB}]\nwall_s = 60\n")
    later = ClassRun(Course(course.root), LAB, 3, True)
    assert known_record(submission, later) is None
    assert later.key_of("sha") != class_run.key_of("sha")
