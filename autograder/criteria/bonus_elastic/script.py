"""The script of task 6 on a job that nothing disturbs: who calls what, and what is learned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autograder.criteria.bonus_elastic.training_job import (
    draw_job,
    judge_training,
    start_job,
)
from autograder.criteria.common.answers import plain
from autograder.criteria.common.checkpoint_files import rank_zero_only
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values


def draw_script(draw: Draw) -> list[Values]:
    """Sizes for which the batch, the samples and the steps never divide evenly.

    The batch is not divisible by the ranks, the samples are not divisible by the batch, and the
    steps are not divisible by --every.
    """
    rng = draw.shared("sizes")
    every = int(rng.integers(3, 5))
    steps = 2 * every + int(rng.integers(1, every))
    batch = draw.world_size * int(rng.integers(2, 4)) + 1
    inputs = draw_job(draw, steps, batch, every, rest=1)
    return rank_zero_only(draw, inputs)


def observe_script(path: Any, inputs: Values, context: Context) -> Values:
    """All steps, on as many ranks as the criterion has."""
    if context.rank != 0:
        return {}
    with start_job(path, inputs) as job:
        failure = job.run(context.world_size)
        answer = job.results(f"on {context.world_size} ranks", failure)
        return answer | {
            "writers": job.writers,
            "saved": job.calls("save"),
            "loaded": job.calls("load"),
            "samplers": job.calls("sampler"),
        }


def judge_script(case: Case) -> Iterator[Finding]:
    """Losses and parameters are those of one process; all ranks save at the due steps.

    The state may have any form, and the script may leave the process group or not.
    """
    given, answer = case.inputs[0], case.answers[0]
    job, ranks = given["job"], range(case.world_size)
    wanted = [["sampler", r, len(given["x"]), job["batch-size"], job["seed"]] for r in ranks]
    told = plain(answer)
    if not _same_calls(told.get("samplers"), wanted):
        yield Finding(
            f"expected ElasticSampler({len(given['x'])}, {job['batch-size']}, seed={job['seed']}) "
            "once on every rank: the samples in --data, --batch-size and --seed.",
            0,
        )
        return
    if wrong := judge_training(
        given,
        answer,
        "The mean over all samples of the global batch counts, and shares are not equal here. In "
        "the last batch of an epoch some ranks have no sample: they go through the same calls.",
    ):
        yield wrong
    if told.get("writers") != ["0"]:
        yield Finding(f"ranks that wrote --out: {told.get('writers')}, expected rank 0 alone.", 0)
    steps = [*range(job["every"], job["steps"], job["every"]), job["steps"]]
    if not _same_calls(told.get("saved"), [["save", r, step] for step in steps for r in ranks]):
        yield Finding(
            f"--every={job['every']} --steps={job['steps']}: save_together should be called once "
            f"for each of the steps {steps}, on every rank; the calls were "
            f"{_by_step(told.get('saved'))}. It is a collective, and the last step is saved, too.",
            0,
        )
    if not _same_calls(told.get("loaded"), [["load", r] for r in ranks]):
        yield Finding(
            "load_together should be called once on every rank, before the first step.", 0
        )


def _same_calls(got: Any, wanted: list[list[Any]]) -> bool:
    """Whether the calls are the same, in any order."""
    if not isinstance(got, list):
        return False
    return sorted(map(json.dumps, got)) == sorted(map(json.dumps, wanted))


def _by_step(saved: Any) -> str:
    """Calls of save_together in words: step, and which ranks."""
    calls = [c for c in saved if isinstance(c, list) and len(c) == 3] if saved else []
    steps = sorted({str(call[2]) for call in calls}, key=lambda s: (len(s), s))
    return (
        "; ".join(
            f"step {step} on ranks {sorted(str(c[1]) for c in calls if str(c[2]) == step)}"
            for step in steps
        )
        or "none"
    )
