"""Collectives of minidist beside gloo's and beside memcpy: 2 ranks, 1 thread each.

`python benchmarks/collectives.py [--quick]` prints the table, writes build/bench/collectives.json.

Every tensor is written by its own rank before each call, untimed, as backward writes gradients.
Without that an in-place all-reduce would find each slice in the cache of the rank that reduced it
the time before, and look better than it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Row, main_arguments, paired, row, run_bench, write

import minidist.collectives as collectives
from minidist.collectives.shared import SharedMemoryGroup
from minidist.device import reduce_scatter_single

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
NUM_RANKS = 2
# From send and receive up, all with the signature (tensor, ...) and in place.
FROM_SCRATCH = ("ring_all_reduce", "tree_all_reduce", "halving_doubling_all_reduce")


def measure(quick: bool) -> list[Row]:
    """Runs on every rank; the rows are the same on all."""
    dist.init_process_group("gloo")
    shared = SharedMemoryGroup()
    rows: list[Row] = []
    for num_bytes in SIZES:
        rounds = 3 if quick else max(9, min(40, 256 * MIB // num_bytes))
        rows += all_reduce_rows(shared, num_bytes, rounds)
        rows += reduce_scatter_rows(shared, num_bytes, rounds)
    for num_bytes in (64 * KIB, 4 * MIB):
        rows += from_scratch_rows(shared, num_bytes, 3 if quick else 20)
    dist.barrier()
    shared.close()
    dist.destroy_process_group()
    return rows


def all_reduce_rows(shared: SharedMemoryGroup, num_bytes: int, rounds: int) -> list[Row]:
    numel, size = num_bytes // 4, name_size(num_bytes)
    in_place, copied, gloo = shared.buffer(numel), torch.zeros(numel), torch.zeros(numel)
    source, target = torch.zeros(numel), torch.zeros(numel)
    times = paired(
        {
            "in place": lambda: shared.all_reduce(in_place),
            "copied": lambda: shared.all_reduce(copied),
            "gloo": lambda: dist.all_reduce(gloo),
            "memcpy": lambda: target.copy_(source),
        },
        rounds=rounds,
        before={
            "in place": in_place.zero_,
            "copied": copied.zero_,
            "gloo": gloo.zero_,
            "memcpy": source.zero_,
        },
        barrier=shared.barrier,
    )
    goal = None
    if 64 * KIB <= num_bytes <= 4 * MIB:
        goal = 1 / 5
    elif num_bytes == 64 * MIB:
        goal = 1 / 4
    # Against memcpy the price of two barriers only fades as tensors grow.
    memcpy_goal = 2.7 if num_bytes >= MIB else None
    return [
        row(f"all-reduce shared, in place / gloo, {size}", times, "in place", "gloo", goal=goal),
        row(f"all-reduce shared, copied / gloo, {size}", times, "copied", "gloo"),
        row(
            f"all-reduce shared, in place / memcpy, {size}",
            times,
            "in place",
            "memcpy",
            goal=memcpy_goal,
        ),
    ]


def reduce_scatter_rows(shared: SharedMemoryGroup, num_bytes: int, rounds: int) -> list[Row]:
    numel, size = num_bytes // 4, name_size(num_bytes)
    in_place, input = shared.buffer(numel), torch.zeros(numel)
    output = torch.zeros(numel // NUM_RANKS)
    times = paired(
        {
            "in place": lambda: shared.reduce_scatter(output, in_place),
            "copied": lambda: shared.reduce_scatter(output, input),
            "messages": lambda: collectives.direct_reduce_scatter(output, input),
            "gloo": lambda: reduce_scatter_single(output, input),
        },
        rounds=rounds,
        before={"in place": in_place.zero_}
        | dict.fromkeys(("copied", "messages", "gloo"), input.zero_),
        barrier=shared.barrier,
    )
    goals = {"in place": 1 / 5, "copied": None, "messages": 1 / 2.4}
    names = {"in place": "shared, in place", "copied": "shared, copied", "messages": "direct"}
    return [
        row(f"reduce-scatter {names[how]} / gloo, {size}", times, how, "gloo", goal=goals[how])
        for how in names
    ]


def from_scratch_rows(shared: SharedMemoryGroup, num_bytes: int, rounds: int) -> list[Row]:
    tensor = torch.zeros(num_bytes // 4)
    functions: dict[str, Callable[[], Any]] = {"gloo": lambda: dist.all_reduce(tensor)}
    for name in FROM_SCRATCH:
        function = getattr(collectives, name, None)
        if function is not None:
            functions[name] = lambda function=function: function(tensor)
    times = paired(
        functions,
        rounds=rounds,
        before=dict.fromkeys(functions, tensor.zero_),
        barrier=shared.barrier,
    )
    return [
        row(f"{name} / gloo, {name_size(num_bytes)}", times, name, "gloo")
        for name in functions
        if name != "gloo"
    ]


def name_size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


if __name__ == "__main__":
    write(run_bench(measure, NUM_RANKS, main_arguments(__doc__).quick)[0], "collectives")
