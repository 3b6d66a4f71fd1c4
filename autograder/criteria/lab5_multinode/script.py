"""Criterion for task 5 of lab 5: the training script on two nodes.

Rank 0 starts new processes: two "nodes" on this machine, each with its own data file, in which the
other node's rows are nan. Free choices: how gradients are averaged, on which ranks and when losses
are gathered, who reads a checkpoint, whether the model is loaded before or after it is wrapped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats
from autograder.criteria.common.virtual_cluster import find_joins, judge_joins
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab5_multinode.nodes import (
    NODES,
    PER_NODE,
    NodesJob,
    nodes,
    steps_saved,
    wait,
)

MOMENTUM = 0.9


def draw(source: Draw, *, last_is_due: bool = False) -> list[Values]:
    """A model, rows for every step, and how often checkpoints are saved; all for rank 0.

    Args:
        last_is_due: whether a checkpoint is due after the last step.
    """
    rng = source.shared()
    sizes = (int(rng.integers(3, 7)), int(rng.integers(4, 9)), 1)
    every = int(rng.integers(2, 5))
    batch = NODES * PER_NODE * int(rng.integers(2, 4))  # each rank has more than one row
    steps = 4 * every if last_is_due else 3 * every + int(rng.integers(1, every))
    inputs = oracle.draw_parameters(rng, sizes) | oracle.draw_batch(rng, steps * batch, sizes)
    inputs["job"] = {
        "steps": steps,
        "every": every,
        "batch-size": batch,
        "lr": float(rng.uniform(0.05, 0.2)),
    }
    return [inputs] + [{} for _ in range(source.world_size - 1)]


def observe_script(path: Any, inputs: Values, context: Context) -> Values:
    """Runs the job with two torchrun agents on this machine, from the first step to the last."""
    if context.rank != 0:
        return {}
    with tempfile.TemporaryDirectory(prefix="nodes-") as name:
        job = NodesJob(path, inputs, Path(name))
        with nodes(job, torchrun=True) as processes:
            wait(job, processes)
        joins = find_joins(job.folder / job.name, job.arguments(0), job.folder)
        return job.results() | {
            "joins": joins,
            "saved": job.saves(),
            "other_out": (job.folder / "out-1.npz").exists(),
        }


def expected_training(
    inputs: Values, *, factor: float = 1.0, scheduled: bool = True, part: int = 1
) -> tuple[list[np.ndarray], np.ndarray]:
    """Final parameters and all losses of one process that trains on the global batches.

    Each option makes a known mistake, which a message names if it gives the student's numbers.

    Args:
        factor: of the gradients; scheduled: whether the scheduler makes steps; part: number of
            parts of each batch, of which only the first is trained on.
    """
    job = inputs["job"]
    model = oracle.mlp(inputs, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=job["lr"] * factor, momentum=MOMENTUM)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10 / (10 + step))
    size = job["batch-size"]
    rows = [slice(n * size, n * size + size // part) for n in range(job["steps"])]
    batches = ((inputs["x"][r], inputs["y"][r]) for r in rows)
    after_step = scheduler.step if scheduled else lambda: None
    return oracle.fit(model, optimizer, batches, after_step)


def judge_script(case: Case) -> Iterator[Finding]:
    """Losses and parameters equal those of one process; only rank 0 writes, and when it should.

    The docstring of this file lists the free choices.
    """
    given, answer = case.inputs[0], case.answers[0]
    if wrong := _training(given, answer):
        yield wrong
    yield from judge_joins(answer.get("joins"))
    job, saved = given["job"], answer.get("saved")
    steps = [*range(job["every"], job["steps"] + 1, job["every"])]
    marks = [str(mark) for mark in saved] if isinstance(saved, list) else []
    by_zero = steps_saved(marks, 0)
    if by_zero != steps:
        yield Finding(
            f"--every={job['every']} --steps={job['steps']}: rank 0 should call "
            f"save_checkpoint with the steps {steps}, the numbers of steps done, and no "
            f"others; it called it with {by_zero}.",
            0,
        )
    if any(not mark.endswith("-by-0") for mark in marks):
        yield Finding(
            "a rank other than 0 called save_checkpoint: two writers of one file spoil it. All "
            "ranks have the same state, so rank 0 saves it.",
            0,
        )
    if answer.get("other_out") is not False:
        yield Finding("a rank on node 1 wrote --out too. There local rank 0 is not rank 0.", 0)


def _training(given: Values, answer: Values) -> Finding | None:
    """What is wrong with losses and parameters, and a known mistake that gives such losses."""
    parameters, losses = expected_training(given)
    got = answer.get("losses")
    hint = _reason(got, losses, given, answer)
    if wrong := oracle.differs(0, "losses in --out", got, losses, hint=hint):
        return wrong
    for i, expected in enumerate(parameters):
        got = answer.get(f"p{i}")
        if wrong := oracle.differs(0, f"p{i} in --out", got, expected, terms=[given[f"p{i}"]]):
            return wrong
    return None


def trained_alone(given: Values, answer: Values, num_ranks: int, run: str = "") -> str:
    """A sentence if a run's parameters are those that rank 0 gets from its own rows, else ""."""
    own, _ = expected_training(given, part=num_ranks)
    if not all(oracle.agrees(answer.get(f"{run}p{i}"), value) for i, value in enumerate(own)):
        return ""
    return (
        "p0, p1, … in --out are those of a training on rank 0's rows alone: are the gradients "
        "averaged over all ranks? (DDP does so if ddp(…) is called, not model(…).)"
    )


def _reason(got: Any, right: np.ndarray, given: Values, answer: Values) -> str:
    """Why losses are wrong, as far as the numbers show it."""
    ranks = NODES * PER_NODE
    if not is_floats(got) or got.ndim != 1 or not got.size:
        return "losses must be one number per step."
    if len(got) != len(right):
        return f"There must be one loss for each of the {len(right)} steps, there are {len(got)}."
    if np.isnan(got).any():
        return (
            "Each node has only its own rows here, the others are nan: a rank has touched rows of "
            "the other node. Rank r takes the r-th of the equal parts of each global batch."
        )

    def are(losses: np.ndarray) -> bool:
        return bool(np.allclose(got, losses, rtol=1e-4))

    if alone := trained_alone(given, answer, ranks):
        return alone
    if are(right * ranks):
        return f"That is the sum over {ranks} ranks, not the mean."
    if np.isclose(got[0], expected_training(given, part=ranks)[1][0], rtol=1e-4):
        return "The first one is the loss on rank 0's own rows, not the mean over all ranks."
    if not np.isclose(got[0], right[0], rtol=1e-4):
        return "The first loss, before any step of the optimizer, is wrong already."
    if are(expected_training(given, factor=ranks)[1]):
        return "So they are if gradients are summed over the ranks instead of averaged."
    if are(expected_training(given, scheduled=False)[1]):
        return "So they are if the scheduler makes no step."
    return "The first loss is right: what is wrong is a step of the optimizer or of the scheduler."
