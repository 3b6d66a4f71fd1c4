"""Verdicts that are a matter of luck are found."""

from __future__ import annotations

import copy
import dataclasses

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from rich.console import Console

import autograder.proof.draws
from autograder.box.sandbox import probe_support
from autograder.proof.draws import repeated, verify_draws
from autograder.proof.zoo import load_zoo

LAB = "bonus_ring_all_reduce"
RIGHT = "ring_seconds(*arguments) < tree_seconds(*arguments)"


def test_a_check_stands_there_as_often_as_it_is_wanted():
    kinds = [("own", None), ("check", "a"), ("check", "b"), ("own", None), ("check", "c")]
    cells = [
        new_code_cell(str(number), metadata={"minidist": {"kind": kind, "grade_id": grade_id}})
        for number, (kind, grade_id) in enumerate(kinds)
    ]
    made = repeated(new_notebook(cells=cells), {"a": 3, "c": 1})
    assert "".join(cell.source for cell in made.cells) == "011134"
    assert len({cell.id for cell in made.cells}) == 6
    nbformat.validate(made)


@pytest.mark.slow
def test_draws_with_an_unexpected_verdict_are_named(monkeypatch):
    """A choice that is wrong for one size in 24, whatever is drawn, and one that is right."""
    (reference,) = load_zoo(LAB, "reference")
    lucky = copy.deepcopy(reference)
    cell = next(cell for cell in lucky.notebook.cells if RIGHT in cell.source)
    cell.source = cell.source.replace(RIGHT, f"({RIGHT}) ^ (arguments[0] % 24 == 0)")
    lucky = dataclasses.replace(lucky, name="lucky", loses=frozenset(["ring_choice"]))
    entries = [dataclasses.replace(reference, name="never", loses=lucky.loses), lucky]
    monkeypatch.setattr(autograder.proof.draws, "load_zoo", lambda *_, **__: entries)
    proof = verify_draws(LAB, Console(quiet=True), 12, sandbox=probe_support().works)
    named = [problem.split(":")[0] for problem in proof.problems]
    assert proof.num_checks == 24
    assert named.count("never") == 12
    assert 0 < named.count("lucky") < 12


@pytest.mark.nightly
def test_where_faults_hide_one_another_each_counts_alone(monkeypatch):
    """Two wrong submissions as one that loses nothing: the proof holds, as each loses alone."""
    (reference,) = load_zoo(LAB, "reference")
    parts = tuple(e for e in load_zoo(LAB, "wrong_*") if e.loses == {"ring_choice"})[:2]
    hidden = dataclasses.replace(reference, name="both", loses=parts[0].loses, parts=parts)
    monkeypatch.setattr(autograder.proof.draws, "load_zoo", lambda *_, **__: list(parts))
    monkeypatch.setattr(autograder.proof.draws, "combine", lambda _: [hidden])
    proof = verify_draws(LAB, Console(quiet=True), 2, sandbox=probe_support().works)
    assert proof.problems == ()
    assert proof.num_checks == 2 + 2 * 2
