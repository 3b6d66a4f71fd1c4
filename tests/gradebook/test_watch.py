"""`autograder watch`: what is new is graded and fed back, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest
from course import LAB, ROOT
from made_records import hand_in, make_course, stub_grading

from autograder.__main__ import main
from autograder.cli import watch_round
from autograder.cli.grade_steps import GradeCommand
from autograder.gradebook import incoming
from autograder.gradebook.incoming import Inbox, identity_of
from autograder.gradebook.watching import DAY_S, Known, only_watch

OTHER = "lab2_accumulation"


class NbGrader:
    """Stands for nbgrader's process."""

    ended = False

    def close(self):
        self.ended = True


class Class:
    """A course whose grading is a stand-in, and a folder that students hand in to."""

    def __init__(self, root, monkeypatch):
        self.course = make_course(root)
        monkeypatch.setenv("AUTOGRADER_COURSE", str(self.course.root))
        monkeypatch.chdir(self.course.root)
        self.pool = stub_grading(monkeypatch)
        self.folder = self.course.root / "handed_in"
        self.folder.mkdir()
        self.filled: list[str] = []
        self.fails: set[str] = set()
        monkeypatch.setattr(GradeCommand, "fill_gradebook", lambda command: self.fill(command))
        self.begun: list[NbGrader] = []
        monkeypatch.setattr("autograder.gradebook.fill.begin_nbgrader", self.begin)
        monkeypatch.setattr(GradeCommand, "_look_for_copies", lambda *_: None)  # half of the time

    def begin(self, course, lab):
        self.begun.append(NbGrader())
        return self.begun[-1]

    def fill(self, command):
        for record in command.records:
            if record.student in self.fails:
                raise watch_round.CourseError(f"nbgrader failed for {record.student}")
        for record in command.records:
            if not record.infra:
                self.filled.append(record.student)
                page = self.course.feedback_page(command.lab.name, record.student)
                page.parent.mkdir(parents=True, exist_ok=True)
                page.write_text(f"feedback {len(self.filled)} for {record.student}")

    def watch(self, *options, code=0):
        command = ["watch", str(self.folder), "--lab", LAB, "--once", "--settle", "0.01"]
        assert main([*command, *options]) == code

    def page(self, student, kind="feedback"):
        path = self.folder / student / f"{LAB}.{kind}.html"
        return path.read_text("utf-8") if path.exists() else ""

    def state(self):
        return json.loads((self.course.build / "watch" / f"{LAB}.json").read_text())


@pytest.fixture
def term(tmp_path, monkeypatch):
    return Class(tmp_path / "course", monkeypatch)


# --- what is graded -----------------------------------------------------------------------------


def test_what_is_new_is_graded_and_fed_back_and_nothing_twice(term, capsys):
    hand_in(term.course, "ada")
    term.watch()
    assert term.page("ada") == "feedback 1 for ada"
    assert "ada: 100 of 100" in capsys.readouterr().out
    term.watch()
    (term.folder / "ada" / f"{LAB}.ipynb").touch()  # the same content at another time
    hand_in(term.course, "kim")
    term.watch()
    hand_in(term.course, "ada", "better = True")
    term.watch()
    assert term.pool.asked == ["ada", "kim", "ada"]
    assert term.page("ada") == "feedback 3 for ada"
    rows = (term.course.build / "grades.csv").read_text()
    assert "ada" in rows
    assert "kim" in rows


def test_several_labs_are_watched_at_once(term):
    for kind in ("labs", "solutions"):
        shutil.copytree(ROOT / kind / OTHER, term.course.root / kind / OTHER)
    hand_in(term.course, "ada")
    hand_in(term.course, "ada", lab=OTHER)
    term.watch("--lab", OTHER)
    assert term.filled == ["ada", "ada"]
    assert (term.folder / "ada" / f"{OTHER}.feedback.html").exists()


def test_an_earlier_version_comes_back_without_being_run(term):
    first = hand_in(term.course, "ada").read_bytes()
    term.watch()
    hand_in(term.course, "ada", "worse = True")
    term.watch()
    (term.folder / "ada" / f"{LAB}.ipynb").write_bytes(first)
    term.watch("--per-day", "2")  # the limit is for what is run
    assert term.pool.asked == ["ada", "ada"]
    assert term.page("ada") == "feedback 3 for ada"


def test_a_changed_time_is_fed_back_and_not_run(term):
    path = hand_in(term.course, "ada")
    path.with_name("timestamp.txt").write_text("2026-10-26T12:00:00Z")
    term.watch()
    path.with_name("timestamp.txt").write_text("2026-10-26 14:00:00 +0200")  # the same instant
    term.watch()
    assert term.filled == ["ada"]
    path.with_name("timestamp.txt").write_text("2026-10-28T12:00:00Z")
    term.watch()
    assert (term.pool.asked, term.filled) == (["ada"], ["ada", "ada"])
    assert "2026-10-28" in (term.course.build / "watch" / LAB / "ada" / "timestamp.txt").read_text()


def test_pages_can_go_elsewhere_and_are_for_whom_the_notebook_is_for(term, tmp_path):
    path = hand_in(term.course, "ada")
    path.chmod(0o640)
    term.watch()
    page = path.with_name(f"{LAB}.feedback.html")
    assert stat.S_IMODE(page.stat().st_mode) == 0o640
    path.chmod(0o600)
    hand_in(term.course, "ada", "more = 1")
    out = tmp_path / "pages"
    term.watch("--feedback", str(out))
    assert (out / "ada" / f"{LAB}.feedback.html").read_text() == "feedback 2 for ada"
    assert term.page("ada") == "feedback 1 for ada"


# --- one broken submission stops nothing ----------------------------------------------------------


def test_what_is_broken_stops_nobody_else(term, capsys, tmp_path):
    outside = hand_in(term.course, "outside").rename(tmp_path / "elsewhere.ipynb")
    shutil.rmtree(term.folder / "outside")
    for student in ("ada", "zoe"):
        hand_in(term.course, student)
    hand_in(term.course, "two").rename(term.folder / "two" / "one.ipynb")
    hand_in(term.course, "two", "y = 2").rename(term.folder / "two" / "other.ipynb")
    hand_in(term.course, "[TA], x")
    hand_in(term.course, "bad").write_text('{"not a notebook": 1}')
    for student in ("pipe", "link", "dir", "empty"):
        (term.folder / student).mkdir()
    os.mkfifo(term.folder / "pipe" / f"{LAB}.ipynb")
    (term.folder / "link" / f"{LAB}.ipynb").symlink_to(outside)
    (term.folder / "dir" / f"{LAB}.ipynb").mkdir()
    term.watch()
    assert term.page("ada")
    assert term.page("zoe")
    assert term.page("bad")
    said = capsys.readouterr().out
    assert "two: not graded: several notebooks" in said
    assert "rename the folder" in said
    assert "empty: not graded" in said
    assert term.state()["bad"]["graded_at"] == []  # nothing was run, so it is not counted


def test_a_failing_gradebook_costs_only_whose_it_is_and_is_tried_again(term, capsys):
    for student in ("ada", "bob", "kim"):
        hand_in(term.course, student)
    term.fails = {"bob"}
    term.watch("--jobs", "3", code=1)
    assert term.page("ada")
    assert term.page("kim")
    assert not term.page("bob")
    assert "bob: NOT GRADED: nbgrader failed for bob" in capsys.readouterr().out
    assert "by a fault of the grader and not of yours" in term.page("bob", "waiting")
    term.watch()  # not at once again: what fails waits longer and longer
    assert not term.page("bob")
    state = term.state()
    assert state["bob"]["tries"] == 2
    state["bob"]["retry_at"] = 0
    (term.course.build / "watch" / f"{LAB}.json").write_text(json.dumps(state))
    term.fails = set()
    term.watch()
    assert term.page("bob")
    assert not term.page("bob", "waiting")
    assert sorted(term.pool.asked) == ["ada", "bob", "kim"]  # nobody was run twice
    assert len(term.state()["bob"]["graded_at"]) == 1
    assert all(nbgrader.ended for nbgrader in term.begun)  # a watch lasts for a term


def test_our_failure_is_told_and_not_counted(term, monkeypatch, capsys):
    from autograder.submission.without_run import not_graded

    def fails(todo, class_run, jobs, done):
        for index, submission in todo.items():
            done(index, not_graded(submission, class_run, "no memory"))
        return {}

    with monkeypatch.context() as patch:
        patch.setattr("autograder.batch.grade_class._run_pool", fails)
        hand_in(term.course, "ada")
        term.watch(code=1)
    assert "ada: NOT GRADED: no memory" in capsys.readouterr().out
    assert term.state()["ada"]["graded_at"] == []
    term.watch("--per-day", "1")
    assert term.page("ada")


def test_a_link_in_the_way_leads_nowhere(term, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    hand_in(term.course, "ada")
    (term.folder / "ada" / f"{LAB}.feedback.html").symlink_to(victim)
    term.watch()
    assert victim.read_text() == "mine"
    assert not (term.folder / "ada" / f"{LAB}.feedback.html").is_symlink()


def test_a_folder_that_is_swapped_for_a_link_gets_no_page(term, tmp_path, monkeypatch, capsys):
    hand_in(term.course, "ada")
    outside = tmp_path / "outside"
    fill = term.fill

    def swap(command):
        fill(command)
        (term.folder / "ada").rename(outside)
        (term.folder / "ada").symlink_to(outside)

    term.fill = swap
    term.watch(code=1)
    assert not (outside / f"{LAB}.feedback.html").exists()
    assert "could not be given back" in capsys.readouterr().out


# --- files that are being written ---------------------------------------------------------------


def test_a_file_is_taken_when_it_is_complete(term, monkeypatch):
    path = hand_in(term.course, "ada")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    inbox = Inbox(term.course, LAB, term.folder, 0.01)
    time.sleep(0.05)
    look = inbox.look({})
    assert (look.ready, look.growing) == ([], ["ada"])  # at rest, and only half a notebook
    monkeypatch.setattr(incoming, "PATIENCE_S", 0.02)
    [taken] = inbox.look({}).ready  # for ever half a notebook: it counts as it is
    monkeypatch.undo()
    path.write_bytes(whole)
    time.sleep(0.05)
    [taken] = inbox.look({}).ready
    assert taken.submission.path.read_bytes() == whole
    assert taken.submission.path.is_relative_to(term.course.build / "watch")
    slow = Inbox(term.course, LAB, term.folder, 3600.0)
    path.write_bytes(whole)
    assert slow.look({}).growing == ["ada"]
    assert inbox.look({"ada": identity_of(path)}).ready == []


def test_what_has_gone_since_the_folder_was_read_is_not_taken(term, monkeypatch):
    path, find = hand_in(term.course, "ada"), incoming.find_submissions

    def vanishes(*args, **kwargs):
        found = find(*args, **kwargs)
        path.unlink()
        return found

    monkeypatch.setattr(incoming, "find_submissions", vanishes)
    look = Inbox(term.course, LAB, term.folder, 0.5).look({})
    assert (look.ready, look.growing) == ([], ["ada"])


def test_what_changes_while_it_is_copied_is_not_taken(term, monkeypatch):
    path = hand_in(term.course, "ada")
    inbox, draft = Inbox(term.course, LAB, term.folder, 0.01), incoming._draft
    time.sleep(0.05)

    def saves_meanwhile(source, folder):
        made = draft(source, folder)
        path.write_bytes(path.read_bytes() + b" ")
        return made

    monkeypatch.setattr(incoming, "_draft", saves_meanwhile)
    assert inbox.look({}).growing == ["ada"]
    assert list((term.course.build / "watch" / LAB / "ada").iterdir()) == []


def test_a_look_at_an_unchanged_class_reads_no_notebook(term, monkeypatch):
    path = hand_in(term.course, "ada")
    inbox = Inbox(term.course, LAB, term.folder, 0.01)
    time.sleep(0.05)
    [taken] = inbox.look({}).ready

    def reads(*_, **__):
        raise AssertionError("a notebook was read")

    monkeypatch.setattr(incoming, "sha256_of", reads)
    monkeypatch.setattr(incoming, "find_submissions", reads)
    assert inbox.look({"ada": taken.identity}).ready == []
    assert inbox.look({}).ready == [taken]
    path.write_bytes(path.read_bytes())
    with pytest.raises(AssertionError, match="was read"):
        inbox.look({"ada": taken.identity})


# --- how often ------------------------------------------------------------------------------------


def test_the_limit_holds_back_tells_until_when_and_loses_nothing(term, capsys):
    (term.course.root / "course.toml").write_text('[calendar]\ntimezone = "Europe/Berlin"\n')
    for number in range(3):
        hand_in(term.course, "ada", f"number = {number}")
        term.watch("--per-day", "2")
    assert len(term.pool.asked) == 2
    told = term.page("ada", "waiting")
    until = term.state()["ada"]["graded_at"][0] + DAY_S
    assert "graded 2 times within 24 hours" in told
    assert watch_round.say_time(
        watch_round.datetime.fromtimestamp(until, watch_round.UTC), term.course.calendar.zone
    ) in " ".join(told.split())
    assert term.page("ada") == "feedback 2 for ada"  # that of before stays
    assert capsys.readouterr().out.count("ada: waits") == 1
    hand_in(term.course, "kim")  # does not wait for others
    term.watch("--per-day", "2")
    assert term.page("kim")
    state = term.state()
    state["ada"]["graded_at"] = [time - DAY_S for time in state["ada"]["graded_at"]]
    (term.course.build / "watch" / f"{LAB}.json").write_text(json.dumps(state))
    term.watch("--per-day", "2")
    assert term.page("ada") == "feedback 4 for ada"
    assert not term.page("ada", "waiting")


def test_what_waits_does_not_count_and_a_clock_that_goes_back_locks_nobody_out():
    known = Known(graded_at=[100.0, 200.0])
    assert known.held_until(3, 300.0) is None
    assert known.held_until(2, 300.0) == 100.0 + DAY_S
    assert known.held_until(1, 300.0) == 200.0 + DAY_S
    assert known.held_until(2, 100.0 + DAY_S) is None
    assert Known(graded_at=[9e9]).held_until(1, 300.0) == 300.0 + DAY_S
    known.begin("x", 0.0)
    assert not known.waits("x", 0.0)  # killed once: at once again
    known.begin("x", 0.0)
    assert known.waits("x", 59.0)
    assert not known.waits("x", 60.0)
    assert not known.waits("y", 0.0)
    for _ in range(2000):
        known.begin("x", 0.0)
    assert known.retry_at == 3600.0


# --- killed, stopped, one at a time ---------------------------------------------------------------


def test_killed_between_grading_and_feedback_it_grades_nothing_again(term, monkeypatch):
    class Killed(BaseException):
        pass

    def dies(command):
        raise Killed

    for student in ("ada", "kim"):
        hand_in(term.course, student)
    fill = term.fill
    term.fill = dies
    with pytest.raises(Killed):
        term.watch("--jobs", "2")
    assert len(term.state()["ada"]["graded_at"]) == 1
    term.fill = fill
    term.watch()
    assert sorted(term.pool.asked) == ["ada", "kim"]
    assert term.page("ada")
    assert term.page("kim")
    (term.course.build / "watch" / f"{LAB}.json").unlink()
    term.watch()  # what it knew is lost: all feedback is given back once more, and nothing is run
    assert sorted(term.pool.asked) == ["ada", "kim"]


def test_two_at_once_is_refused_and_cron_leaves_it_to_the_other(term, capsys):
    hand_in(term.course, "ada")
    with only_watch(term.course):
        term.watch()
        assert "another watch" in capsys.readouterr().out
        assert main(["watch", str(term.folder), "--lab", LAB]) == 2
    assert term.pool.asked == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_the_submissions_at_hand(term, number, capsys, monkeypatch):
    for student in ("ada", "bob", "kim"):
        hand_in(term.course, student)
    fill, before = term.fill, signal.getsignal(number)

    def signalled(command):
        os.kill(os.getpid(), number)
        fill(command)

    term.fill = signalled
    command = ["watch", str(term.folder), "--lab", LAB, "--settle", "0.01", "--jobs", "1"]
    assert main(command) == 0
    assert len(term.filled) == 1
    assert "ended, as asked" in capsys.readouterr().out
    assert signal.getsignal(number) is before
    term.fill = fill
    term.watch()
    assert sorted(term.filled) == ["ada", "bob", "kim"]


def test_a_second_signal_ends_it_at_once(term):
    hand_in(term.course, "ada")

    def impatient(command):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    term.fill = impatient
    assert main(["watch", str(term.folder), "--lab", LAB, "--settle", "0.01"]) == 130


def test_it_waits_for_what_comes_and_survives_a_folder_that_goes_away(term, monkeypatch):
    away, lines = term.folder.with_name("away"), []

    def until(condition):
        ends_at = time.monotonic() + 60
        while not condition() and time.monotonic() < ends_at:
            time.sleep(0.02)

    def plays_on():
        try:
            until(lambda: term.page("ada"))
            term.folder.rename(away)
            until(lambda: any("there is no file or folder" in line for line in lines))
            away.rename(term.folder)
            hand_in(term.course, "kim")
            until(lambda: term.page("kim"))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    hand_in(term.course, "ada")
    monkeypatch.setattr(watch_round, "say", lambda _, line: lines.append(line))
    thread = threading.Thread(target=plays_on)
    command = ["watch", str(term.folder), "--lab", LAB, "--settle", "0.01", "--every", "0.05"]
    thread.start()
    try:
        assert main(command) == 0
    finally:
        thread.join()
    assert term.page("kim")
    assert sum("nothing could be collected" in line for line in lines) == 1


def test_changed_code_begins_anew_before_it_judges(term, monkeypatch):
    class Anew(Exception):
        pass

    def execv(program, words):
        assert (program, words[0]) == (sys.executable, sys.executable)
        raise Anew

    codes = iter(["before", "after"])
    monkeypatch.setattr(watch_round, "code_of", lambda labs: next(codes))
    monkeypatch.setattr(os, "execv", execv)
    hand_in(term.course, "ada")
    with pytest.raises(Anew):
        term.watch()
    assert term.pool.asked == []


# --- usage ----------------------------------------------------------------------------------------


def test_what_cannot_be_watched_is_refused_by_name(term, capsys):
    def said(*words):
        assert main(["watch", *words, "--lab", LAB, "--once"]) == 2
        return capsys.readouterr().err

    assert "there is no folder" in said(str(term.folder / "nobody"))
    own = term.course.build / "nbgrader" / "submitted"
    own.mkdir(parents=True)
    assert "--feedback" in said(str(own))
    assert "has its own way back" in said("exchange", "--feedback", "x")
    assert "release_assignment" in said("exchange")
    (term.course.build / "watch").mkdir(exist_ok=True)
    (term.course.build / "watch" / f"{LAB}.json").write_text('{"ada": {"colour": 1}}')
    assert "is damaged" in said(str(term.folder))
    for words in (["--per-day", "0"], ["--every", "0"], ["--settle", "nan"]):
        with pytest.raises(SystemExit):
            main(["watch", str(term.folder), "--lab", LAB, *words])


def test_the_unit_file_is_right():
    unit = ROOT / "docs" / "watch" / "autograder-watch.service"
    text = unit.read_text("utf-8")
    assert "KillMode=mixed" in text  # else systemd ends the submissions at hand, too
    words = next(line for line in text.splitlines() if line.startswith("ExecStart=")).split()
    parser_words = [w for w in words[1:] if not w.startswith("$")]
    assert parser_words[0] == "watch"
    if shutil.which("systemd-analyze"):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(unit)],
            capture_output=True,
            text=True,
        )
        wrong = [line for line in done.stderr.splitlines() if "not executable" not in line]
        assert not any(unit.name in line for line in wrong), done.stderr
