"""What the grading benchmark is made of: its class, and the forms in which peers run it."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import grading
import grading_peers as peers
import pytest
from nbformat.v4 import new_code_cell, new_output

from autograder.course.course import Course
from autograder.criteria import get_lab
from autograder.submission.intake import read_submission

ROOT = Path(__file__).resolve().parents[2]

LAB = grading.LAB


@pytest.fixture(scope="module")
def handed():
    return peers.make_class(LAB, 24)


def test_no_two_submissions_are_alike_and_every_call_makes_the_same(handed):
    assert len({each.content for each in handed}) == len({each.student for each in handed}) == 24
    assert peers.make_class(LAB, 24) == handed


def test_half_of_the_class_is_right_and_a_pair_shows_the_number_of_ranks(handed):
    assert [each.score for each in handed[::2]] == [100.0] * 12
    assert handed[1].score < 100.0
    assert len({each.score for each in handed}) > 3


def test_nothing_in_the_class_hangs_or_loses_a_rank():
    assert all(set(peers.zoo(LAB)[name].statuses.values()) <= {"WRONG"} for name in peers.VARIED)


def test_the_grader_runs_what_was_handed_in(handed, tmp_path):
    peers.hand_in(handed[:2], LAB, tmp_path)
    for number, each in enumerate(handed[:2]):
        path = tmp_path / each.student / LAB / f"{LAB}.ipynb"
        intake = read_submission(path, Course(ROOT).master(LAB))
        assert intake.notebook is not None
        code = "\n".join(cell.source for cell in intake.notebook.cells)
        assert f"# submission {number}\n" in code


def test_the_script_has_every_check_and_no_demonstration(handed):
    called = [
        ast.literal_eval(node.args[0])
        for node in ast.walk(ast.parse(peers.as_script(handed[0].notebook)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check"
    ]
    assert called == [criterion.name for criterion in get_lab(LAB).criteria]
    demos = [c for c in handed[0].notebook.cells if c.source.startswith("with demo(")]
    assert demos
    assert all(demo.source not in peers.as_script(handed[0].notebook) for demo in demos)


def test_a_magic_that_no_script_has_is_refused(handed):
    notebook = handed[0].notebook
    notebook.cells.append(new_code_cell("!ls"))
    with pytest.raises(ValueError, match="no magics: '!ls'"):
        peers.as_script(notebook)


@pytest.mark.parametrize("demos", [True, False])
def test_plain_kernels_go_on_after_an_error(handed, demos):
    made = peers.for_plain_kernels(handed[0].notebook, demos)
    assert all("raises-exception" in cell.metadata.tags for cell in made.cells)
    assert any("!torchrun --standalone" in cell.source for cell in made.cells) == demos
    assert "register_cell_magic" in made.cells[0].source


def test_only_passed_checks_give_points(handed):
    notebook = handed[0].notebook
    by_name = {c.metadata.get("nbgrader", {}).get("grade_id"): c for c in notebook.cells}
    by_name["setup"].outputs = [new_output("stream", name="stdout", text="✓ setup  5/5  …\n")]
    by_name["script"].outputs = [new_output("error", ename="CheckFailed", evalue="✗ script")]
    # Another check's line does not count.
    by_name["wrap_model"].outputs = [new_output("stream", name="stdout", text="✓ setup  5/5")]
    assert peers.score_by_outputs(notebook, LAB) == 5


def test_a_wrong_or_missing_score_is_an_error(handed):
    right = {each.student: each.score for each in handed}
    peers.check_scores("ours", right, handed)
    for wrong in (right | {handed[3].student: 1.0}, dict(list(right.items())[1:])):
        with pytest.raises(RuntimeError, match="scores"):
            peers.check_scores("ours", wrong, handed)


def test_a_path_without_a_program_has_all_others(tmp_path, monkeypatch):
    programs, other = tmp_path / "programs", tmp_path / "other"
    for folder in (programs, other):
        folder.mkdir()
    for name in ("bwrap", "ls", "cat"):
        (programs / name).touch()
    monkeypatch.setenv("PATH", f"{other}:{programs}")
    first, second = grading.path_without("bwrap", tmp_path).split(":")
    assert first == str(other)
    assert sorted(path.name for path in Path(second).iterdir()) == ["cat", "ls"]


def test_memory_and_progress_are_read_off_a_running_grader(tmp_path):
    assert grading.peak_bytes(os.getpid())[os.getpid()] > 20 << 20
    assert grading.peak_bytes(2**22 + 1) == {}
    journal = tmp_path / "journal.jsonl"
    assert grading.num_graded(journal) == 0
    from autograder.records.journal import Journal

    Journal(journal).append({"kind": "verdict", "key": "a"})
    Journal(journal).append({"kind": "submission", "key": "a", "record": {}})
    assert grading.num_graded(journal) == 1


def test_a_peer_whose_kernel_died_while_it_started_begins_anew():
    left = [f"RuntimeError: {grading.KERNEL_DIED} to kernel_info"] * 2

    def arm() -> dict[str, float]:
        if left:
            raise RuntimeError(left.pop())
        return {"ada": 1.0}

    scores, _ = grading.timed(arm, grading.PEER_TRIES, grading.KERNEL_DIED)
    assert scores == {"ada": 1.0}
    left.append("another error")
    with pytest.raises(RuntimeError, match="another"):
        grading.timed(arm, grading.PEER_TRIES, grading.KERNEL_DIED)
    left.append(grading.KERNEL_DIED)
    with pytest.raises(RuntimeError, match="Kernel died"):
        grading.timed(arm, 1, grading.KERNEL_DIED)
