"""Criteria for task 6 of bonus_elastic: the script, undisturbed, with changing ranks, and stopped.

Rank 0 starts the script on new ranks, as torchrun would. The script imports a stand-in for tasks 1
to 5 as `elastic_parts`, so that a bug in these tasks does not count twice. The stand-in's sampler
gives out drawn batches and kills a rank at a drawn step, its `Preemption` requests a stop at a
drawn step, and the stand-in records which rank called which function.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, item_of, plain
from autograder.criteria.common.launched import ON_CPU, run_script
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

RUN_DEADLINE_S = 120.0  # a run takes one or two seconds; the rest is for a busy machine
SAME_SIZE = 2  # ranks of the two runs that must agree bit for bit
STAND_IN = Path(__file__).with_name("standin.py")


def _draw_job(draw: Draw, num_batches: int, batch: int, every: int, rest: int) -> Values:
    """A model, data, and a batch for every step; `rest` samples form an epoch's last batch."""
    rng = draw.shared()
    sizes = (int(rng.integers(3, 6)), int(rng.integers(4, 8)), 1)
    num_samples = 3 * batch + rest
    inputs = oracle.draw_parameters(rng, sizes) | oracle.draw_batch(rng, num_samples, sizes)
    batches: list[list[int]] = []
    while len(batches) < num_batches:
        order = [int(i) for i in rng.permutation(num_samples)]
        batches += [order[i : i + batch] for i in range(0, num_samples, batch)]
    inputs["job"] = {
        "steps": num_batches,
        "every": every,
        "batch-size": batch,
        "lr": float(rng.uniform(0.02, 0.1)),
        "seed": int(rng.integers(10**6)),
    }
    inputs["batches"] = batches
    return inputs


def _for_rank_zero(draw: Draw, inputs: Values) -> list[Values]:
    return [inputs] + [{} for _ in range(draw.world_size - 1)]


# --- starting the script -------------------------------------------------------------------------


class _Job:
    """A folder with the script, the stand-in, the data and the checkpoints."""

    def __init__(self, path: Any, inputs: Values, folder: Path) -> None:
        source = Path(path)
        if not source.is_file():
            raise FileNotFoundError(
                f"{source}: expected a script in {Path.cwd()}; run the cell above"
            )
        self.inputs, self.folder = inputs, folder
        self.script = folder / source.name
        self.checkpoints, self.out = folder / "checkpoints", folder / "out.npz"
        self.number = 0  # runs so far
        self.writers: list[str] = []  # ranks that wrote --out in the last run
        shutil.copy(source, self.script)
        shutil.copy(STAND_IN, folder / "elastic_parts.py")
        arrays: Any = {k: v for k, v in inputs.items() if isinstance(v, np.ndarray)}
        np.savez(folder / "data.npz", **arrays)

    def run(
        self, nprocs: int, *, kill: Any = None, stop: int | None = None, told: Any = None
    ) -> str:
        """Runs on `nprocs` ranks, from the newest checkpoint; returns what went wrong, or ""."""
        self.number += 1
        plan = {
            "batches": self.inputs["batches"],
            "kill": kill,
            "stop": stop,
            "signal": told,
            "clear": self.inputs.get("clear", False),
            "calls": str(self.folder / f"calls-{self.number}.jsonl"),
        }
        (self.folder / "plan.json").write_text(json.dumps(plan))
        Path(plan["calls"]).touch()
        options = [f"--{k}={v}" for k, v in self.inputs["job"].items()]
        options += [
            f"--data={self.folder / 'data.npz'}",
            "--out=./out.npz",
            f"--checkpoints={self.checkpoints}",
        ]
        folders = self.folder / f"ranks-{self.number}"
        folders.mkdir()
        failure = run_script(
            self.script,
            options,
            self.log,
            nprocs,
            deadline_s=RUN_DEADLINE_S,
            env=ON_CPU,
            folders=folders,
        )
        self.writers = sorted(path.parent.name for path in folders.glob("*/out.npz"))
        if "0" in self.writers:
            (folders / "0" / "out.npz").rename(self.out)
        return failure

    @property
    def log(self) -> Path:
        return self.folder / f"log-{self.number}.txt"

    def calls(self, *names: str) -> list[list[Any]]:
        """The last run's calls with these names, as [name, rank, …]; in order for each rank."""
        text = (self.folder / f"calls-{self.number}.jsonl").read_text(errors="replace")
        calls = [json.loads(line) for line in text.splitlines()]
        return [call for call in calls if call[0] in names]

    def failure(self, what: str) -> Exception:
        """The error to raise where the script failed, with the end of the script's output."""
        said = self.log.read_text(errors="replace")
        if "NotImplementedError" in said:
            return NotImplementedError()
        return RuntimeError(f"{self.script.name} {what}:\n{said[-1500:]}")

    def results(self, what: str, failure: str) -> Values:
        """The parameters and losses in --out; removes the file."""
        if not self.out.is_file():
            raise self.failure(f"{what} {failure or 'ended'} and wrote no file to --out")
        with np.load(self.out, allow_pickle=False) as saved:
            found = {k: saved[k] for k in saved.files if k == "losses" or k in self.inputs}
        self.out.unlink()
        return {k: v for k, v in found.items() if k not in ("x", "y")}


@contextlib.contextmanager
def _job(path: Any, inputs: Values) -> Iterator[_Job]:
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        yield _Job(path, inputs, Path(folder))


# --- the same in one process ---------------------------------------------------------------------


def expected_training(inputs: Values) -> tuple[list[np.ndarray], np.ndarray]:
    """Final parameters and all losses of one process that trains on the global batches."""
    model = oracle.mlp(inputs, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=inputs["job"]["lr"])
    x, y = (torch.from_numpy(inputs[name]).double() for name in "xy")
    losses = []
    for batch in inputs["batches"][: inputs["job"]["steps"]]:
        optimizer.zero_grad()
        loss = oracle.mse(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [p.detach().numpy() for p in model.parameters()], np.array(losses)


def _judge_training(findings: list[Finding], given: Values, answer: Values, hint: str) -> None:
    parameters, losses = expected_training(given)
    got = answer.get("losses")
    if wrong := oracle.differs(0, "losses in --out", got, losses, dtype="float64", hint=hint):
        findings.append(wrong)
        return
    for i, expected in enumerate(parameters):
        got = answer.get(f"p{i}")
        if wrong := oracle.differs(
            0,
            f"p{i} in --out",
            got,
            expected,
            dtype="float64",
            hint=hint,
            terms=[given[f"p{i}"]],
        ):
            findings.append(wrong)
            return


# --- elastic_script ------------------------------------------------------------------------------


def draw_script(draw: Draw) -> list[Values]:
    """Sizes for which the batch, the samples and the steps never divide evenly.

    The batch is not divisible by the ranks, the samples are not divisible by the batch, and the
    steps are not divisible by --every.
    """
    rng = draw.shared("sizes")
    every = int(rng.integers(3, 5))
    steps = 2 * every + int(rng.integers(1, every))
    batch = draw.world_size * int(rng.integers(2, 4)) + 1
    inputs = _draw_job(draw, steps, batch, every, rest=1)
    return _for_rank_zero(draw, inputs)


def observe_script(path: Any, inputs: Values, context: Context) -> Values:
    """All steps, on as many ranks as the criterion has."""
    if context.rank != 0:
        return {}
    with _job(path, inputs) as job:
        failure = job.run(context.world_size)
        answer = job.results(f"on {context.world_size} ranks", failure)
        return answer | {
            "writers": job.writers,
            "saved": job.calls("save"),
            "loaded": job.calls("load"),
            "samplers": job.calls("sampler"),
        }


def judge_script(case: Case) -> list[Finding]:
    """Losses and parameters are those of one process; all ranks save at the due steps."""
    given, answer = case.inputs[0], case.answers[0]
    job, ranks = given["job"], range(case.world_size)
    findings: list[Finding] = []
    wanted = [["sampler", r, len(given["x"]), job["batch-size"], job["seed"]] for r in ranks]
    told = plain(answer)
    if not _same_calls(told.get("samplers"), wanted):
        return [
            Finding(
                f"expected ElasticSampler({len(given['x'])}, {job['batch-size']}, "
                f"seed={job['seed']}) once on every rank: the samples in --data, --batch-size and "
                "--seed.",
                0,
            )
        ]
    _judge_training(
        findings,
        given,
        answer,
        (
            "The mean over all samples of the global batch counts, and shares are not equal here. "
            "In the last batch of an epoch some ranks have no sample: they go through the same "
            "calls."
        ),
    )
    if told.get("writers") != ["0"]:
        findings.append(
            Finding(f"ranks that wrote --out: {told.get('writers')}, expected rank 0 alone.", 0)
        )
    steps = [*range(job["every"], job["steps"], job["every"]), job["steps"]]
    if not _same_calls(told.get("saved"), [["save", r, step] for step in steps for r in ranks]):
        findings.append(
            Finding(
                f"--every={job['every']} --steps={job['steps']}: save_together should be called "
                f"once for each of the steps {steps}, on every rank; the calls were "
                f"{_by_step(told.get('saved'))}. It is a collective, and the last step is saved, "
                "too.",
                0,
            )
        )
    if not _same_calls(told.get("loaded"), [["load", r] for r in ranks]):
        findings.append(
            Finding("load_together should be called once on every rank, before the first step.", 0)
        )
    return findings


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


# --- elastic_rejoin ------------------------------------------------------------------------------


def draw_rejoin(draw: Draw) -> list[Values]:
    """Three numbers of ranks, and [batch, rank] of the kill in each of the first two runs."""
    rng = draw.shared("sizes")
    every = int(rng.integers(3, 5))
    inputs = _draw_job(draw, 3 * every + 1, 6 * int(rng.integers(1, 3)), every, rest=0)
    # A batch is one sample, many times: a rank's own loss is the loss of the batch. Whether the
    # script weights ranks, and whose loss it writes, is up to `elastic_script`.
    inputs["batches"] = [[batch[0]] * len(batch) for batch in inputs["batches"]]
    inputs["clear"] = True
    ranks = [int(r) for r in 1 + rng.permutation(3)]
    kills = [
        [(number + 1) * every + int(rng.integers(1, every)), int(rng.integers(ranks[number]))]
        for number in range(2)
    ]
    inputs |= {"ranks": ranks, "kills": kills}
    return _for_rank_zero(draw, inputs)


def observe_rejoin(path: Any, inputs: Values, context: Context) -> Values:
    """Three runs with different numbers of ranks, two of them killed; then three of one size."""
    if context.rank != 0:
        return {}
    answer: Values = {"began": []}
    with _job(path, inputs) as job:
        failure = ""
        for number, nprocs in enumerate(inputs["ranks"]):
            kill = inputs["kills"][number] if number < 2 else None
            failure = job.run(nprocs, kill=kill)
            batches = [call[2] for call in job.calls("batch")]
            if not batches and number == 0:
                raise job.failure("took no batch")
            answer["began"].append(min(batches, default=-1))
        if -1 in answer["began"]:  # an earlier run was not killed and did all steps
            return answer
        answer |= job.results(f"on {inputs['ranks'][-1]} ranks", failure)

    # The same number of ranks: undisturbed; once more when all is done, as if the job had died
    # before it wrote --out; and from the first checkpoint.
    with _job(path, inputs) as job:
        for name in ("whole", "done", "resumed"):
            failure = job.run(SAME_SIZE)
            what = {"done": ", when all steps were done and saved,"}.get(name, "")
            result = job.results(f"on {SAME_SIZE} ranks{what}", failure)
            answer |= {f"{name}/{key}": value for key, value in result.items()}
            for saved in job.checkpoints.glob("step-*") if name == "done" else ():
                if saved.name != f"step-{inputs['job']['every']}":
                    saved.unlink()
    return answer


def judge_rejoin(case: Case) -> list[Finding]:
    """The losses are those of one process; with the same number of ranks they agree bit for bit."""
    given, answer = case.inputs[0], case.answers[0]
    every, ranks, kills = given["job"]["every"], given["ranks"], given["kills"]
    story = (
        f"({ranks[0]} ranks until one was killed in step {kills[0][0]}, then {ranks[1]} until step "
        f"{kills[1][0]}, then {ranks[2]}; saved every {every} steps.)"
    )
    began = plain(answer).get("began")
    if began != [0, every, 2 * every]:
        return [
            Finding(
                f"{story} The three runs should take up the batches {[0, every, 2 * every]} first, "
                f"they took {began} (-1 is none): load_together first, and give the sampler its "
                "state.",
                0,
            )
        ]
    findings: list[Finding] = []
    _judge_training(findings, given, answer, f"{story} {_why(given, answer.get('losses'))}")
    if findings:
        return findings
    for name in ("losses", *(k for k in given if k[0] == "p" and k[1:].isdigit())):
        whole = answer.get(f"whole/{name}")
        again = [answer.get(f"{run}/{name}") for run in ("done", "resumed")]
        same = (
            is_floats(whole)
            and np.isfinite(whole).all()
            and all(isinstance(it, np.ndarray) and np.array_equal(whole, it) for it in again)
        )
        if not same:
            return [
                Finding(
                    f"{SAME_SIZE} ranks without a break, and {SAME_SIZE} ranks from the checkpoint "
                    f"of step {every}: {name} in --out should be equal bit for bit. Is something "
                    "converted to another type on the way?",
                    0,
                )
            ]
    return []


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
        return "Nearly the same: is something converted to another type on the way?"
    return "The curve leaves its path after a break: Adam's moments are the optimizer's state."


# --- elastic_preempted ---------------------------------------------------------------------------


def draw_preempted(draw: Draw) -> list[Values]:
    """Three steps to stop at: the first between two saves, the second where a save is due anyway.

    The third follows a save in which one rank gets the signal: [step, rank].
    """
    rng = draw.shared("sizes")
    every = int(rng.integers(3, 5))
    inputs = _draw_job(draw, 3 * every, 6, every, rest=0)
    inputs["stops"] = [every + int(rng.integers(1, every)), 2 * every, every + 1]
    inputs["told"] = [None, None, [every, int(rng.integers(SAME_SIZE))]]
    return _for_rank_zero(draw, inputs)


def observe_preempted(path: Any, inputs: Values, context: Context) -> Values:
    """Three fresh runs that are told to stop."""
    if context.rank != 0:
        return {}
    answer: Values = {"runs": []}
    for stop, told in zip(inputs["stops"], inputs["told"], strict=True):
        with _job(path, inputs) as job:
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
    """The script takes no step after the stop, saves the last step once, and ends with code 0."""
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
        if run.get("taken") != stop:
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
