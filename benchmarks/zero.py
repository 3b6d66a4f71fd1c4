"""Our ZeRO-3 beside torch's fully_shard: time of a step, and memory beside the formula.

A step is forward and backward of a GPT (6 layers, width 512) on 2 ranks of one thread each, over
gloo, with a unit per block. Both free parameters after forward and prefetch. The optimiser is left
out of the first row: it is the same torch code for both; with it is the second row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import Row, main_arguments, paired, row, run_bench, write

from minidist.data import make_tokens
from minidist.model import GPT, GPTConfig, lm_loss, num_parameters
from minidist.parallel.fsdp import shard_model
from minidist.parallel.zero import (
    ShardedOptimizer,
    Zero2Optimizer,
    Zero3,
    count_bytes,
    formula_bytes,
)

CONTEXT, BATCH = 64, 4


def make(quick: bool) -> GPT:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(
            vocab_size=256,
            context=CONTEXT,
            width=64 if quick else 512,
            num_layers=2 if quick else 6,
            num_heads=8,
        )
    )


def measure_time(quick: bool) -> list[Row]:
    dist.init_process_group("gloo")
    inputs, targets = make_tokens(BATCH, CONTEXT, 256, seed=dist.get_rank())
    models = {"ours": make(quick), "peer": make(quick)}
    Zero3(models["ours"], units=models["ours"].blocks)
    shard_model(models["peer"], lambda m: m.get_submodule("blocks").children())
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        for name, model in models.items()
    }

    def backward(name: str) -> None:
        optimizers[name].zero_grad()
        lm_loss(models[name](inputs), targets).backward()

    def step(name: str) -> None:
        backward(name)
        optimizers[name].step()

    rows = []
    for what, function, goal in (("forward and backward", backward, 1.0), ("step", step, None)):
        times = paired(
            {name: lambda name=name, function=function: function(name) for name in models},
            rounds=3 if quick else 12,
            warmup=3,
        )
        rows.append(row(f"ZeRO-3, {what}", times, goal=goal))
    dist.barrier()
    dist.destroy_process_group()
    return rows


def measure_memory(quick: bool) -> list[Row]:
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    inputs, targets = make_tokens(BATCH, CONTEXT, 256, seed=dist.get_rank())
    rows = []
    for stage in (1, 2, 3):
        model = make(quick).to(torch.float32 if stage == 3 else torch.bfloat16)
        if stage == 3:
            # fp32 shards are the master copies; nothing else is kept between steps.
            Zero3(model, units=model.blocks)
            optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
        elif stage == 2:
            optimizer = Zero2Optimizer(
                model.parameters(), torch.optim.Adam, master_dtype=torch.float32
            )
        else:
            optimizer = ShardedOptimizer(
                model.parameters(), torch.optim.Adam, master_dtype=torch.float32
            )
        lm_loss(model(inputs), targets).backward()
        optimizer.step()
        got = count_bytes(model, optimizer).total
        formula = formula_bytes(num_parameters(make(quick)), world_size, stage).total
        ratio = got / formula
        name = f"ZeRO-{stage}, bytes per rank / formula, {world_size} ranks"
        rows.append(Row(name, got, formula, ratio, ratio, ratio, "bytes", 1.05))
    dist.barrier()
    dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    quick = main_arguments(__doc__).quick
    results = run_bench(measure_time, 2, quick)[0]
    for world_size in (2, 4):
        results += run_bench(measure_memory, world_size, quick)[0]
    write(results, "zero")
