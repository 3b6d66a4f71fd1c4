"""Criterion for task 5 of lab 5: a job that is started again goes on from a checkpoint.

Only the step from which the job goes on is judged here. `node_lost` judges whether the curve is the
same as without a break, and `node_script` judges whether the training is right.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from autograder.criteria.common.answers import is_floats, told
from autograder.criteria.criterion import Case, Context, Finding, Values
from autograder.criteria.lab5_multinode.nodes import NodesJob, nodes, steps_saved, wait


def observe_goes_on(path: Any, inputs: Values, context: Context) -> Values:
    """Runs the job, damages all checkpoints but the first, and starts the same job again.

    The second time, only rows of steps after the first checkpoint are there.
    """
    if context.rank != 0:
        return {}
    with tempfile.TemporaryDirectory(prefix="nodes-") as name:
        job = NodesJob(path, inputs, Path(name))
        job.write_data(0, shared=True)
        with nodes(job, torchrun=False) as processes:
            wait(job, processes)
        job.results()  # raises an error if there are none
        saves = steps_saved(job.saves())
        if not saves or saves[0] >= inputs["job"]["steps"]:
            return {"saves": saves}
        for step in saves[1:]:
            (job.checkpoints / f"damaged-{step}").touch()
        (job.folder / "out-0.npz").unlink()
        job.write_data(saves[0], shared=True)
        with nodes(job, torchrun=False) as processes:
            wait(job, processes, what := " after it was started again")
        return job.results(what) | {"saves": saves}


def judge_goes_on(case: Case) -> Iterator[Finding]:
    """The second run gives finite numbers, so it used no row of steps before the checkpoint."""
    answer = case.answers[0]
    saves = told(answer, "saves")
    got = [answer.get(name) for name in ("losses", "p0")]
    if not isinstance(saves, list) or not saves or "losses" not in answer:
        yield Finding(f"save_checkpoint was called for the steps {saves}: none to go on from.", 0)
    elif not all(is_floats(array) and array.size and np.isfinite(array).all() for array in got):
        yield Finding(
            f"the job was started again with a checkpoint of step {saves[0]}, and what it wrote to "
            "--out are no numbers. Only the rows of later steps are left, all others are nan: it "
            "has to go on from there, and not to begin anew. load_newest says which step comes "
            "next, on every rank.",
            0,
        )
