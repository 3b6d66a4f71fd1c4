"""The job of task 6: a student's script on new ranks, and the same training in one process.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.common.launched import (
    ON_CPU,
    find_script,
    run_script,
    run_to_a_death,
)
from autograder.criteria.criterion import Draw, Finding, Values
from autograder.criteria.not_started import is_not_started

RUN_DEADLINE_S = 120.0  # a run takes one or two seconds; the rest is for a busy machine
STAND_IN = Path(__file__).with_name("standin.py")


def draw_job(draw: Draw, num_batches: int, batch: int, every: int, rest: int) -> Values:
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


# --- starting the script -------------------------------------------------------------------------


class ElasticJob:
    """A folder with the script, the stand-in, the data and the checkpoints."""

    def __init__(self, path: Any, inputs: Values, folder: Path) -> None:
        source = find_script(path)
        self.inputs, self.folder = inputs, folder
        self.script = folder / source.name
        self.checkpoints, self.out = folder / "checkpoints", folder / "out.npz"
        self.number = 0  # runs so far
        self.writers: list[str] = []  # ranks that wrote --out in the last run
        shutil.copy(source, self.script)
        shutil.copy(STAND_IN, folder / "elastic_parts.py")
        arrays: Any = {k: v for k, v in inputs.items() if isinstance(v, np.ndarray)}
        np.savez(folder / "data.npz", **arrays)

    def run(self, nprocs: int, *, stop: int | None = None, told: Any = None) -> str:
        """Runs on `nprocs` ranks, from the newest checkpoint; returns what went wrong, or ""."""
        return self._run(run_script, nprocs, stop=stop, signal=told)

    def run_and_lose(self, nprocs: int, kill: list[int]) -> list[int]:
        """The same until a rank is killed: kill is [batch, rank]; returns all exit codes."""
        return self._run(run_to_a_death, nprocs, kill=kill)

    def _run(self, launch: Callable[..., Any], nprocs: int, **plan: Any) -> Any:
        """Runs the script under a plan for the stand-in; returns what `launch` does."""
        self.number += 1
        plan = {
            "batches": self.inputs["batches"],
            "kill": None,
            "stop": None,
            "signal": None,
            "clear": self.inputs.get("clear", False),
            "calls": str(self.folder / f"calls-{self.number}.jsonl"),
        } | plan
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
        result = launch(
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
        return result

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
        if is_not_started(said):
            return NotImplementedError()
        return RuntimeError(
            f"{self.script.name} {what}" + f":\n{said[-1500:]}" * bool(said.strip())
        )

    def results(self, what: str, failure: str) -> Values:
        """The parameters and losses in --out; removes the file."""
        if not self.out.is_file():
            raise self.failure(f"{what} {failure or 'ended'} and wrote no file to --out")
        with np.load(self.out, allow_pickle=False) as saved:
            found = {k: saved[k] for k in saved.files if k == "losses" or k in self.inputs}
        self.out.unlink()
        return {k: v for k, v in found.items() if k not in ("x", "y")}


@contextlib.contextmanager
def start_job(path: Any, inputs: Values) -> Iterator[ElasticJob]:
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        yield ElasticJob(path, inputs, Path(folder))


# --- the same in one process ---------------------------------------------------------------------


def expected_training(inputs: Values) -> tuple[list[np.ndarray], np.ndarray]:
    """Final parameters and all losses of one process that trains on the global batches."""
    model = oracle.mlp(inputs, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=inputs["job"]["lr"])
    batches = inputs["batches"][: inputs["job"]["steps"]]
    return oracle.fit(model, optimizer, ((inputs["x"][b], inputs["y"][b]) for b in batches))


def judge_training(given: Values, answer: Values, hint: str) -> Finding | None:
    parameters, losses = expected_training(given)
    got = answer.get("losses")
    if wrong := oracle.differs(0, "losses in --out", got, losses, dtype="float64", hint=hint):
        return wrong
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
            return wrong
    return None
