"""Our training loop, DDP and ZeRO-3 beside torch's, with a rank per GPU over NCCL.

Both sides live in the same processes and take turns. What is compared:

    the loop     `minidist.train`, every step of it, and a plain loop with torch's DDP
    DDP          `BucketedDDP` and DistributedDataParallel, forward, backward, step
    ZeRO-3       `Zero3` and `fully_shard`, the same
    memory       of the two, on two ranks at least: model states, and the peak of a step

On one GPU the first three have one rank: no message is sent, and what shows is the cost of hooks,
buckets, gathers and frees. The memory is then that of two ranks that share the GPU, over gloo.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from harness import paired, run_bench
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from gpu.device import choose_world, count_ranks, num_gpus, peak_bytes, start_rank
from gpu.recorder import NotHereError, Recorder, free_memory
from gpu.sizes import Sizes
from minidist import cost
from minidist.elastic import Preemption
from minidist.mesh import make_mesh
from minidist.model import GPT, GPTConfig, lm_loss, num_parameters
from minidist.parallel.data import BucketedDDP, DDPOptions, wrap_ddp
from minidist.parallel.fsdp import shard_model
from minidist.parallel.zero import Zero3, count_bytes, formula_bytes
from minidist.precision import GradScaler
from minidist.profile.paired import end_rank
from minidist.seeding import seed_all
from minidist.train import TrainConfig, build_trainer
from minidist.train.program import (
    endless,
    learning_rate,
    loop,
    make_data,
    make_report,
    make_run_state,
)
from minidist.train.resume import Progress

GOAL = 0.97  # of torch's throughput
DEADLINE_S = 75.0
WEIGHT_DECAY = 0.1

Times = dict[str, list[float]]


def measure(recorder: Recorder, sizes: Sizes) -> None:
    """All rows of the part."""
    backend, n = choose_world(sizes.device)
    if sizes.device == "cuda" and not num_gpus():
        raise NotHereError("needs a CUDA device")
    where = f"{count_ranks(n)} over {backend}"
    for what, fn in (("training loop", time_loops), ("DDP", time_ddp), ("ZeRO-3", time_zero3)):
        name = f"{what}, {where}"
        recorder.measure(name, functools.partial(throughput, recorder, sizes, name, fn, backend, n))
    backend, n = choose_world(sizes.device, at_least=2)
    name = f"ZeRO-3, {count_ranks(n)} over {backend}"
    peaks = [
        recorder.measure(
            f"{name}: memory, {whose}",
            functools.partial(memory, recorder, sizes, name, backend, n, side, whose),
        )
        for side, whose in (("ours", "ours"), ("torch", "torch's"))
    ]
    if peaks[0] and peaks[1]:
        recorder.figure(f"{name}: peak memory, ours / torch's", peaks[0] / peaks[1], "ratio")


def throughput(
    recorder: Recorder,
    sizes: Sizes,
    name: str,
    fn: Callable[[str, Sizes], tuple[Times, list[float]]],
    backend: str,
    n: int,
) -> None:
    """Rows of one comparison: throughput, and whether both sides train alike."""
    times, losses = run_bench(fn, n, backend, sizes, deadline_s=DEADLINE_S)[0]
    # The same work in less time: throughput ours / theirs is time theirs / ours.
    recorder.ratio(f"{name}: throughput, ours / torch's", times, "torch", "ours", at_least=GOAL)
    tokens = n * sizes.train_batch * sizes.train.context
    recorder.rate(f"{name}: ours", times["ours"], tokens, "tokens/s")
    worst = max(losses)
    recorder.check(
        f"{name}: both have the same losses", worst < 0.02, f"they differ by {worst:.3g} relatively"
    )


# --- the training loop ----------------------------------------------------------------------------


def time_loops(backend: str, sizes: Sizes) -> tuple[Times, list[float]]:
    """On every rank: seconds per step; relative differences of the losses of equal steps."""
    device = start_rank(backend, sizes.device)
    n, k = dist.get_world_size(), sizes.steps_per_sample
    model = sizes.train
    config = TrainConfig(
        vocab_size=model.vocab_size,
        context=model.context,
        width=model.width,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        tied=model.tied,
        # Far more steps than will be done: the learning rate has its warm-up all the while.
        steps=100_000,
        lr=3e-4,
        weight_decay=WEIGHT_DECAY,
        precision="bf16",
        eval_every=0,
        global_batch=n * sizes.train_batch,
        micro_batch=sizes.train_batch,
        num_sequences=n * sizes.train_batch * 8,
        num_eval_sequences=0,
        quiet=True,
    )
    sides: dict[str, Callable[[int], list[float]]] = {
        "ours": our_loop(config, device),
        "torch": torch_loop(config, device),
    }
    first = {name: run(4) for name, run in sides.items()}
    times = paired(
        {name: functools.partial(run, k) for name, run in sides.items()},
        rounds=sizes.rounds,
        warmup=1,
        calls=1,
    )
    sides.clear()
    free_memory()
    end_rank()
    return _per_step(times, k), differences(first)


def our_loop(config: TrainConfig, device: torch.device) -> Callable[[int], list[float]]:
    """`minidist.train`, built as its program builds it; call the result for k steps more."""
    layout = config.check(dist.get_world_size())
    mesh = make_mesh(dp=layout.dp, pp=layout.pp, cp=layout.cp, tp=layout.tp)
    trainer = build_trainer(config, layout, mesh, device)
    scaler = GradScaler(enabled=False, group=dist.group.WORLD)
    loader, eval_data = make_data(config, mesh)
    progress = Progress()
    run = make_run_state(config, trainer, scaler, progress)
    report = make_report(config, layout, mesh, device, 0)

    def steps(k: int) -> list[float]:
        # It ends as when the job is told to end, after k steps; it looks for that every step.
        ends = iter([False] * (k - 1) + [True])
        with Preemption() as preemption:
            return loop(
                config,
                trainer,
                scaler,
                loader,
                eval_data,
                run,
                report,
                lambda record: None,
                lambda: preemption.requested() or next(ends),
            )

    return steps


def torch_loop(config: TrainConfig, device: torch.device) -> Callable[[int], list[float]]:
    """The same run by hand: DDP where there is more than one rank, autocast, clipping, AdamW."""
    mesh = make_mesh(dp=dist.get_world_size())
    seed_all(config.seed)
    model: nn.Module = GPT(config.model).to(device)
    if dist.get_world_size() > 1:
        model = wrap_ddp(model, DDPOptions(gradient_as_bucket_view=True))
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=config.weight_decay)
    progress = Progress()
    batches = endless(make_data(config, mesh)[0], progress)

    def steps(k: int) -> list[float]:
        losses = []
        for _ in range(k):
            inputs_BT, targets_BT = (x.to(device) for x in next(batches))
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = lm_loss(model(inputs_BT), targets_BT)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, progress.step)
            optimizer.step()
            progress.advance(config.global_batch)
            # The loop that it is compared with reports loss and norm of every step, too.
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
            norm.item()
        return losses

    return steps


# --- one step, wrapped in two ways ----------------------------------------------------------------


def time_ddp(backend: str, sizes: Sizes) -> tuple[Times, list[float]]:
    """On every rank: seconds per step under either DDP; differences of the first losses."""
    device = start_rank(backend, sizes.device)
    return time_steps(
        sizes,
        device,
        {
            "ours": lambda model: BucketedDDP(model, gradient_as_bucket_view=True),
            "torch": lambda model: wrap_ddp(model, DDPOptions(gradient_as_bucket_view=True)),
        },
    )


def time_zero3(backend: str, sizes: Sizes) -> tuple[Times, list[float]]:
    """On every rank: seconds per step under either ZeRO-3; differences of the first losses."""
    device = start_rank(backend, sizes.device)
    shards = {name: functools.partial(shard, name, device=device) for name in ("ours", "torch")}
    return time_steps(sizes, device, shards, autocast=False)


def shard(side: str, model: GPT, *, device: torch.device) -> nn.Module:
    """A model in shards, per block: bf16 to compute in, fp32 to keep and to reduce."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if side == "ours":
        Zero3(model, units=model.blocks, policy=policy)
        return model
    # An explicit mesh: with gloo it would be one of CPUs.
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    return shard_model(model, lambda m: m.blocks, policy=policy, mesh=mesh)  # pyright: ignore


def time_steps(
    sizes: Sizes,
    device: torch.device,
    wrap: Mapping[str, Callable[[GPT], nn.Module]],
    *,
    autocast: bool = True,
) -> tuple[Times, list[float]]:
    """Collective: forward, backward and AdamW of models that are wrapped in different ways.

    Args:
        wrap: name -> what makes a model of one; each gets its own, with the same weights.
        autocast: False where what wraps it sees to the dtypes.
    """
    sides = {}
    for name, wrapped in wrap.items():
        sides[name] = make_step(wrapped(make_model(sizes.train, device)), sizes, device, autocast)
    first = {name: [step().item() for _ in range(3)] for name, step in sides.items()}
    times = paired(sides, rounds=sizes.rounds, warmup=2, calls=1)
    # A DDP must be gone before its process group.
    sides.clear()
    free_memory()
    end_rank()
    return times, differences(first)


def make_model(config: GPTConfig, device: torch.device) -> GPT:
    """The same weights for all who call it."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(config)


def make_step(
    model: nn.Module, sizes: Sizes, device: torch.device, autocast: bool
) -> Callable[[], Tensor]:
    """Forward, backward and AdamW of a model, on this rank's tokens; the step returns its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=WEIGHT_DECAY)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (sizes.train_batch, sizes.train.context + 1)
    tokens_BT = torch.randint(sizes.train.vocab_size, shape, generator=generator).to(device)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = lm_loss(model(tokens_BT[:, :-1]), tokens_BT[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def differences(losses: Mapping[str, list[float]]) -> list[float]:
    """Relative, step by step; infinite where a loss is no number."""
    pairs = zip(losses["ours"], losses["torch"], strict=True)
    found = [abs(a - b) / abs(b) for a, b in pairs]
    return [each if math.isfinite(each) else math.inf for each in found]


def _per_step(times: Times, k: int) -> Times:
    return {name: [each / k for each in seconds] for name, seconds in times.items()}


# --- memory ---------------------------------------------------------------------------------------


def memory(
    recorder: Recorder, sizes: Sizes, name: str, backend: str, n: int, side: str, whose: str
) -> int | None:
    """Bytes of model states on the fullest rank beside ZeRO's formula, and the peak of a step.

    Returns:
        The peak of the fullest rank; None on a CPU.
    """
    found = run_bench(count_memory, n, backend, sizes, side, deadline_s=DEADLINE_S)
    states, formula = max(each["states"] for each in found), found[0]["formula"]
    recorder.figure(
        f"{name}: model states / formula, {whose}",
        states / formula,
        "ratio",
        at_most=1.05,
        states_bytes=states,
        formula_bytes=formula,
    )
    if any(each["peak"] is None for each in found):
        recorder.skip(f"{name}: peak memory of a step, {whose}", "needs a CUDA device")
        return None
    peak, predicted = max(each["peak"] for each in found), predict(sizes, n)
    recorder.figure(
        f"{name}: peak memory of a step, {whose}",
        peak,
        "bytes",
        cost_model_bytes=predicted,
        measured_over_cost_model=peak / predicted,
    )
    return peak


def count_memory(backend: str, sizes: Sizes, side: str) -> dict[str, Any]:
    """On every rank: bytes of the model states after a step, ZeRO's formula, the peak of a step."""
    device = start_rank(backend, sizes.device)
    n = dist.get_world_size()
    sizes = replace(sizes, train=sizes.memory_gpt)
    plain = make_model(sizes.train, device)
    count = num_parameters(plain)
    model = shard(side, plain, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens_BT = torch.randint(
        sizes.train.vocab_size, (sizes.train_batch, sizes.train.context + 1), device=device
    )

    def step() -> None:
        optimizer.zero_grad()
        lm_loss(model(tokens_BT[:, :-1]), tokens_BT[:, 1:]).backward()
        optimizer.step()

    for _ in range(2):
        step()
    # With gradients and states there, and nothing gathered.
    states = count_bytes(model, optimizer).total
    try:
        peak: int | None = peak_bytes(step, device)
    except NotHereError:
        peak = None
    formula = formula_bytes(count, n, 3, param_bytes=4, grad_bytes=4, state_bytes=8).total
    end_rank()
    return {"states": states, "formula": formula, "peak": peak}


def predict(sizes: Sizes, n: int) -> float:
    """Bytes per rank by the cost model, the CUDA context left out as in the measured figure."""
    return cost.memory_per_gpu(
        model=cost.Transformer.from_config(sizes.memory_gpt),
        parallelism=cost.ParallelismConfig(dp=n, zero_stage=3),
        micro_batch=sizes.train_batch,
        states=cost.state_bytes(precision="fp32"),
        fused_attention=True,
        framework_bytes=0,
    ).total
