"""What a check says about an error: the student's lines, and none of the course's."""

from __future__ import annotations

import traceback

import pytest

from autograder.criteria.not_started import is_not_started
from autograder.inside.probe import NOT_IN_STUDENTS_LINES, CheckFailed, _of_student, describe_error

STUDENTS = """
def outer(call):
    return call()


def inner():
    return [1][7]


def returns_nothing():
    return None
"""


@pytest.fixture
def student():
    names = {}
    exec(compile(STUDENTS, "/somewhere/lab.py", "exec"), names)
    return names


def error_of(function, *args):
    try:
        function(*args)
    except (IndexError, TypeError) as error:
        return error
    raise AssertionError("no error")


def test_only_the_students_lines_stay(student):
    error = error_of(student["outer"], lambda: student["inner"]())
    kept = traceback.extract_tb(_of_student(error.__traceback__))
    assert [(frame.filename, frame.name) for frame in kept] == [
        ("/somewhere/lab.py", "outer"),
        ("/somewhere/lab.py", "inner"),
    ]
    assert describe_error(error).startswith("IndexError: list index out of range (/somewhere/lab")
    assert "line 7" in describe_error(error)


def test_what_fails_in_the_check_itself_says_so(student):
    error = error_of(lambda: student["returns_nothing"]()[2])
    assert _of_student(error.__traceback__) is None
    assert describe_error(error).endswith(f"({NOT_IN_STUDENTS_LINES})")


def test_what_the_check_misses_is_enough(student):
    def check():
        got = student["returns_nothing"]()
        raise TypeError(f"expected a number, got {got}")

    assert describe_error(error_of(check)) == "TypeError: expected a number, got None"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotImplementedError(), True),
        (RuntimeError("rank 1 ended:\n    raise NotImplementedError()\nNotImplementedError"), True),
        ("[rank1]: NotImplementedError\nmore lines", True),
        (NotImplementedError('Module [DDP] is missing the required "forward" function'), False),
        ("[rank1]: NotImplementedError: Could not run 'c10d::broadcast_' on 'Meta'", False),
        (ValueError("no NotImplementedError in it"), False),
    ],
)
def test_only_a_bare_error_is_a_task_not_started(error, expected):
    assert is_not_started(error) is expected


def test_a_long_message_is_whole_where_lines_are_cut_off():
    """nbgrader's Validator shows 83 characters of a line."""
    words = " ".join(f"word{n}" for n in range(60))
    code = "    x = " + "y" * 120
    [shown] = CheckFailed(f"title\n{words}\n\n{code}")._render_traceback_()
    first, *wrapped, blank, last = shown.split("\n")
    assert (first, " ".join(wrapped), blank, last) == ("title", words, "", code)
    assert max(map(len, wrapped)) <= 82
