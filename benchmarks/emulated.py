"""Schedules in virtual time, beside the best that is possible: exact, whatever the machine does.

Ten equal layers; forward takes 10 ms and backward 20 ms on each, their cost is charged and not
measured. The step in steady state is the difference between runs of one step more. The best
schedule hides everything that can be hidden: it computes without a gap, and before or after it is
only what has nothing to hide behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from harness import Row, main_arguments, write
from torch import nn

from minidist import emulate
from minidist.cost.comm import collective_seconds
from minidist.emulate import Charged, ChargePlan, Cluster, Link, clusters
from minidist.parallel.data import BucketedDDP
from minidist.parallel.pipeline import PipelineExecutor, one_f_one_b
from minidist.parallel.pipeline.p2p import TensorSpec
from minidist.parallel.zero import Zero3

DEPTH, WIDTH = 10, 40
FORWARD_S, BACKWARD_S = 0.010, 0.020
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
COMPUTE_S = DEPTH * (FORWARD_S + BACKWARD_S)
LINK = Link(bandwidth_bytes_per_s=LAYER_BYTES / 0.008, latency_s=1e-6)
NUM_MICRO_BATCHES = 16


def cluster(num_ranks: int) -> Cluster:
    return replace(clusters.laptop(num_ranks), intra_node=LINK, inter_node=LINK)


def layers() -> list[Charged]:
    torch.manual_seed(0)
    return [Charged(nn.Linear(WIDTH, WIDTH), i) for i in range(DEPTH)]


def train_ddp(steps: int) -> None:
    ddp = BucketedDDP(nn.Sequential(*layers()), bucket_bytes=LAYER_BYTES)
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.ones(2, WIDTH)).sum().backward()


def train_torch_ddp(steps: int) -> None:
    model = nn.Sequential(*layers())
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=LAYER_BYTES / 2**20)
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.ones(2, WIDTH)).sum().backward()


def train_zero3(steps: int) -> None:
    units = layers()
    model = nn.Sequential(*units)
    Zero3(model, units=units)
    x = torch.ones(2, WIDTH, requires_grad=True)
    for _ in range(steps):
        model(x).sum().backward()


def train_fully_shard(steps: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*layers())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(2, WIDTH, requires_grad=True)
    for _ in range(steps):
        model(x).sum().backward()


def train_pipeline(steps: int) -> None:
    import torch.distributed as dist

    rank, num_ranks, m = dist.get_rank(), dist.get_world_size(), NUM_MICRO_BATCHES
    pipeline = PipelineExecutor(
        Charged(nn.Linear(8, 8), rank),
        one_f_one_b(num_ranks, m),
        nn.functional.mse_loss,
        specs=[TensorSpec((1, 8), torch.float32)] * num_ranks,
    )
    for _ in range(steps):
        pipeline.step(torch.ones(m, 8), torch.zeros(m, 8))


def step_seconds(train: Callable[[int], None], num_ranks: int, plan: ChargePlan) -> float:
    """Virtual seconds of one step more."""
    ends: list[Any] = [
        emulate.run(train, num_ranks, cluster(num_ranks), steps, plan=plan)[1].makespan_s
        for steps in (3, 4)
    ]
    return ends[1] - ends[0]


def exact(name: str, ours: float, peer: float, goal: float | None = 1.01) -> Row:
    ratio = ours / peer
    return Row(f"{name}, emulated", ours, peer, ratio, ratio, ratio, goal=goal)


def measure() -> list[Row]:
    plan = ChargePlan((FORWARD_S,) * DEPTH, (BACKWARD_S,) * DEPTH, secret=b"benchmark")
    rows = []
    for n in (2, 4):
        reduce_s = collective_seconds(
            kind="all_reduce", num_bytes=LAYER_BYTES, num_ranks=n, link=LINK
        )
        gather_s = collective_seconds(
            kind="all_gather", num_bytes=LAYER_BYTES, num_ranks=n, link=LINK
        )
        scatter_s = collective_seconds(
            kind="reduce_scatter", num_bytes=LAYER_BYTES, num_ranks=n, link=LINK
        )
        # Nothing can compute before the first all-gather; the last gradients come last.
        ddp_s, zero3_s = step_seconds(train_ddp, n, plan), step_seconds(train_zero3, n, plan)
        rows += [
            exact(f"bucketed DDP / best, {n} ranks", ddp_s, COMPUTE_S + reduce_s),
            exact(
                f"bucketed DDP / torch DDP, {n} ranks",
                ddp_s,
                step_seconds(train_torch_ddp, n, plan),
                goal=None,
            ),
            exact(f"ZeRO-3 / best, {n} ranks", zero3_s, gather_s + COMPUTE_S + scatter_s),
            exact(
                f"ZeRO-3 / fully_shard, {n} ranks",
                zero3_s,
                step_seconds(train_fully_shard, n, plan),
                goal=None,
            ),
        ]
        stages = ChargePlan((FORWARD_S,) * n, (BACKWARD_S,) * n, secret=b"benchmark")
        # m micro-batches, and the p - 1 that fill and empty the pipeline; then messages: one each
        # way per stage that nothing hides.
        compute_s = (NUM_MICRO_BATCHES + n - 1) * (FORWARD_S + BACKWARD_S)
        rows.append(
            exact(f"1F1B / theory, {n} ranks", step_seconds(train_pipeline, n, stages), compute_s)
        )
    return rows


if __name__ == "__main__":
    main_arguments(__doc__)
    write(measure(), "emulated")
