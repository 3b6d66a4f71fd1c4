"""The proof that the labs' tests are right: the kill matrix of every lab.

Here a part of each lab's class is graded in which every criterion is lost once, of a bonus its
reference and its starter only (in `make nightly` such a part, too); `make verify` grades all.
"""

from __future__ import annotations

import dataclasses

import pytest
from lab_helper import labs_and_bonuses
from made_records import made_record
from rich.console import Console

import autograder.proof.verify
from autograder.box.sandbox import probe_support
from autograder.criteria import get_lab, lab_names
from autograder.proof.verify import Row, choose_covering, find_problems, matrix_table, verify_lab
from autograder.proof.zoo import combine, load_zoo

LAB1 = get_lab("lab1_ddp")


@pytest.mark.parametrize("name", [name for name in lab_names() if name.startswith("bonus")])
@pytest.mark.slow
def test_the_reference_of_a_bonus_keeps_what_its_starter_loses(name):
    only, sandbox = ("reference", "starter"), probe_support().works
    proof = verify_lab(name, Console(quiet=True), only=only, jobs=1, sandbox=sandbox)
    assert len(proof.rows) == 2
    assert proof.problems == ()


@pytest.mark.parametrize("name", labs_and_bonuses())
@pytest.mark.timeout(1500)
def test_each_submission_loses_exactly_what_it_breaks(name):
    sandbox = probe_support().works
    proof = verify_lab(name, Console(quiet=True), covering=True, jobs=1, sandbox=sandbox)
    Console(width=140).print(matrix_table(proof))
    assert proof.problems == ()
    wrong = [row for row in proof.rows if row.name.startswith("wrong")]
    lost = {c for row in wrong for c, status in row.got.items() if status != "PASS"}
    assert lost == {criterion.name for criterion in get_lab(name).criteria}


@pytest.mark.parametrize("name", lab_names())
def test_the_covering_part_loses_every_criterion_once(name):
    entries = load_zoo(name)
    chosen = choose_covering(get_lab(name), entries)
    assert {"reference", "starter"} <= {entry.name for entry in chosen}
    by_wrong_ones = [e.loses for e in chosen if e.loses and e.loses != "everything"]
    counted = {c.name for c in get_lab(name).criteria if not c.extra}
    assert set().union(*by_wrong_ones) == counted
    assert len(chosen) < len(entries)


@pytest.mark.parametrize("name", lab_names())
def test_every_criterion_has_a_reason_that_is_held(name):
    """A message may become false or useless: `says:` of a submission that loses it would notice."""
    held = {criterion for entry in load_zoo(name) for criterion in entry.says}
    without = [c.name for c in get_lab(name).criteria if not c.extra and c.name not in held]
    assert not without, f"tests/zoo/{name}: add a line 'says: CRITERION words' for {without}"


def row(name, expected, got):
    return Row(name=name, expected=expected, got=got, seconds=1.0, messages=dict.fromkeys(got, ""))


@pytest.mark.parametrize(
    ("expected", "got", "differs"),
    [
        ("PASS", "PASS", False),
        ("PASS", "WRONG", True),
        ("", "WRONG", False),
        ("", "TIMEOUT", False),
        ("", "PASS", True),
        ("", "INFRA", True),
        ("", "BLOCKED", True),
        ("TIMEOUT", "TIMEOUT", False),
        ("TIMEOUT", "WRONG", True),
        ("PASS", "BLOCKED", True),
    ],
)
def test_every_cell_is_held_against_its_docstring(expected, got, differs):
    assert bool(row("x", {"a": expected}, {"a": got}).wrong()) is differs
    assert row("x", {"a": expected}, {}).wrong()  # a criterion without a verdict


@pytest.mark.parametrize(
    ("message", "differs"), [("A and\n b c", False), ("a b", True), ("", True)]
)
def test_a_message_has_the_words_that_the_docstring_names(message, differs):
    got = dataclasses.replace(
        row("x", {"a": ""}, {"a": "WRONG"}), messages={"a": message}, says={"a": "and b"}
    )
    assert bool(got.wrong()) is differs


def test_what_needs_a_gpu_proves_nothing_without_one():
    for expected in ("PASS", "", "WRONG"):
        blocked = dataclasses.replace(
            row("x", {"a": expected}, {"a": "BLOCKED"}), extra=frozenset("a")
        )
        assert blocked.wrong() == {}
    assert dataclasses.replace(row("x", {"a": ""}, {"a": "PASS"}), extra=frozenset("a")).wrong()


def test_a_class_that_proves_too_little_is_named():
    entries = load_zoo("lab1_ddp")
    assert find_problems(LAB1, entries, []) == []
    without_starter = [e for e in entries if e.name != "starter"]
    assert find_problems(LAB1, without_starter, []) == [
        "the class has no 'starter' that loses everything"
    ]
    few = [e for e in entries if not e.loses or e.loses == "everything"]
    assert any("0 wrong submissions" in text for text in find_problems(LAB1, few, []))
    assert any("loses ddp_buckets" in text for text in find_problems(LAB1, few, []))
    no_right = [
        dataclasses.replace(e, loses=frozenset({"setup"})) if e.name.startswith("right") else e
        for e in entries
    ]
    assert find_problems(LAB1, no_right, []) == ["0 right ones beside the reference; at least 6"]


def test_different_bugs_go_into_one_submission():
    entries = load_zoo("lab1_ddp")
    combined = combine(entries)
    names = sorted(part.name for entry in combined for part in (entry.parts or (entry,)))
    assert names == sorted(entry.name for entry in entries)
    assert len(combined) < 0.6 * len(entries)
    for entry in combined:
        cells = {cell.id: cell.source for cell in entry.notebook.cells}
        for part in entry.parts:
            assert part.loses != "everything"
            assert set(part.loses) <= set(entry.loses)
            assert part.replaced.items() <= cells.items()
            assert part.statuses.items() <= entry.statuses.items()
        assert len(entry.loses) == sum(len(part.loses) for part in entry.parts) or not entry.parts


def test_one_that_does_not_lose_what_its_parts_lose_is_taken_apart(monkeypatch):
    """Together they seem to lose too much; alone each loses what it should."""
    entries = [e for e in load_zoo("lab1_ddp") if e.name in ("wrong_sum", "wrong_sampler_tail")]
    asked = []

    def grade(submissions, settings, jobs, console):
        asked.append([s.student for s in submissions])
        return [record_of(s.student) for s in submissions]

    def record_of(student):
        loses = {e.name: e.loses for e in entries}.get(student, {"setup"})
        return made_record(student, dict.fromkeys(loses, "WRONG"))

    monkeypatch.setattr(autograder.proof.verify, "load_zoo", lambda *_, **__: entries)
    monkeypatch.setattr(autograder.proof.verify, "grade_class", grade)
    proof = verify_lab("lab1_ddp", Console(quiet=True))
    assert [row.name for row in proof.rows] == [e.name for e in entries]
    assert not any(row.wrong() for row in proof.rows)
    assert [len(students) for students in asked] == [1, 2]
