"""The proof that the labs' tests are right: the kill matrix of every lab.

Here a small part of each class is graded, with the wrong ones that lose most; `make verify` grades
all of them. Of lab 1, test_zoo.py grades a part that covers every criterion.
"""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console

from autograder.criteria import get_lab, lab_names
from autograder.sandbox import probe_support
from autograder.verify import Row, choose_covering, find_problems, matrix_table, verify_lab
from autograder.zoo import load_zoo

LAB1 = get_lab("lab1_ddp")
# All submissions together must take minutes; `make verify` covers every criterion, and more.
WRONG_OF_A_LAB, WRONG_OF_A_BONUS = 4, 1
LABS = [name for name in lab_names() if name != "lab1_ddp"]


@pytest.mark.parametrize("name", LABS)
@pytest.mark.timeout(1500)
def test_each_submission_loses_exactly_what_it_breaks(name):
    most_wrong = WRONG_OF_A_BONUS if name.startswith("bonus_") else WRONG_OF_A_LAB
    proof = verify_lab(
        name, Console(quiet=True), covering=True, most_wrong=most_wrong,
        sandbox=probe_support().works,
    )  # fmt: skip
    Console(width=140).print(matrix_table(proof))
    assert proof.problems == ()
    lost = {c for row in proof.rows for c, status in row.got.items() if status != "PASS"}
    assert lost == {criterion.name for criterion in get_lab(name).criteria}


@pytest.mark.parametrize("name", lab_names())
def test_the_covering_part_loses_every_criterion_once(name):
    entries = load_zoo(name)
    chosen = choose_covering(get_lab(name), entries)
    assert {"reference", "starter"} <= {entry.name for entry in chosen}
    by_wrong_ones = [e.loses for e in chosen if e.loses and e.loses != "everything"]
    assert set().union(*by_wrong_ones) == {c.name for c in get_lab(name).criteria}
    assert len(chosen) < len(entries)


def row(name, expected, got):
    return Row(name=name, expected=expected, got=got, seconds=1.0, messages=dict.fromkeys(got, ""))


@pytest.mark.parametrize(
    ("expected", "got", "differs"),
    [
        ("PASS", "PASS", False),
        ("PASS", "WRONG", True),
        ("PASS", "BLOCKED", False),
        ("", "WRONG", False),
        ("", "TIMEOUT", False),
        ("", "PASS", True),
        ("", "INFRA", True),
        ("", "BLOCKED", True),
        ("TIMEOUT", "TIMEOUT", False),
        ("TIMEOUT", "WRONG", True),
    ],
)
def test_every_cell_is_held_against_its_docstring(expected, got, differs):
    assert bool(row("x", {"a": expected}, {"a": got}).wrong()) is differs
    assert row("x", {"a": expected}, {}).wrong()  # a criterion without a verdict


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
