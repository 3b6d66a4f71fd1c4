"""Whoever misses the idea of a lab does not pass it."""

from __future__ import annotations

import nbformat
import pytest
from course import ROOT

from autograder.course.course_toml import OptionsError, read_options
from autograder.course.gates import apply_gates
from autograder.criteria import get_lab, lab_names
from autograder.criteria.criterion import Status, Verdict
from autograder.proof.zoo import load_zoo

GATED = [name for name in lab_names() if get_lab(name).gates]
# They break so much that nothing they hand in shows the idea which they have.
SHOW_NOTHING = {
    "lab1_ddp": {"wrong_forgets_last_bucket"},
    "lab3_fsdp": {
        "wrong_forward_no_return",
        "wrong_local_rank_cuts",
        "wrong_no_gather_in_backward",
    },
}


def verdicts(lab, lost=(), status=Status.WRONG):
    return [
        Verdict(
            c.name,
            status if c.name in lost else Status.PASS,
            0.0 if c.name in lost else c.listed_points,
            c.points,
            "wrong" if c.name in lost else "",
        )
        for c in lab.criteria
    ]


def test_every_lab_but_the_bonuses_has_a_gate():
    assert {name for name in lab_names() if name.startswith("lab")} <= set(GATED)


@pytest.mark.parametrize("name", GATED)
def test_who_misses_the_idea_does_not_pass_and_nobody_else_is_kept_out(name):
    """Of all wrong submissions, by what they lose: `autograder verify` proves that they do."""
    lab = get_lab(name)
    points = {c.name: c.listed_points for c in lab.criteria}
    wrong = [e for e in load_zoo(name, "wrong_*") if e.loses != "everything"]
    plain = {e.name: e.expected_score(points) for e in wrong}
    score = {e.name: e.expected_score(points, lab.gates) for e in wrong}
    assert {gate.idea for gate in lab.gates} == {e.misses for e in wrong if e.misses}
    passing = {e.name: score[e.name] for e in wrong if e.misses and score[e.name] >= 50}
    assert not passing, "a line `misses:`, and no gate is closed"
    reduced = {e.name for e in wrong if score[e.name] < plain[e.name] and not e.misses}
    assert reduced == SHOW_NOTHING.get(name, set()), "a gate is closed, and no line `misses:`"
    assert all(len(e.loses) > 3 for e in wrong if e.name in reduced)


@pytest.mark.parametrize("name", GATED)
def test_without_its_idea_a_lab_gives_less_than_half(name):
    lab = get_lab(name)
    for gate in lab.gates:
        assert set(gate.criteria) <= {c.name for c in lab.criteria}
        lost = gate.criteria[gate.needed - 1 :]  # one more than may be lost
        found = apply_gates(lab, verdicts(lab, lost))
        assert sum(v.points for v in found) == pytest.approx(gate.at_most)
        assert gate.at_most < 50
        told = [v.message for v in found if v.criterion in lost]
        assert all(message == f"{gate.rule}.\nwrong" for message in told)
        one_less = apply_gates(lab, verdicts(lab, lost[1:]))
        assert sum(v.points for v in one_less) == lab.max_score - sum(
            lab[criterion].points for criterion in lost[1:]
        )


@pytest.mark.parametrize("name", GATED)
def test_the_text_of_a_lab_tells_its_gates(name):
    notebook = nbformat.read(ROOT / "labs" / name / f"{name}.ipynb", as_version=4)
    texts = [" ".join(cell.source.split()) for cell in notebook.cells]
    for gate in get_lab(name).gates:
        assert any(gate.rule in text for text in texts), gate.rule


@pytest.mark.parametrize("status", [Status.INFRA, Status.BLOCKED])
def test_what_could_not_be_tested_closes_no_gate(status):
    lab = get_lab("lab1_ddp")
    plain = verdicts(lab, lab.gates[0].criteria, status)
    assert list(apply_gates(lab, plain)) == plain


def test_gates_are_applied_anew_when_the_course_changes_them(tmp_path):
    lab = get_lab("lab1_ddp")
    lost = lab.gates[0].criteria
    once = apply_gates(lab, verdicts(lab, lost))
    (tmp_path / "course.toml").write_text("[gates.lab1_ddp]\naveraging = 60\n")
    changed = read_options(tmp_path).apply(lab)
    again = apply_gates(changed, verdicts(lab, lost))
    assert sum(v.points for v in again) == pytest.approx(60)
    told = apply_gates(changed, [*again])[[v.criterion for v in again].index("ddp_gradients")]
    assert told.message == "wrong"  # with the points of the first time, nothing is above the gate
    assert {v.message for v in once} > {""}
    (tmp_path / "course.toml").write_text("[gates.lab1_ddp]\naveraging = 100\n")
    assert read_options(tmp_path).apply(lab).gates[0].at_most == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sharding = 50", "sharding: no such gate; there are: averaging"),
        ("averaging = -1", "from 0"),
    ],
)
def test_a_gate_that_does_not_exist_is_refused(tmp_path, text, message):
    (tmp_path / "course.toml").write_text(f"[gates.lab1_ddp]\n{text}\n")
    with pytest.raises(OptionsError, match=message):
        read_options(tmp_path)
