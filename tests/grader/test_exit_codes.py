"""Exit codes, `--version`, and what `autograder grade` says at its end."""

from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys

import pytest
from course import LAB, ROOT
from made_records import hand_in, made_record, make_course, stub_grading, take_in

from autograder import __main__ as command_line
from autograder.__main__ import main
from autograder.cli import prepare
from autograder.cli.arguments import FAILURES, exit_codes
from autograder.cli.next_steps import next_steps
from minidist import __version__

GUIDE = (ROOT / "book" / "instructors.md").read_text("utf-8")


def test_the_guides_table_is_the_programs():
    _, _, table = GUIDE.partition("| Code | Meaning |\n|---|---|\n")
    listed = [line for line in table.splitlines() if line.startswith("| ")]
    assert listed == [f"| {code} | {meaning} |" for code, meaning in exit_codes()]


def test_every_command_is_in_the_table():
    [commands] = [
        action.choices
        for action in command_line._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    assert set(FAILURES) == set(commands)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("not so"), 2),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 1),
        (OSError(errno.EACCES, "Permission denied", "x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_ends_with_its_code(error, code, monkeypatch, capsys):
    def fails(*_):
        raise error

    monkeypatch.setattr(prepare, "_init", fails)
    assert main(["init"]) == code
    assert code in dict(exit_codes())
    assert capsys.readouterr().err.startswith("autograder: ")


@pytest.mark.parametrize("command", FAILURES)
def test_wrong_usage_is_2_and_help_is_0(command, capsys):
    for arguments, code in ((["--no-such-option"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as end:
            main([command, *arguments])
        assert end.value.code == code


@pytest.mark.parametrize(
    ("module", "typed", "offered"),
    [
        ("autograder", "gr", "grade "),
        ("autograder", "publish --to mo", "moodle "),
        ("minidist", "com", "compare "),
    ],
)
def test_the_shell_completes_commands_and_their_options(tmp_path, module, typed, offered):
    line, answer = f"{module} {typed}", tmp_path / "answer"
    asks = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    asks |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "_ARGCOMPLETE_IFS": "\n"}
    subprocess.run([sys.executable, "-m", module], env=os.environ | asks, check=True)
    assert answer.read_text().split("\n") == [offered]


def test_version_names_what_a_report_should_name():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "autograder", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"autograder {__version__} (Python 3.")
    assert ", torch 2." in done.stdout
    assert "nbgrader" in done.stdout


def test_what_is_next_depends_on_the_class(tmp_path, monkeypatch):
    course = make_course(tmp_path / "course")
    ina, bad, ada = (
        made_record("ina", {"*": "INFRA"}),
        made_record("bad", {"*": "INVALID"}),
        made_record("ada"),
    )

    def said(*records, example=False):
        return "\n".join(next_steps(course, LAB, records, example=example))

    assert said(ada) == ""  # --no-gradebook: there is nothing to publish
    assert said(ina, bad) == (
        "run the same command again, for whom our grader failed: ina\n"
        "ask for a notebook that can be read: bad"
    )
    assert "autograder collect DOWNLOAD" in said(ada, example=True)
    take_in(course, ada)
    assert "grade by hand, in formgrader (jupyter lab, in this folder): ada" in said(ada)
    assert f"publish: autograder publish --lab {LAB} --to canvas|" in said(ada)
    take_in(course, ada, by_person=1.0)
    assert "by hand" not in said(ada)


def test_grade_ends_with_what_is_next(tmp_path, monkeypatch, capsys):
    course = make_course(tmp_path / "course")
    monkeypatch.setenv("AUTOGRADER_COURSE", str(course.root))
    stub_grading(monkeypatch).lost = {"ada": {"*": "INFRA"}}
    hand_in(course, "ada")
    folder = os.fspath(course.root / "handed_in")
    assert main(["grade", "--no-gradebook", "--lab", LAB, folder]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "next: run the same command again, for whom our grader failed: ada"


@pytest.mark.parametrize("thread", ["", "threading.Thread(target=lambda: time.sleep(0.2)).start()"])
def test_a_command_s_end_leaves_nothing_out(thread):
    code = f"""
import atexit, sys, threading, time, autograder.__main__ as program
atexit.register(print, "at the end")
program.main = lambda: print("said", end="; ") or 3
{thread}
program.run()
"""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said; at the end\n", "")
