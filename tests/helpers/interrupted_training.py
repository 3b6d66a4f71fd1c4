"""Runs of the training program of which one rank is told to end, as a cluster does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from minidist.train import TrainConfig, train


def _ends_after(step: int, rank: int) -> Callable[[dict[str, Any]], None]:
    def on_step(record: dict[str, Any]) -> None:
        if record["step"] == step and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_step


def interrupted(config: TrainConfig, step: int, rank: int) -> list[float]:
    """Train; `rank` gets SIGTERM after `step`. Returns losses, on all ranks the same."""
    dist.init_process_group("gloo")
    losses = train(config, on_step=_ends_after(step, rank))
    dist.barrier()
    dist.destroy_process_group()
    return losses


def whole_and_in_two_parts(
    configs: Sequence[TrainConfig], step: int, rank: int
) -> list[tuple[list[float], list[float], list[float]]]:
    """For each: a whole run; one in which `rank` is told to end after `step`; its other part."""
    dist.init_process_group("gloo")
    results = [
        (
            train(replace(config, out=None)),
            train(config, on_step=_ends_after(step, rank)),
            train(config),
        )
        for config in configs
    ]
    dist.barrier()
    dist.destroy_process_group()
    return results
