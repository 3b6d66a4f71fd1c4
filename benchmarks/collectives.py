"""Collectives of minidist beside gloo's: 2 ranks, 1 thread each.

`python benchmarks/collectives.py [--quick]` prints the table, writes build/bench/collectives.json.

Every tensor is written by its own rank before each call, untimed, as backward writes gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Row, main_arguments, paired, row, run_bench, write

import minidist.collectives as collectives
from minidist.device import reduce_scatter_single

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
NUM_RANKS = 2
# From send and receive up, all with the signature (tensor, ...) and in place.
FROM_SCRATCH = ("ring_all_reduce", "tree_all_reduce", "halving_doubling_all_reduce")


def measure(quick: bool) -> list[Row]:
    """Runs on every rank; the rows are the same on all."""
    dist.init_process_group("gloo")
    rows: list[Row] = []
    for num_bytes in SIZES:
        rows += reduce_scatter_rows(
            num_bytes, 3 if quick else max(9, min(40, 256 * MIB // num_bytes))
        )
    for num_bytes in (64 * KIB, 4 * MIB):
        rows += from_scratch_rows(num_bytes, 3 if quick else 20)
    dist.barrier()
    dist.destroy_process_group()
    return rows


def reduce_scatter_rows(num_bytes: int, rounds: int) -> list[Row]:
    numel = num_bytes // 4
    input, output = torch.zeros(numel), torch.zeros(numel // NUM_RANKS)
    times = paired(
        {
            "direct": lambda: collectives.direct_reduce_scatter(output, input),
            "gloo": lambda: reduce_scatter_single(output, input),
        },
        rounds=rounds,
        before=dict.fromkeys(("direct", "gloo"), input.zero_),
    )
    title = f"reduce-scatter direct / gloo, {name_size(num_bytes)}"
    return [row(title, times, "direct", "gloo", goal=1 / 2.4)]


def from_scratch_rows(num_bytes: int, rounds: int) -> list[Row]:
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
