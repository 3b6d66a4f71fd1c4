"""A training step under each form of data parallelism, beside torch's DDP.

6-layer GPT of width 512, 2 ranks of one thread: forward, backward with gradient reduction. No
optimizer: it would be the same for all. With few samples per rank communication is a large part of
the step, with many a small one; the row "no reduction" shows what a free one would leave.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from harness import Row, main_arguments, paired, row, run_bench, write
from torch import nn

from minidist.model import GPT, GPTConfig, lm_loss
from minidist.parallel.data import (
    BucketedDDP,
    OverlappedDDP,
    average_gradients,
    average_gradients_flat,
)

BATCHES = (1, 4)
FULL = GPTConfig(vocab_size=1024, context=128, width=512, num_layers=6, num_heads=8)
QUICK = GPTConfig(vocab_size=256, context=32, width=128, num_layers=2, num_heads=4)
GOALS = {"bucketed": 1.05}
# The peer has the same options: torch's DDP copies gradients into buckets unless told otherwise.
PEERS = dict.fromkeys((*GOALS, "no reduction"), "torch DDP, views")


def measure(quick: bool) -> list[Row]:
    """On every rank: the steps, timed in turn."""
    dist.init_process_group("gloo")
    config = QUICK if quick else FULL
    rows = [
        row
        for batch in BATCHES
        for row in rows_for(config, batch, rounds=3 if quick else 48 // batch)
    ]
    dist.barrier()
    dist.destroy_process_group()
    return rows


def rows_for(config: GPTConfig, batch: int, rounds: int) -> list[Row]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens_BT = torch.randint(
        0, config.vocab_size, (batch, config.context + 1), generator=generator
    )

    def step(call: nn.Module, after: Any = None) -> None:
        call.zero_grad(set_to_none=True)
        lm_loss(call(tokens_BT[:, :-1]), tokens_BT[:, 1:]).backward()
        if after is not None:
            after()

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(config)

    naive, flat, overlapped = model(), model(), OverlappedDDP(model())
    forms = {
        "no reduction": functools.partial(step, model()),
        "torch DDP": functools.partial(step, nn.parallel.DistributedDataParallel(model())),
        "torch DDP, views": functools.partial(
            step,
            nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True),
        ),
        "naive": functools.partial(step, naive, lambda: average_gradients(naive)),
        "flat": functools.partial(step, flat, lambda: average_gradients_flat(flat)),
        "overlapped": functools.partial(step, overlapped, overlapped.finish),
        "bucketed": functools.partial(step, BucketedDDP(model(), gradient_as_bucket_view=True)),
    }
    times = paired(forms, rounds=rounds, warmup=3)
    rows = []
    for name in forms:
        peer = PEERS.get(name, "torch DDP")
        if name not in ("torch DDP", peer):
            title = f"step, batch {batch}, {name} / {peer}"
            rows.append(row(title, times, name, peer, goal=GOALS.get(name)))
    return rows


if __name__ == "__main__":
    write(run_bench(measure, 2, main_arguments(__doc__).quick)[0], "data_parallel")
