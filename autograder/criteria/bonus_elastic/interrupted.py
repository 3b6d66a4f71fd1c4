"""The script of task 6 when ranks change, and when it is told to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autograder.criteria.bonus_elastic.training_job import (
    draw_job,
    expected_training,
    judge_training,
    start_job,
)
from autograder.criteria.common.answers import is_floats, item_of, plain, same_array
from autograder.criteria.common.checkpoint_files import rank_zero_only
from autograder.criteria.common.survivors import TOO_EARLY, lives_on
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

SAME_SIZE = 2  # ranks of the two runs that must agree bit for bit


# --- elastic_rejoin ------------------------------------------------------------------------------


def draw_rejoin(draw: Draw) -> list[Values]:
    """Three numbers of ranks, and [batch, rank] of the kill in each of the first two runs.

    In one of these two runs rank 0, which would write --out, survives.
    """
    rng = draw.shared("sizes")
    every = int(rng.integers(3, 5))
    inputs = draw_job(draw, 3 * every + 1, 6 * int(rng.integers(1, 3)), every, rest=0)
    # A batch is one sample, many times: a rank's own loss is the loss of the batch. So only
    # `elastic_script` judges whether the script weights ranks, and whose loss the script writes.
    inputs["batches"] = [[batch[0]] * len(batch) for batch in inputs["batches"]]
    inputs["clear"] = True
    ranks = [int(r) for r in 1 + rng.permutation(3)]
    left = ranks.index(max(ranks[:2]))
    kills = [
        [
            (number + 1) * every + int(rng.integers(1, every)),
            int(rng.integers(number == left, ranks[number])),
        ]
        for number in range(2)
    ]
    inputs |= {"ranks": ranks, "kills": kills}
    return rank_zero_only(draw, inputs)


def observe_rejoin(path: Any, inputs: Values, context: Context) -> Values:
    """Three runs with different numbers of ranks, two of them killed; then three of one size."""
    if context.rank != 0:
        return {}
    answer: Values = {"began": [], "ends": [], "early": []}
    with start_job(path, inputs) as job:
        failure = ""
        for number, nprocs in enumerate(inputs["ranks"]):
            if number < len(inputs["kills"]):
                answer["ends"].append(job.run_and_lose(nprocs, inputs["kills"][number]))
                answer["early"].append(job.writers)
            else:
                failure = job.run(nprocs)
            batches = [call[2] for call in job.calls("batch")]
            if not batches and number == 0:
                raise job.failure("took no batch")
            answer["began"].append(min(batches, default=-1))
        if -1 in answer["began"]:  # an earlier run was not killed and did all steps
            return answer
        answer |= job.results(f"on {inputs['ranks'][-1]} ranks", failure)

    # Three runs of one size: undisturbed; started again with all steps done, as if the job had
    # died before it wrote --out; and from the first checkpoint.
    with start_job(path, inputs) as job:
        for name in ("whole", "done", "resumed"):
            failure = job.run(SAME_SIZE)
            what = ""
            if name == "done":
                what = (
                    ", started once more with nothing left to train (an earlier run may have died "
                    "before it wrote),"
                )
            result = job.results(f"on {SAME_SIZE} ranks{what}", failure)
            answer |= {f"{name}/{key}": value for key, value in result.items()}
            for saved in job.checkpoints.glob("step-*") if name == "done" else ():
                if saved.name != f"step-{inputs['job']['every']}":
                    saved.unlink()
    return answer


def judge_rejoin(case: Case) -> list[Finding]:
    """The losses are those of one process; with the same number of ranks they agree bit for bit.

    A rank that survives a death may clean up before it fails.
    """
    given, answer = case.inputs[0], case.answers[0]
    every, ranks, kills = given["job"]["every"], given["ranks"], given["kills"]
    story = (
        f"(Planned: {ranks[0]} ranks, one killed at batch {kills[0][0]}; then {ranks[1]}, one "
        f"killed at batch {kills[1][0]}; then {ranks[2]}; saved every {every} steps.)"
    )
    began = plain(answer).get("began")
    if began != [0, every, 2 * every]:
        return [
            Finding(
                f"{story} The three runs should take up the batches {[0, every, 2 * every]} first, "
                f"they took {began} (-1 is none: the run before had done all). load_together "
                "comes first, and the sampler gets its state.",
                0,
            )
        ]
    if problem := _survived(given, plain(answer)):
        return [Finding(f"{story} {problem}", 0)]
    hint = f"{story} {_why(given, answer.get('losses'))}"
    if wrong := judge_training(given, answer, hint):
        return [wrong]
    for name in ("losses", *(k for k in given if k[0] == "p" and k[1:].isdigit())):
        whole = answer.get(f"whole/{name}")
        again = [answer.get(f"{run}/{name}") for run in ("done", "resumed")]
        is_finite = is_floats(whole) and np.isfinite(whole).all()
        if not is_finite or not all(same_array(it, whole) for it in again):
            return [
                Finding(
                    f"{SAME_SIZE} ranks without a break, and {SAME_SIZE} ranks from the checkpoint "
                    f"of step {every}: {name} in --out should be equal bit for bit. Is something "
                    "converted to a different type on the way?",
                    0,
                )
            ]
    return []


def _survived(given: Values, answer: Values) -> str:
    """What is wrong with the ranks that survived a killed rank; "" if they have failed."""
    for number, (batch, killed) in enumerate(given["kills"]):
        codes, early = (item_of(answer.get(name), number) for name in ("ends", "early"))
        if not isinstance(codes, list) or len(codes) != given["ranks"][number]:
            return f"there is no answer for each rank of run {number + 1}."
        what = f"Rank {killed} was killed at batch {batch}, and"
        for rank, code in enumerate(codes):
            if rank != killed and (problem := lives_on(f"rank {rank}", code)):
                return f"{what} {problem}"
        if early != []:
            return f"{what} another one {TOO_EARLY}"
    return ""


def _why(given: Values, got: Any) -> str:
    """The likely reason why the losses are not right."""
    every, steps = given["job"]["every"], given["job"]["steps"]
    _, losses = expected_training(given)
    if not is_floats(got) or got.ndim != 1:
        return ""
    if len(got) < steps:
        return f"Expected {steps} losses, got {len(got)}: those so far belong to the state."
    if len(got) == steps and not np.allclose(got[: every + 1], losses[: every + 1], rtol=1e-6):
        return "The first loss after the break differs: the model is not the saved one."
    if len(got) == steps and np.allclose(got, losses, rtol=1e-5):
        return "Nearly the same: is something converted to a different type on the way?"
    return "The curve leaves its path after a break: Adam's moments are the optimizer's state."


# --- elastic_preempted ---------------------------------------------------------------------------


def draw_preempted(draw: Draw) -> list[Values]:
    """Three steps to stop at: the first between two saves, the second where a save is due anyway.

    The third follows a save in which one rank gets the signal: [step, rank].
    """
    rng = draw.shared("sizes")
    every = int(rng.integers(3, 5))
    inputs = draw_job(draw, 3 * every, 6, every, rest=0)
    inputs["stops"] = [every + int(rng.integers(1, every)), 2 * every, every + 1]
    inputs["told"] = [None, None, [every, int(rng.integers(SAME_SIZE))]]
    return rank_zero_only(draw, inputs)


def observe_preempted(path: Any, inputs: Values, context: Context) -> Values:
    """Three fresh runs that are told to stop."""
    if context.rank != 0:
        return {}
    answer: Values = {"runs": []}
    for stop, told in zip(inputs["stops"], inputs["told"], strict=True):
        with start_job(path, inputs) as job:
            failure = job.run(SAME_SIZE, stop=stop, told=told)
            if not job.calls("batch"):
                raise job.failure(f"{failure or 'ended'} and took no batch")
            answer["runs"].append(
                {
                    "failure": failure,
                    "out": job.out.exists(),
                    "taken": len({call[2] for call in job.calls("batch")}),
                    "saves": [call[2] for call in job.calls("save") if call[1] == 0],
                    "asked": [sum(c[1] == r for c in job.calls("asked")) for r in range(SAME_SIZE)],
                    "died": len(job.calls("signal")) > len(job.calls("alive")),
                    "said": job.log.read_text(errors="replace")[-800:] if failure else "",
                }
            )
    return answer


def _asked_together(asked: Any, steps: int) -> bool:
    """Whether every rank called `requested` equally often, and at least once per step."""
    if not isinstance(asked, list) or not all(type(n) is int for n in asked):
        return False
    return len(asked) == SAME_SIZE and len(set(asked)) == 1 and asked[0] >= steps


def judge_preempted(case: Case) -> Iterator[Finding]:
    """The script takes no step after the stop, saves the last step once, and ends with code 0.

    It may return at once, or leave the loop and come to its end.
    """
    given, runs = case.inputs[0], plain(case.answers[0]).get("runs")
    every = given["job"]["every"]
    for number, stop in enumerate(given["stops"]):
        run = item_of(runs, number)
        run = run if isinstance(run, dict) else {}
        story = f"`requested` says True after step {stop} (--every={every}):"
        saves = run.get("saves")
        times = saves.count(stop) if isinstance(saves, list) else 0
        problem = ""
        if run.get("died") is not False and given["told"][number] is not None:
            step, rank = given["told"][number]
            yield Finding(
                f"rank {rank} got a SIGTERM in save_together of step {step}, and died of it: "
                "`with Preemption()` has to be open from the first step to the last, also while "
                "it saves.",
                0,
            )
            continue
        if run.get("asked") == [0] * SAME_SIZE:
            problem = (
                "nobody called it: it is for all ranks after every step; the script took "
                f"{run.get('taken')} batches."
            )
        elif run.get("taken") != stop:
            problem = f"expected {stop} batches to be taken, got {run.get('taken')}."
        elif not _asked_together(run.get("asked"), stop):
            problem = (
                f"`requested` is a collective, to be called after every step on every rank; the "
                f"ranks called it {run.get('asked')} times."
            )
        elif times != 1:
            problem = (
                f"step {stop} should be saved once, it was saved {times} times; what was saved: "
                f"{saves}. Time is short, and what is not saved is lost."
            )
        elif run.get("out") is not False:
            problem = "--out was written, as if all steps had been done."
        elif run.get("failure") != "":
            problem = (
                f"the script {run.get('failure')}; whoever stops in time ends well, with exit "
                f"code 0:\n{run.get('said')}"
            )
        if problem:
            yield Finding(f"{story} {problem}", 0)
