"""What is long is read once: journal, master and solution, when one student is graded."""

from __future__ import annotations

from collections import Counter

import nbformat
from course import LAB
from made_records import hand_in, made_record, make_course

from autograder.__main__ import main
from autograder.records.journal import Journal
from autograder.submission import attempt


def test_one_student_costs_one_reading_of_each_notebook_and_three_of_the_journal(
    tmp_path, monkeypatch
):
    course = make_course(tmp_path)
    path = hand_in(course, "ada")
    monkeypatch.setenv("AUTOGRADER_COURSE", str(tmp_path))
    monkeypatch.setattr("autograder.submission.choose_box.choose_sandbox", lambda *_, **__: True)
    monkeypatch.setattr(attempt, "run_once", lambda *_: list(made_record("ada").criteria))

    def in_this_process(todo, class_run, jobs, done):
        for index, submission in todo.items():
            done(index, attempt.grade(submission, class_run))
        return {}

    monkeypatch.setattr("autograder.batch.grade_class._run_pool", in_this_process)
    seen: Counter[object] = Counter()

    def counting(read):
        def counted(what, *args, **options):
            seen[getattr(what, "path", what)] += 1
            return read(what, *args, **options)

        return counted

    monkeypatch.setattr(nbformat, "read", counting(nbformat.read))
    monkeypatch.setattr(Journal, "_read", counting(Journal._read))
    assert main(["grade", str(path), "--lab", LAB, "--no-gradebook"]) == 0
    for kind in ("labs", "solutions"):
        assert seen[tmp_path / kind / LAB / f"{LAB}.ipynb"] == 1
    # What was there; whether somebody has handed in the same bytes since; what is there now.
    assert seen[course.journal_path] == 3
