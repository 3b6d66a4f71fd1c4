"""Times, due dates, extensions and late penalties: one instant has one meaning everywhere."""

from __future__ import annotations

import json
import math
import stat
from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from course import LAB
from hypothesis import given
from hypothesis import strategies as st
from made_records import file_record, make_course, take_in

from autograder.__main__ import main
from autograder.course.calendar import LabDates
from autograder.course.course import Course, CourseError
from autograder.course.times import as_utc, parse_time
from autograder.gradebook.database import open_gradebook, read_grades, seconds_late
from autograder.gradebook.late import extensions_path, keep_calendar, late_students
from autograder.records.grading import latest, read_history

NOON = datetime(2026, 12, 5, 20, 0, tzinfo=UTC)
CALENDAR = """
[calendar]
timezone = "Europe/Berlin"
[calendar.lab1_ddp]
release = 2026-10-12 08:00:00
due = 2026-10-26
late_per_day = 10
late_at_most = 35
late_grace_minutes = 15
"""
DUE = datetime(2026, 10, 26, 23, 0, tzinfo=UTC)  # the end of that day in Berlin


@pytest.mark.parametrize(
    "text",
    [
        "2026-12-05T12:00:00-08:00",
        "2026-12-05 12:00:00 -0800",
        "2026-12-05 12:00:00 -08:00",
        "2026-12-05 12:00:00 PST",
        "2026-12-05 12:00:00 America/Los_Angeles",
        "2026-12-05T20:00:00Z\n",
        "2026-12-05 20:00:00.000000 UTC",
        "20261205T120000-0800",
        "2026-12-06 01:45:00 +0545",
        "Sat, 5 Dec 2026 12:00:00 -0800",
        "Sat, 05 Dec 2026 20:00:00 GMT",
        "Sat Dec 5 12:00:00 2026 -0800",
        "Sat Dec  5 12:00:00 PST 2026",
        "1796500800 -0800",
        "1796500800",
    ],
)
def test_one_instant_in_every_form(text):
    assert parse_time(text) == NOON


@pytest.mark.parametrize(
    "text",
    [
        "",
        "05/12/2026",
        "05/12/2026 12:00",
        "2026-12-05",
        "yesterday",
        "2026-12-05 12:00:00 IST",  # India, Israel or Ireland
        "2026-12-05 12:00:00 CET",
        "2026-12-05 12:00:00 -800",
        "2026-12-05 12:00:00 +9900",
        "2026-12-05 12:00:00 Europe/Nowhere",
        "2026-12-05 12:00:00 ../../etc/passwd",
        "2026-02-31 12:00:00 -0800",
        "Sun, 5 Dec 2026 12:00:00 -0800",  # a Saturday
        "Sat, 5 Dec 26 12:00:00 -0800",
        "Sat Dec 5 12:00:00 2026",
        "0001-01-01 00:00:00 +1400",
        "\0",
    ],
)
def test_what_has_no_single_meaning_is_refused_by_name(text):
    with pytest.raises(ValueError, match="expected a time, got"):
        parse_time(text)


@given(
    st.datetimes(datetime(2001, 9, 10), datetime(2199, 1, 1)).map(
        lambda t: t.replace(microsecond=0)
    ),
    st.integers(-14 * 4, 14 * 4),
)
def test_what_programs_write_is_read_back(naive, quarters):
    zone = timezone(timedelta(minutes=15 * quarters))
    time = naive.replace(tzinfo=zone)
    for text in (
        time.isoformat(),
        time.isoformat(" "),
        time.strftime("%Y-%m-%d %H:%M:%S %z"),
        format_datetime(time),
        time.strftime("%a %b %-d %H:%M:%S %Y %z"),
        f"{int(time.timestamp())} {time:%z}",
        as_utc(time),
    ):
        assert parse_time(text) == time, text


@given(st.floats(0, 120), st.floats(0, 1e7), st.floats(0, 50), st.floats(0, 1e4))
def test_a_penalty_grows_with_time_and_never_exceeds_the_score(score, late, per_day, grace):
    dates = LabDates(due=DUE, late_per_day=per_day, late_at_most=60, late_grace_s=grace)
    penalty = dates.penalty(score, late)
    assert 0 <= penalty <= min(score, 60)
    assert penalty <= dates.penalty(score, late + 3600)
    if late <= grace:
        assert penalty == 0
    elif score > 60:
        assert penalty == pytest.approx(min(60, per_day * math.ceil(late / 86400)))


@pytest.fixture
def course(tmp_path, monkeypatch):
    made = make_course(tmp_path / "course")
    (made.root / "course.toml").write_text(CALENDAR)
    monkeypatch.setenv("AUTOGRADER_COURSE", str(made.root))
    for student in ("ada", "kim"):
        file_record(made, student, {"ddp_unused": "WRONG"} if student == "kim" else {})
        take_in(made, latest(read_history(made), LAB, 3)[student].record)
    with open_gradebook(made) as book:
        for student, hours in (("ada", 30.0), ("kim", 0.2)):
            time = (DUE + timedelta(hours=hours)).replace(tzinfo=None)
            book.find_submission(LAB, student).timestamp = time
        book.db.commit()
    return Course(made.root)


def scores(course):
    with open_gradebook(course) as book:
        return {g.student: (g.score, g.penalty) for g in read_grades(book, LAB)}


def test_the_calendar_is_what_the_gradebook_has(course):
    keep_calendar(course, LAB)
    assert scores(course) == {"ada": (80, 20), "kim": (96, 0)}  # kim is within the 15 minutes
    [ada, kim] = late_students(course, LAB, {"ada", "kim"})
    assert (ada.words, kim.words) == ("1 d 6 h: 20 points off", "0 h 12 min, nothing off")
    with open_gradebook(course) as book:
        assert book.find_assignment(LAB).duedate == DUE.replace(tzinfo=None)


def test_an_extension_takes_the_penalty_away_at_once_and_keeps_what_a_person_gave(course, capsys):
    keep_calendar(course, LAB)
    with open_gradebook(course) as book:
        grade = book.find_grade("reflect_1", LAB, LAB, "ada")
        grade.manual_score, grade.needs_manual_grade = 1.5, False
        book.db.commit()
    assert main(["extend", "Ada", LAB, "2026-10-27T12:00:00+01:00"]) == 0
    assert scores(course)["ada"] == (91.5, 10)
    assert main(["extend", "ada", LAB, "2026-10-28"]) == 0
    assert scores(course)["ada"] == (101.5, 0)
    with open_gradebook(course) as book:
        assert not book.find_grade("reflect_1", LAB, LAB, "ada").needs_manual_grade
        assert seconds_late(book, LAB) == {"ada": 0, "kim": 720}
    capsys.readouterr()
    assert main(["extend"]) == 0
    assert f"{LAB}: ada until 2026-10-29 00:00 CET" in capsys.readouterr().out
    assert stat.S_IMODE(extensions_path(course).stat().st_mode) == 0o600


def test_an_extension_before_anything_is_handed_in(course, capsys, recwarn):
    with open_gradebook(course) as book:
        book.update_or_create_student("lea")
        book.db.commit()
    assert main(["extend", "lea", LAB, "2026-10-30"]) == 0
    keep_calendar(course, LAB, new={"lea"})
    with open_gradebook(course) as book:
        assert book.find_submission(LAB, "lea").duedate == datetime(2026, 10, 30, 23)
    assert [str(warned.message) for warned in recwarn if "session" in str(warned.message)] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["adda", LAB, "2026-10-30"], "did you mean ada?"),
        (["ada", LAB, "2026-10-20"], "expected a time after 2026-10-26T23:00:00"),
        (["ada", LAB, "30/10/2026"], "DATE: expected a date such as"),
        (["ada", "lab2_accumulation", "2026-10-30"], "lab2_accumulation has no due date: set due"),
        (["ada", LAB], "expected STUDENT LAB DATE"),
    ],
)
def test_a_wrong_extension_changes_nothing(course, capsys, arguments, says):
    assert main(["extend", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not extensions_path(course).exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[calendar.lab9]", "lab9: no such lab"),
        ("[calendar.lab1_ddp]\ndeadline = 2026-10-26", "deadline: no such key"),
        ("[calendar.lab1_ddp]\ndue = '26.10.2026'", "due: expected a date such as"),
        ("[calendar.lab1_ddp]\ndue = 5", "due: expected a date such as"),
        ("[calendar.lab1_ddp]\nlate_per_day = 5", "late_per_day without due"),
        ("[calendar.lab1_ddp]\ndue = 2026-10-26\nlate_at_most = 5", "late_per_day is missing"),
        ("[calendar.lab1_ddp]\ndue = 2026-10-26\nlate_per_day = -5", "a number from 0 up"),
        ("[calendar.lab1_ddp]\ndue = 2026-10-26\nrelease = 2026-10-28", "due is before release"),
        ("[calendar]\nbonus_zero.used = 'no'", "used: expected true or false, got 'no'"),
        ("[calendar]\nlab1_ddp.used = 0", "lab1_ddp: used: expected true or false, got 0"),
        ("[calendar]\ntimezone = 'Berlin'", 'expected a name such as "Europe/Berlin"'),
    ],
)
def test_a_wrong_calendar_is_named(tmp_path, text, says):
    (tmp_path / "course.toml").write_text(text)
    with pytest.raises(CourseError, match=r"course\.toml: \[calendar\]") as error:
        _ = Course(tmp_path).calendar
    assert says in str(error.value)


def test_a_damaged_file_of_extensions_is_named(course):
    extensions_path(course).write_text(json.dumps({LAB: ["ada"]}))
    with pytest.raises(CourseError, match=r"extensions\.json is damaged"):
        keep_calendar(course, LAB)
