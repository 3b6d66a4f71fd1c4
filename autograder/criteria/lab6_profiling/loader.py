"""Criteria for data loading: the time spent waiting, and the loader's settings.

Waiting is judged with a simulated clock and device, whose times are drawn.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from autograder.criteria.common.answers import (
    as_number,
    described_numbers,
    is_close,
    item_of,
    naming,
    read,
    returned,
    unit_hint,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, integer, per_rank

# --- loader_wait ---------------------------------------------------------------------------------

LAUNCH_S = 1e-4


class SlowLoader:
    """A simulated loader, and a device that executes queued steps later; all times are drawn."""

    def __init__(self, load_s: list[float], work_s: list[float]) -> None:
        self.load_s, self.work_s = load_s, work_s
        self.now = self.ready = 10.0
        self.batches = [None if n == 2 else n for n in range(len(load_s))]  # the first one is 0
        self.seen: list[Any] = []

    def __iter__(self) -> Iterator[int | None]:
        for batch, seconds in zip(self.batches, self.load_s, strict=True):
            self.now += seconds
            yield batch
        self.now += sum(self.load_s)  # its workers end; this is no waiting for a batch

    def step(self, batch: int | None) -> None:
        """Queues one step's work."""
        self.seen.append(batch if batch is None else int(batch))
        self.now += LAUNCH_S
        self.ready = max(self.ready, self.now) + self.work_s[len(self.seen) - 1]

    def synchronize(self) -> None:
        """Waits until the queue is empty."""
        self.now = max(self.now, self.ready)

    def clock(self) -> float:
        """The simulated time in seconds."""
        return self.now


def draw_wait(draw: Draw) -> list[Values]:
    """Loaders that may be slower or faster than the step; the first batch takes very long."""
    inputs = []
    for rank in range(draw.world_size):
        rng, values = draw.private(rank), Values()
        for number in range(3):
            count = int(rng.integers(4, 9))
            load = rng.uniform(0.5, 1.5, count) * rng.uniform(1e-3, 2e-2)
            load[0] *= 60
            values[f"load/{number}"] = load
            values[f"work/{number}"] = rng.uniform(0.5, 1.5, count) * rng.uniform(1e-3, 2e-2)
        inputs.append(values)
    return inputs


def observe_wait(loader_wait: Any, inputs: Values, context: Context) -> Values:
    """Both means for every loader, and the batches for which step() was called."""
    means, seen = [], []
    for number in range(3):
        load, work = (inputs[f"{k}/{number}"].tolist() for k in ("load", "work"))
        slow = SlowLoader(load, work)
        with naming(f"loader_wait(…) with the batches {slow.batches}"):
            found = loader_wait(slow, slow.step, slow.synchronize, clock=slow.clock)
            means.append(described_numbers(returned(found, "loader_wait")))
        seen.append(slow.seen)
    return {"means": means, "seen": seen}


def judge_wait(case: Case) -> Iterator[Finding]:
    """Mean seconds of waiting for a batch and of working on it, without the first batch."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number in range(3):
            load, work = inputs[f"load/{number}"], inputs[f"work/{number}"] + LAUNCH_S
            batches = SlowLoader(load, work).batches
            if item_of(answer.get("seen"), number) != batches:
                yield Finding(
                    f"step(batch) is called once for each batch, 0 and None included: expected "
                    f"{batches}, got {item_of(answer.get('seen'), number)}.",
                    rank,
                )
                break
            got = item_of(answer.get("means"), number)
            wait, step = (item_of(got, i) for i in (0, 1))
            wait_s, step_s = float(load[1:].mean()), float(work[1:].mean())
            if not is_close(wait, wait_s):
                hint = unit_hint(wait, wait_s) or _WAIT_HINT
                if is_close(wait, float((load[1:].sum() + load.sum()) / (len(load) - 1))):
                    hint = "After the last batch the workers end: nobody waits for a batch then."
                if is_close(wait, float(load.mean())):
                    hint = "The first batch pays for the start of the workers: leave it out."
                yield Finding(
                    f"{len(load)} batches: expected {wait_s * 1e3:.4f} ms of waiting per batch, "
                    f"got {_milliseconds(wait)}. {hint}",
                    rank,
                )
                break
            if not is_close(step, step_s):
                hint = unit_hint(step, step_s)
                if is_close(step, LAUNCH_S):
                    hint = "That is what it takes to queue a step: synchronize() first."
                yield Finding(
                    f"{len(load)} batches: expected {step_s * 1e3:.4f} ms of work per batch, got "
                    f"{_milliseconds(step)}. {hint}".rstrip(),
                    rank,
                )
                break


_WAIT_HINT = "The loop waits from the moment it asks for a batch until it has it."


def _milliseconds(value: Any) -> str:
    number = as_number(value)
    return repr(value) if number is None else f"{number * 1e3:.4f} ms"


# --- loader_settings -----------------------------------------------------------------------------


@per_rank
def draw_settings(rng: np.random.Generator) -> Values:
    """Times and machines: with enough cores per rank, with too few, and with none."""
    cases: list[Any] = []
    for number in range(8):
        step_s = float(rng.uniform(0.01, 0.2))
        # For case 0, round() + 1 is one too many; for most others, round() is one too few.
        part = float(rng.uniform(0.1, 0.4) if number == 0 else rng.uniform(0.6, 0.9))
        workers = int(rng.integers(1, 7))
        if number in (4, 5):  # load_s is an exact multiple of step_s, without rounding
            step_s, part = 2.0 ** -int(rng.integers(2, 7)), 0.0
        ranks = int(rng.integers(2, 9))
        # The cores that remain after an equal division among the ranks belong to no rank.
        cores = ranks * int(rng.integers(7, 12)) + int(rng.integers(1, ranks))
        if number in (1, 2):
            workers, cores = workers + 4, ranks * int(rng.integers(1, 4)) + ranks - 1
        if number == 3:
            cores = int(rng.integers(1, ranks))
        if number == 6:  # a little more than a whole number of workers, which is too few
            workers, part = workers + 1, float(rng.uniform(0.996, 0.998))
        if number == 7:  # one worker is far more than enough
            workers, part = 1, 0.95
        cases.append(
            {
                "load_s": (workers - part) * step_s,
                "step_s": step_s,
                "cores": cores,
                "ranks_per_node": ranks,
                "device": ("cpu", "cuda:1", "cpu:0", "cuda")[number % 4],
            }
        )
    return {"cases": cases}


def observe_settings(loader_settings: Any, inputs: Values, context: Context) -> Values:
    """The settings, after a DataLoader has accepted them."""
    found = []
    for case in inputs["cases"]:
        numbers = {key: case[key] for key in ("load_s", "step_s", "cores", "ranks_per_node")}
        with naming(f"loader_settings({_shown(case)})"):
            settings = loader_settings(**numbers, device=torch.device(case["device"]))
            settings = read(settings, dict, "loader_settings", "a dict of options")
        with warnings.catch_warnings(), naming(f"DataLoader(…, **{settings})"):
            warnings.simplefilter("ignore")  # this machine may have fewer cores
            loader = DataLoader(TensorDataset(torch.zeros(4)), batch_size=2, **settings)
        found.append(
            {
                "num_workers": integer(loader.num_workers, "num_workers"),
                "pin_memory": bool(loader.pin_memory),
                "persistent_workers": bool(loader.persistent_workers),
                "prefetch_factor": loader.prefetch_factor,
            }
        )
    return {"found": found}


def judge_settings(case: Case) -> Iterator[Finding]:
    """The workers that a step needs, up to the rank's share of cores; pinned memory for a GPU.

    The DataLoader made from the settings is judged, so a setting may be left to its default.
    """
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, drawn in enumerate(inputs["cases"]):
            got = item_of(answer.get("found"), number)
            problem = _settings_problem(got if isinstance(got, dict) else {}, drawn)
            if problem:
                yield Finding(f"{_shown(drawn)}: {problem}", rank)
                break


def _shown(case: Values) -> str:
    return ", ".join(
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in case.items()
    )


def _settings_problem(got: Values, drawn: Values) -> str | None:
    enough = math.ceil(drawn["load_s"] / drawn["step_s"])
    share = drawn["cores"] // drawn["ranks_per_node"]
    workers, on_gpu = min(enough, share), drawn["device"].startswith("cuda")
    if got.get("num_workers") != workers:
        found, hint = got.get("num_workers"), ""
        if found == enough:
            hint = " All ranks of a node share its cores."
        elif isinstance(found, int) and enough == workers < found:
            hint = f" {enough} keep up already."
        elif isinstance(found, int) and 0 < found < workers:
            hint = (
                f" With {found} a batch takes {drawn['load_s'] / found:.6g} s, which is more than "
                f"the {drawn['step_s']:.6g} s of a step."
            )
        return (
            f"expected {workers} workers ({enough} would keep up, {share} cores per rank), got "
            f"{found!r}.{hint}"
        )
    if got.get("pin_memory") is not on_gpu:
        return (
            f"pin_memory: expected {on_gpu}, got {got.get('pin_memory')!r}: it is True for a GPU, "
            "with an index or without, and for nothing else."
        )
    if got.get("persistent_workers") is not (workers > 0):
        return (
            f"persistent_workers: expected {workers > 0} with {workers} workers, got "
            f"{got.get('persistent_workers')!r}: workers that end with the epoch start anew."
        )
    if got.get("prefetch_factor") != (2 if workers else None):
        return (
            f"prefetch_factor: expected {2 if workers else None} with {workers} workers, got "
            f"{got.get('prefetch_factor')!r}: each batch ahead costs memory."
        )
    return None
