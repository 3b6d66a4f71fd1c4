"""`autograder status`: who is done, who runs, who waits; and whoever grades does not notice it."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import math
import os
import re
import subprocess
import sys

import pytest
from course import LAB
from made_records import hand_in, made_record, make_course, stub_grading
from rich.console import Console

from autograder.__main__ import main
from autograder.criteria import criterion as verdicts
from autograder.criteria import get_lab
from autograder.records import progress as module
from autograder.records.journal import Journal
from autograder.records.progress import Announcer, Progress, Tail, birth
from autograder.records.progress_view import ProgressView, to_json, watch

NOW = 1_000_000.0


@pytest.fixture
def course(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOGRADER_COURSE", str(tmp_path))
    monkeypatch.setattr(module.time, "time", lambda: NOW)
    return make_course(tmp_path)


def text(status, now=NOW):
    console = Console(width=110, file=io.StringIO(), record=True)
    console.print(status.view(status.refresh(), now))
    return console.export_text()


@pytest.fixture
def batch(course):
    """A class of five in the middle of its grading."""
    journal, announcer = Journal(course.journal_path), Announcer(course.journal_path)
    announcer.begin(
        ["ada", "kim", "lea", "max", "zoe"], ["ada"], lab=LAB, world_size=3, jobs=2, again=False
    )

    def attempt(student, number, at):
        entry = {"kind": "attempt", "key": student * 9, "lab": LAB, "student": student}
        journal.append(entry | {"try": number, "pid": 1, "time": at})

    attempt("kim", 1, NOW)
    record = made_record("kim", seconds=40.0)
    journal.append_record("kim" * 9, record)
    announcer.done(record)
    attempt("lea", 1, NOW)
    infra = {"kind": "infra", "lab": LAB, "student": "lea", "time": NOW, "try": 1}
    journal.append(infra | {"message": "Traceback:\nthe front died\n"})
    attempt("lea", 2, NOW + 10)
    for name in ("setup", "wrap_model"):
        verdict = {"kind": "verdict", "key": "lea" * 9, "seed_id": "lea:00ff", "name": name}
        journal.append(verdict)
    return announcer


def test_who_is_done_running_and_waiting(course, batch):
    status = ProgressView(course)
    said = text(status, NOW + 30)
    assert "lab1_ddp on 3 ranks: 2 of 5 done (1 known before), 1 running, 2 waiting" in said
    assert f"process {os.getpid()} on" in said
    assert "(alive), for 0:30, about 0:50 left, 2 at once" in said  # (40 - 20 + 2 * 40) / 2
    [line] = [line for line in said.splitlines() if line.strip().startswith("lea")]
    assert line.split()[:4] == ["lea", "running", "20", "2"]
    number = [c.name for c in get_lab("lab1_ddp").criteria].index("sampler_partition") + 1
    total = len(get_lab("lab1_ddp").criteria)
    assert f"check {number} of {total}: sampler_partition" in line
    assert "before: the front died" in said
    assert "waiting: max, zoe" in said


def test_the_end_and_what_the_grader_could_not_do(course, batch):
    status = ProgressView(course)
    assert status.refresh()[0].ended is None
    batch.done(made_record("lea"))
    batch.done(made_record("max", {"*": "INFRA"}))
    batch.done(made_record("zoe"))
    batch.end(LAB)
    said = text(status, NOW + 90)
    assert "4 of 5 done (1 known before), 1 INFRA" in said
    assert "max" in said
    assert "is at gradebook and feedback" in said  # this process is still there
    [shown] = to_json(status.refresh(), NOW + 90)
    assert shown["ended"] is True
    assert shown["seconds_left"] is None
    states = {run["student"]: run["state"] for run in shown["students"]}
    assert states == {"ada": "known", "kim": "done", "lea": "done", "max": "INFRA", "zoe": "done"}


def test_a_grader_that_was_killed_is_said_to_be_gone(course):
    code = (
        "import sys; from autograder.records.progress import Announcer; from pathlib import Path\n"
        f"Announcer(Path({str(course.journal_path)!r})).begin(['ada'], [], lab={LAB!r}, "
        "world_size=3, jobs=1, again=False)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True)
    assert done.returncode == 0
    status = ProgressView(course)
    said = text(status)
    assert "is gone, and was not through: run the same command again" in said
    assert status.refresh()[0].alive() is False
    assert status.refresh()[0].left_s(NOW) is None


def test_a_process_that_got_the_number_of_a_dead_one_is_not_taken_for_it(course, batch):
    [shown] = ProgressView(course).refresh()
    assert shown.alive() is True
    shown.born = "1"
    assert shown.alive() is False
    shown.host = "another"
    assert shown.alive() is None
    later = subprocess.Popen(["sleep", "60"])  # tests were imported seconds ago
    try:
        assert birth(later.pid) == birth(later.pid) not in ("", birth(os.getpid()))
    finally:
        later.kill()
        later.wait()
    assert birth(2**22 + 1) == ""


def test_the_reader_waits_for_no_lock_and_takes_none(course, batch):
    with open(course.journal_path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a writer holds it
        assert "2 of 5 done" in text(ProgressView(course))
    before = course.journal_path.read_bytes()
    status = ProgressView(course)
    status.refresh()
    with open(course.journal_path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody has it
    assert course.journal_path.read_bytes() == before


def test_a_line_that_is_not_finished_comes_later(tmp_path):
    path = tmp_path / "journal.jsonl"
    tail = Tail(path)
    assert tail.read() == ([], False)
    path.write_bytes(b'{"n": 1}\n{"n"')
    assert tail.read() == ([{"n": 1}], True)
    assert tail.read() == ([], False)
    with path.open("ab") as file:
        file.write(b': 2}\n[1]\n\xff\n{"n": 3}\n')
    assert tail.read() == ([{"n": 2}, {"n": 3}], False)
    path.write_bytes(b'{"n": 4}\n')  # a new course in the same place
    assert tail.read() == ([{"n": 4}], True)


def test_entries_of_another_version_do_no_harm():
    progress = Progress()
    kinds = ("batch", "batch_end", "attempt", "verdict", "infra", "submission", "done", "new")
    progress.feed([{"kind": kind, **more} for kind in kinds for more in ({}, {"record": 3})])
    progress.feed([{}, {"kind": None}, {"kind": "batch", "known": 3, "students": None}])
    assert progress.shown() == []


def test_entries_that_are_no_times_or_numbers_do_no_harm(course, batch):
    entry = {"kind": "batch", "students": ["ada"], "known": [], "lab": LAB, "world_size": 3}
    entry |= {"born": "1", "host": "elsewhere", "jobs": 1, "pid": 1, "time": NOW}
    progress = Progress()
    progress.feed([entry | {"time": math.nan}, entry | {"pid": math.inf}])
    assert progress.batches == []
    announcer = Announcer(course.journal_path)
    infra = verdicts.Verdict("setup", verdicts.Status.INFRA, 0.0, 5.0, " \x1b[2J ")
    announcer.done(dataclasses.replace(made_record("lea"), criteria=(infra,)))
    assert "lea INFRA 2 ?" in re.sub(" +", " ", text(ProgressView(course)))


def test_a_lost_grader_elsewhere_is_forgotten_once_its_class_is_graded_again():
    entry = {"kind": "batch", "students": ["ada"], "known": [], "lab": LAB, "world_size": 3}
    entry |= {"born": "1", "host": "elsewhere", "jobs": 1, "pid": 1, "time": NOW}
    progress = Progress()
    progress.feed([entry, entry | {"students": ["kim"]}])
    assert len(progress.shown()) == 2
    progress.feed([entry | {"pid": 2}, {"kind": "batch_end", "lab": LAB, "pid": 2, "time": NOW}])
    assert [batch.runs.keys() for batch in progress.shown()] == [{"kim"}, {"ada"}]


def test_a_process_that_nobody_has_waited_for_is_no_more():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert birth(child.pid) == ""
    child.wait()


def test_two_that_handed_in_the_same_are_both_done(course):
    announcer = Announcer(course.journal_path)
    announcer.begin(["ada", "kim"], [], lab=LAB, world_size=3, jobs=2, again=False)
    journal = Journal(course.journal_path)
    journal.append_record("k", made_record("ada"))
    announcer.done(made_record("ada"))
    announcer.done(made_record("kim"))  # from ada's record: nothing was run
    assert "2 of 2 done" in text(ProgressView(course))


def test_without_a_grading_it_says_so(course, capsys):
    assert main(["status"]) == 0
    assert "no grading is noted" in capsys.readouterr().out
    assert main(["status", "--lab", LAB, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["status", "--every", "0"]) == 2


def test_watching_ends_when_nobody_grades(course, batch, monkeypatch):
    turns = []

    def sleep(seconds):
        turns.append(seconds)
        for name in ("lea", "max", "zoe")[: len(turns)][-1:]:
            batch.done(made_record(name))
        if len(turns) == 3:
            batch.end(LAB)
        if len(turns) == 4:  # nbgrader has it all
            monkeypatch.setattr(module, "birth", lambda pid: "")

    monkeypatch.setattr("autograder.records.progress_view.time.sleep", sleep)
    console = Console(width=110, file=io.StringIO(), record=True)
    watch(ProgressView(course), console, 2.0, lambda: NOW)
    assert turns == [2.0] * 4
    assert "5 of 5 done" in console.export_text()


def test_a_class_notes_itself(course, monkeypatch, capsys):
    stub = stub_grading(monkeypatch)
    stub.lost = {"kim": {"setup": "WRONG"}}
    for student in ("ada", "kim"):
        hand_in(course, student)
    grade = ["grade", str(course.root / "handed_in"), "--lab", LAB, "--no-gradebook"]
    assert main(grade) == 0
    hand_in(course, "lea")
    assert main(grade) == 0
    capsys.readouterr()
    first, second = (e for e in Journal(course.journal_path).iter_entries() if e["kind"] == "batch")
    assert (first["known"], second["known"]) == ([], ["ada", "kim"])
    assert main(["status"]) == 0
    assert "3 of 3 done (2 known before)" in capsys.readouterr().out


def test_a_full_disk_does_not_stop_the_grading(course, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    announcer = Announcer(course.journal_path)
    announcer.begin(["ada"], [], lab=LAB, world_size=3, jobs=1, again=False)
    announcer.done(made_record("ada"))
    announcer.end(LAB)
