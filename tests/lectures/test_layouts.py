"""The exercise of lecture 9: its best step is the best of all layouts that there are.

CI runs those with the best mesh, `make nightly` all.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "notebooks" / "09_hybrid_and_planning.py"
WANTED = {
    *("JOB", "TWO_NODES", "BEST_MS", "ALL", "one_layout"),
    *("train_layouts", "race", "axis_of", "alone", "is_valid"),
}
BEST_MESH = (1, 4, 2)  # dp, pp, tp
HEAD = """
import torch
import torch.distributed as dist
from minidist import emulate
from minidist.data import make_tokens
from minidist.emulate.teach import run_traced
from minidist.mesh import MeshShape, make_mesh
from minidist.model import GPT, lm_loss
from minidist.seeding import seed_all
from minidist.train import TrainConfig, build_trainer
"""


def exercise() -> dict[str, Any]:
    """The names that the lecture's exercise defines, without the rest of the lecture."""
    names: dict[str, Any] = {"__name__": "__main__"}  # so that ranks get the code, not a name
    exec(HEAD, names)
    tree = ast.parse(SOURCE.read_text("utf-8"))

    def defines(node: ast.stmt) -> bool:
        if isinstance(node, ast.FunctionDef):
            return node.name in WANTED
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        return any(isinstance(t, ast.Name) and t.id in WANTED for t in targets)

    tree.body = [node for node in tree.body if defines(node)]
    exec(compile(tree, str(SOURCE), "exec"), names)
    return names


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_best_layout_is_the_best_of_all(every):
    names = exercise()
    names["run_traced"] = partial(names["run_traced"], deadline_s=240)
    found, losses = {}, names["alone"](1)
    meshes = {(layout["dp"], layout["pp"], layout["tp"]) for layout in names["ALL"]}
    for mesh in sorted(meshes) if every else [BEST_MESH]:
        layouts = [x for x in names["ALL"] if (x["dp"], x["pp"], x["tp"]) == mesh]
        for layout, result in zip(layouts, names["race"](layouts, 1), strict=True):
            assert result["losses"] == pytest.approx(losses, rel=1e-9), layout
            found[*mesh, layout["micro_batch"]] = result["ms"]
    assert len(found) >= (25 if every else 2)
    best = min(found, key=lambda layout: found[layout])
    assert best == tuple(names["one_layout"].values())
    assert found[best] == pytest.approx(names["BEST_MS"], rel=0.02)
    near = {layout for layout, took in found.items() if took <= 1.05 * names["BEST_MS"]}
    assert near == {(*BEST_MESH, 1), (*BEST_MESH, 2)}
    # Question 6: with a fast link between the nodes, plain data parallelism wins.
    cluster = names["TWO_NODES"]
    names["TWO_NODES"] = replace(cluster, inter_node=cluster.intra_node)
    plain, answer = names["race"]([{"dp": 8, "micro_batch": 2}, names["one_layout"]], 1)
    assert plain["ms"] < 0.8 * answer["ms"]


def test_what_a_rank_does_adds_up_to_the_step():
    names = exercise()
    (found,) = names["race"]([{"dp": 4, "pp": 2, "micro_batch": 4}], 1)
    spent = found["spent"]
    assert found["losses"] == pytest.approx(names["alone"](1), rel=1e-9)
    assert sum(spent.values()) == pytest.approx(found["ms"])
    assert spent["tp"] == 0 < min(spent[name] for name in ("computing", "dp", "pp", "rest"))
