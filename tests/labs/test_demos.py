"""What a student sees who runs a lab before having written it: which task to do, and no error."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from course import ROOT
from demos import LABS, name_of, run_without_errors, solution_up_to, text_of
from lab_helper import labs_and_bonuses

from autograder import is_not_started
from autograder.inside.probe import NOT_STARTED
from minidist import launch
from minidist.errors import LaunchError

# Demos that show something without any task, to which the student's own is then compared.
SHOWN_FIRST = {
    "lab2_accumulation": {"see_collectives", "see_timeline"},
    "lab4_amp": {"see_bytes"},
    "lab5_multinode": {"see_network", "see_hierarchy"},
    "bonus_debug_ddp": {f"compare_{n}" for n in (1, 2, 3, 4, 5, 6, 7, 10, 11)},
}
PIPELINE_DEMOS = ["see_schedules", "see_timeline", "see_against"]  # a later one needs the others
# Demos, and a task without which the last of them fails in processes that it has started.
MISSED_ELSEWHERE = [
    ("bonus_pipeline", "task5_train", PIPELINE_DEMOS),
    ("bonus_tensor_parallel", "task8_sequence", ["see_traffic"]),
    ("lab5_multinode", "task5_script", ["see_rehearsal"]),
]
NOTHING_YET = re.compile(r"Nothing to \w+ yet: do .* first\.\n")


def _not_written() -> None:
    raise NotImplementedError()


class Misspelt(torch.nn.Module):
    def foward(self, x: Any) -> Any:
        return x


@pytest.fixture(scope="module")
def of_another_process() -> LaunchError:
    """What a cell gets where the processes that it has started have met a task not done yet."""
    with pytest.raises(LaunchError) as caught:
        launch.run(_not_written, 1)
    return caught.value


def demo_of(lab: str) -> Any:
    """The lab's own `demo`, as on rank 0."""
    tree = ast.parse((ROOT / "solutions" / lab / f"{lab}.py").read_text("utf-8"))
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "demo"]
    names = {"contextlib": contextlib, "Iterator": Iterator, "IS_RANK_ZERO": True, "tell": print}
    names["is_not_started"] = is_not_started
    exec(compile(tree, lab, "exec"), names)
    return names["demo"]


@pytest.mark.parametrize("lab", LABS)
def test_a_task_missed_by_another_process_is_named(lab, of_another_process, capsys) -> None:
    demo = demo_of(lab)
    with demo("task 3"):
        raise of_another_process
    assert NOTHING_YET.fullmatch(capsys.readouterr().out)
    with pytest.raises(LaunchError), demo("task 3"):
        raise LaunchError("another mistake", rank=0)
    with pytest.raises(NotImplementedError, match="forward"), demo("task 3"):
        Misspelt()(1)


@pytest.mark.parametrize("lab", labs_and_bonuses())
def test_demos_and_checks_before_the_tasks_are_done(lab: str, tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "labs" / lab / f"{lab}.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    run_without_errors(notebook, tmp_path)  # "Run all" comes to its end
    told = 0
    for cell in notebook.cells:
        name, text = name_of(cell), text_of(cell)
        if cell.metadata.get("nbgrader", {}).get("grade"):
            assert NOT_STARTED in text or "not here" in text, f"{name}: {text}"
        elif message := NOTHING_YET.search(text):
            told += 1
            if name not in SHOWN_FIRST.get(lab, ()):
                assert text == message[0], f"{name}: a demo without its task shows\n{text}"
    assert told >= 5


@pytest.mark.parametrize(("lab", "missing", "demos"), MISSED_ELSEWHERE)
@pytest.mark.slow
def test_a_demo_that_lacks_one_task(lab: str, missing: str, demos: list[str], tmp_path) -> None:
    notebook = solution_up_to(lab, demos)
    starter = nbformat.read(ROOT / "labs" / lab / f"{lab}.ipynb", as_version=4)
    not_done = next(cell for cell in starter.cells if name_of(cell) == missing)
    cells = [not_done if name_of(cell) == missing else cell for cell in notebook.cells]
    notebook.cells = cells
    run_without_errors(notebook, tmp_path)
    assert NOTHING_YET.fullmatch(text_of(cells[-1]))
