"""Criterion for task 5 of lab 5: nodes are lost, and the job, started again, gives the same curve.

A checkpoint is due after the last step here, and not in `node_script`. The job that starts again
has more steps than the one that died, and saves less often. The curve is compared with the one that
the same script gives without a break; `node_script` judges whether the latter is right. Both nodes
have the rows of all ranks here. The job that starts again has only rows of steps to come.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, told
from autograder.criteria.common.survivors import TOO_EARLY, lives_on, wait_for_ends
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab5_multinode import script
from autograder.criteria.lab5_multinode.nodes import (
    DEATHS,
    GRACE_S,
    NODES,
    RUN_DEADLINE_S,
    NodeDeath,
    NodesJob,
    kill_trees,
    nodes,
    steps_saved,
    wait,
)
from minidist.processes.fork_server import Child

OLD_OUT = b"of a run before"


def draw_lost(source: Draw) -> list[Values]:
    """A job, and when its node 1 dies: up to the step after the first save.

    There are two deaths: one before the gradients' collective, and one after that collective.
    """
    inputs, *others = script.draw(source, last_is_due=True)
    rng = source.shared("death")
    # Not in the first forward pass: a script may make one before it shares the model.
    inputs["deaths"] = [
        {
            "step": int(rng.integers(first, inputs["job"]["every"] + 2)),
            "moment": moments[rng.integers(len(moments))],
        }
        for first, moments in ((2, DEATHS[:1]), (1, DEATHS[1:]))
    ]
    return [inputs, *others]


def observe_lost(path: Any, inputs: Values, context: Context) -> Values:
    """The curve without a break; how each node ends when the other dies; the resumed curve."""
    if context.rank != 0:
        return {}
    with tempfile.TemporaryDirectory(prefix="nodes-") as name:
        job = NodesJob(path, inputs, Path(name))
        job.write_data(0, shared=True)
        answer = {f"whole/{k}": v for k, v in _run(job, "").items()}
        saves = steps_saved(job.saves())
        answer["saves"] = saves
        answer["keep"] = sorted(p.name for p in job.checkpoints.glob("keep-*"))
        if not _can_be_resumed(saves, inputs["job"]["steps"]):
            return answer
        first, second, third = saves[:3]
        # A save in a thread may stop a rank only at the next save: a step must follow the third.
        job.inputs = _with(inputs, steps=third + 1)
        answer |= {"ends": [], "dying": [], "partial": []}
        for death in inputs["deaths"]:
            job.clear()
            with nodes(job, torchrun=False, death=NodeDeath(**death)) as processes:
                answer["ends"].append(_end_of(processes[0]))
            answer["dying"].append(steps_saved(job.saves()))
            answer["partial"].append((job.folder / "out-0.npz").exists())
        job.clear()
        stop = job.checkpoints / f"stop-{second}"
        stop.touch()
        with nodes(job, torchrun=False) as processes:
            _wait_for_stop(job, processes, second)
            kill_trees([processes[0].pid])
            (job.checkpoints / "go").touch()  # releases node 1, if that saves, against the rule
            answer["ends"].append(_end_of(processes[1]))
        # Only now, because no process of the first run is alive: damage its last checkpoint.
        stop.unlink()
        (job.checkpoints / f"damaged-{second}").touch()
        job.inputs = _with(inputs, every=inputs["job"]["every"] + 1)
        job.write_data(min(first, inputs["job"]["every"]), shared=True)
        resumed = _run(job, " after it was started again")
        answer |= {f"resumed/{k}": v for k, v in resumed.items()}
        answer["again"] = steps_saved(job.saves())
        if saves == _due(inputs["job"]) and answer["again"] == _due_again(inputs["job"]):
            done = answer["again"][-1]
            job.inputs = _with(inputs, steps=done)
            finished = _run(
                job, f" when it was started with --steps={done} and all {done} done", old_out=True
            )
            answer |= {f"finished/{k}": v for k, v in finished.items()}
        return answer


def _with(inputs: Values, **options: int) -> Values:
    """The same for a job with different options."""
    return inputs | {"job": inputs["job"] | options}


def _can_be_resumed(saves: Any, steps: int) -> bool:
    """Whether there are three checkpoints before the last step."""
    numbers = isinstance(saves, list) and all(type(s) is int for s in saves)
    return numbers and len(saves) >= 3 and saves[2] < steps


def _due(job: Values) -> list[int]:
    """The steps after which a run without a break saves."""
    return [*range(job["every"], job["steps"] + 1, job["every"])]


def _due_again(job: Values) -> list[int]:
    """The steps of all checkpoints when the job has died in its second save and was resumed."""
    resumed = _due(job | {"every": job["every"] + 1})
    return sorted({job["every"], 2 * job["every"], *resumed})


def _run(job: NodesJob, what: str, *, old_out: bool = False) -> Values:
    """The results of a job that runs to its end; `old_out`: an earlier run has left an --out."""
    for old in (*job.folder.glob("out-*.npz"), *job.folder.glob("log-*.txt")):
        old.unlink()
    out = job.folder / "out-0.npz"
    if old_out:
        out.write_bytes(OLD_OUT)
    with nodes(job, torchrun=False) as processes:
        wait(job, processes, what)
    if out.is_file() and out.read_bytes() == OLD_OUT:
        out.unlink()
        what += ", and left the --out of an earlier run as it was"
    return job.results(what)


def _end_of(process: Child) -> int | None:
    """The exit code of a node whose partner has died; None if it is still running."""
    return wait_for_ends([process], RUN_DEADLINE_S / 2, GRACE_S)[0]


def _wait_for_stop(job: NodesJob, processes: Sequence[Child], step: int) -> None:
    """Waits until the stand-in has stopped the job at the save of `step`.

    Raises:
        RuntimeError: the job ended, or the deadline passed, before that.
    """
    end_s = time.monotonic() + RUN_DEADLINE_S
    while not (job.checkpoints / "stopped").exists():
        ended = all(process.poll() is not None for process in processes)
        if any(process.poll() not in (None, 0) for process in processes):
            end_s = min(end_s, time.monotonic() + GRACE_S)
        if ended or time.monotonic() > end_s:
            raise job.failure(f"called save_checkpoint for step {step} in one run, not in the next")
        time.sleep(0.05)


def _deaths(given: Values) -> tuple[tuple[int, str], ...]:
    """For each death: the node that is left, and the cause in words."""
    return (
        *((0, f"node 1 died in step {d['step']}, {d['moment']}") for d in given["deaths"]),
        (1, "node 0 died while a checkpoint was saved"),
    )


def judge_lost(case: Case) -> list[Finding]:
    """Whatever rank is left ends with an error; the resumed curve is the one without a break."""
    given, answer = case.inputs[0], case.answers[0]
    whole, saves = answer.get("whole/losses"), told(answer, "saves")
    if problem := _untrained(given, answer, whole):
        return [Finding(f"without a break already, {problem}", 0)]
    assert isinstance(whole, np.ndarray)
    if not _can_be_resumed(saves, given["job"]["steps"]):
        return [
            Finding(
                f"--every={given['job']['every']} --steps={given['job']['steps']}: save_checkpoint "
                f"was called for the steps {saves}; three before the last step are needed here.",
                0,
            )
        ]
    ends = told(answer, "ends")
    deaths = _deaths(given)
    alone = script.trained_alone(given, answer, NODES, "whole/")
    alone = alone and f"Without a break already, {alone}"
    if survived := _survived(deaths, ends, alone):
        return [survived]
    partial = told(answer, "partial")
    if partial != [False] * len(given["deaths"]):
        which = partial.index(True) if isinstance(partial, list) and True in partial else 0
        return [Finding(f"{deaths[which][1]}, and node 0 {TOO_EARLY}", 0)]
    if not isinstance(ends, list) or len(ends) != len(deaths):
        return [Finding("there is no answer for each node that died.", 0)]
    if problem := _saved(answer, given, saves):
        return [Finding(problem, 0)]
    text = (
        f"(Nodes died after step {saves[1]}, the checkpoint of that step was damaged, and the job "
        f"was started again: it should go on from step {saves[0]}.) "
    )
    got = answer.get("resumed/losses")
    hint = alone or text + _reason(got, whole, saves[0])
    if wrong := oracle.differs(0, "losses of the resumed run", got, whole, hint=hint):
        return [wrong]
    for name in (k for k in given if k[0] == "p" and k[1:].isdigit()):
        right = answer.get(f"whole/{name}")
        assert isinstance(right, np.ndarray)  # `_untrained` has seen it
        got = answer.get(f"resumed/{name}")
        hint = alone or text
        if wrong := oracle.differs(0, f"{name} of the resumed run", got, right, hint=hint):
            return [wrong]
    if saves == _due(given["job"]):
        return _finished(given, answer, whole[: _due_again(given["job"])[-1]])
    return []


def _survived(deaths: tuple[tuple[int, str], ...], ends: Any, alone: str) -> Finding | None:
    """The first process that a death of the other node has not ended with an error."""
    for (survivor, what), code in zip(deaths, ends if isinstance(ends, list) else (), strict=False):
        if problem := lives_on(f"the process on node {survivor}", code, alone):
            return Finding(f"{what}, and {problem}", 0)
    return None


def _finished(given: Values, answer: Values, losses: np.ndarray) -> list[Finding]:
    """What is wrong with the --out of a job that was started again with all of its steps done."""
    what = f"of a job that was started again with all of its {len(losses)} steps done"
    hint = "It has nothing left to do but to write --out, in place of an older one."
    got = answer.get("finished/losses")
    if wrong := oracle.differs(0, f"losses {what}", got, losses, hint=hint):
        return [wrong]
    got = answer.get("finished/p0")
    if not isinstance(got, np.ndarray) or np.array_equal(got, given["p0"]):
        return [Finding(f"p0 {what} is as before the first step, not as it was saved. {hint}", 0)]
    return []


def _saved(answer: Values, given: Values, saves: list[int]) -> str:
    """What is wrong with the calls of save_checkpoint around a break; "" if nothing is."""
    job = given["job"]
    if told(answer, "keep"):
        return (
            "save_checkpoint was told to keep a single checkpoint: if it is damaged, none is left."
        )
    due = _due(job)
    if saves == due[:-1]:
        return (
            f"--every={job['every']} --steps={job['steps']}: save_checkpoint was called for the "
            f"steps {saves}, and not after the last one, when a checkpoint is due too."
        )
    if saves != due:
        return ""  # node_script judges this
    dying, again = told(answer, "dying"), told(answer, "again")
    if not isinstance(dying, list) or len(dying) != len(given["deaths"]):
        return "there is no list of checkpoints for each node that died."
    for (_, what), steps in zip(_deaths(given), dying, strict=False):
        if not isinstance(steps, list) or not set(steps) <= set(saves[:1]):
            return (
                f"--every={job['every']}: {what}, and rank 0 saved for the steps {steps}: it saves "
                "after every so many steps and at no other time. Nobody knows in which step an "
                "error has come."
            )
    if again != (right := _due_again(job)):
        return (
            f"--every={job['every']} until the break after step {saves[1]}, then "
            f"--every={job['every'] + 1}, --steps={job['steps']}: there should be checkpoints of "
            f"the steps {right}, there were those of {again}: steps are counted from the very "
            "first one."
        )
    return ""


def _untrained(given: Values, answer: Values, whole: Any) -> str:
    """Why the run without a break is no training that could be resumed; "" if it is one."""
    if not is_floats(whole) or whole.ndim != 1:
        return "losses in --out is no list of numbers."
    if not whole.size or not np.isfinite(whole).all():
        return "the losses are not all finite."
    for name in (k for k in given if k[0] == "p" and k[1:].isdigit()):
        got = answer.get(f"whole/{name}")
        if not isinstance(got, np.ndarray) or got.shape != given[name].shape:
            return f"{name} in --out has not the shape {list(given[name].shape)}."
        if got.dtype.kind != "f" or not np.isfinite(got).all():
            return f"{name} in --out is not finite."
    if np.array_equal(answer["whole/p0"], given["p0"]):
        return "p0 has not changed: nothing was trained."
    return ""


def _reason(got: Any, whole: np.ndarray, first: int) -> str:
    """Where the resumed curve leaves the one without a break, and what that shows."""
    if not is_floats(got) or got.ndim != 1:
        return ""
    if len(got) == len(whole) - first:
        return "The losses before the break are missing: they belong to the state."
    if len(got) != len(whole):
        return f"Without a break there are {len(whole)} losses, here are {len(got)}."
    if np.isnan(got).any():
        return (
            f"The loss of step {int(np.isnan(got).argmax())} is nan: only the rows from step "
            f"{first} on are left by now, so it was computed from rows of a step that was done "
            "before the break. load_newest says which step comes next, on every rank."
        )
    off = np.flatnonzero(~np.isclose(got, whole, rtol=1e-3))
    place = int(off[0]) if off.size else len(whole)
    if place < first:
        return "The losses before the break are not those that were saved."
    if place == first:
        return (
            "The first loss after the break differs already: the model is not the saved one, or "
            "the rows are not those of this step."
        )
    return (
        "The first loss after the break is right, so model and rows are: what differs is a step. "
        "The optimizer keeps the momentum, the scheduler how far it has come; both have a "
        "state_dict."
    )
