"""Our pipeline executor beside torch.distributed.pipelining: the same stages, one step of training.

Phases: a GPT cut into two stages, one twin of it for each side; a step (forward, backward,
optimizer) of either in turn; the ratio of their times. 2 ranks x 1 thread over gloo.

    python benchmarks/pipeline.py [--quick]
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import Row, main_arguments, paired, row, run_bench, write

from minidist.data import make_tokens
from minidist.model import GPT, GPTConfig, lm_loss
from minidist.parallel.pipeline import (
    PipelineExecutor,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    split_model,
)
from minidist.parallel.pipeline.native import NativePipeline

NUM_RANKS = 2
GOAL = 1.05
CONFIG = GPTConfig(vocab_size=512, context=64, width=256, num_layers=6, num_heads=8)
NUM_MICRO_BATCHES = 8
MICRO_BATCH = 2


def make_step(pipeline: NativePipeline | PipelineExecutor, parameters: list) -> Callable[[], None]:
    """One training step of a pipeline on always the same batch."""
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    num_sequences = NUM_MICRO_BATCHES * MICRO_BATCH
    inputs, targets = make_tokens(num_sequences, CONFIG.context, CONFIG.vocab_size)

    def step() -> None:
        optimizer.zero_grad()
        pipeline.step(inputs, targets)
        optimizer.step()

    return step


def compare(schedule: Schedule, rounds: int) -> Row:
    """One row: `schedule` by us and by torch."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    ours = split_model(GPT(CONFIG), schedule.num_stages)[rank::NUM_RANKS]
    theirs = copy.deepcopy(ours)
    m = schedule.num_micro_batches
    peer = NativePipeline(theirs, schedule.name, m, lm_loss)
    times = paired(
        {
            "ours": make_step(
                PipelineExecutor(ours, schedule, lm_loss), [p for s in ours for p in s.parameters()]
            ),
            "peer": make_step(peer, [p for s in theirs for p in s.parameters()]),
        },
        rounds=rounds,
    )
    return row(f"{schedule.name}, {m} micro-batches, 2 ranks, gloo", times, goal=GOAL)


def measure(quick: bool) -> list[Row]:
    """Every rank runs this."""
    dist.init_process_group("gloo")
    p, m = NUM_RANKS, NUM_MICRO_BATCHES
    schedules = (one_f_one_b(p, m), gpipe(p, m), interleaved(p, m, 2))
    rows = [compare(schedule, 3 if quick else 30) for schedule in schedules]
    dist.barrier()
    dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    write(run_bench(measure, NUM_RANKS, main_arguments(__doc__).quick)[0], "pipeline")
