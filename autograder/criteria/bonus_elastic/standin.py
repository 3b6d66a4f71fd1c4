"""Stand-in for tasks 1 to 5 of bonus_elastic, copied beside a student's script as elastic_parts.py.

plan.json in the same folder says what happens: the batches, a rank to kill, a step at which to
stop, a rank that gets a SIGTERM while it saves, whether gradients are cleared before each step.
Every call and its rank go into a file, one JSON line per call. The sampler has no order, no epochs
and no shares, and saving is neither atomic nor agreed between ranks, so this file does not contain
the solution of any task.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@cache
def _plan() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("plan.json").read_text())


def _note(name: str, *values: object) -> None:
    """Records a call as one line, in one write, because all ranks write to the same file."""
    line = json.dumps([name, dist.get_rank(), *values]) + "\n"
    file = os.open(_plan()["calls"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


_combined: list[torch.nn.Parameter] = []  # the parameters of the last step


class _Loss(float):
    """The float that `combine` returns; a script may call item(), as on a tensor."""

    def item(self) -> float:
        return float(self)


class ElasticSampler:
    """Gives out the plan's batches in order; kills the plan's rank at the plan's batch."""

    taken = 0  # batches; on the class, because `Preemption` reads the number

    def __init__(self, num_samples: int, global_batch: int, seed: int = 0) -> None:
        _note("sampler", int(num_samples), int(global_batch), int(seed))
        ElasticSampler.taken = 0

    def next_batch(self, rank: int, world_size: int) -> tuple[list[int], int]:
        number = ElasticSampler.taken
        if _plan()["kill"] == [number, rank]:
            os.kill(os.getpid(), signal.SIGKILL)
        if number >= len(_plan()["batches"]):
            raise IndexError(f"batch {number} was asked for: --steps are done")
        _note("batch", number)
        for p in _combined if _plan()["clear"] else ():
            p.grad = None
        ElasticSampler.taken += 1
        batch = _plan()["batches"][number]
        return batch[rank::world_size], len(batch)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 0, "position": ElasticSampler.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        ElasticSampler.taken = state["position"]


def combine(
    parameters: Iterable[torch.nn.Parameter], loss: float, num_own: int, num_all: int
) -> float:
    """Gathers the gradients and losses of all ranks, and averages both over the samples."""
    if not num_own and loss != 0.0:
        raise ValueError(f"a rank without samples has a loss of 0.0, got {loss}")
    own = list(parameters)
    _combined[:] = own
    told = [None if p.grad is None else p.grad.detach().cpu() for p in own] if num_own else []
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (num_own, float(loss), told))
    there = [answer for answer in answers if answer[0]]
    for i, p in enumerate(own):
        pieces = [count * grads[i] for count, _, grads in there if grads[i] is not None]
        if pieces:
            p.grad = torch.stack(pieces).sum(dim=0).div(num_all).to(p.device)
    return _Loss(sum(count * value for count, value, _ in there) / num_all)


def save_together(folder: Any, step: int, state: Any, keep: int = 3) -> None:
    """Saves rank 0's state under the name of the step; no rank waits."""
    _note("save", int(step))
    if _plan()["signal"] == [int(step), dist.get_rank()]:
        _note("signal")
        os.kill(os.getpid(), signal.SIGTERM)
        _note("alive")
    if dist.get_rank() == 0:
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        unfinished = place / "unfinished"
        torch.save(state, unfinished)
        unfinished.rename(place / f"step-{step}")


def load_together(folder: Any) -> tuple[int, Any] | None:
    """The checkpoint with the highest step that the calling rank sees."""
    _note("load")
    numbers = [int(p.name.removeprefix("step-")) for p in Path(folder).glob("step-*")]
    if not numbers:
        return None
    newest = Path(folder) / f"step-{max(numbers)}"
    return max(numbers), torch.load(newest, map_location="cpu", weights_only=False)


class Preemption:
    """Survives a SIGTERM; requests a stop when the plan says so."""

    def __enter__(self) -> Preemption:
        self.before = signal.signal(signal.SIGTERM, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)

    def requested(self) -> bool:
        _note("asked")
        stop = _plan()["stop"]
        return stop is not None and ElasticSampler.taken >= stop
