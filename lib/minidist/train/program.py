"""The program: config -> mesh -> model -> shards -> loader -> loop. See `minidist.train`."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from minidist.checkpoint import Checkpoints
from minidist.cost.parallelism import ParallelismConfig
from minidist.data import make_tokens
from minidist.device import choose_backend, choose_device
from minidist.elastic import Preemption
from minidist.lr import lr_at
from minidist.mesh import Mesh, make_mesh
from minidist.model import GPT
from minidist.parallel.expert import make_expert_mesh, use_experts
from minidist.parallel.hybrid import ExpertTrainer, HybridTrainer
from minidist.parallel.recompute import recompute
from minidist.precision import GradScaler
from minidist.sampler import make_loader, set_epoch
from minidist.seeding import seed_all
from minidist.train.config import PRECISIONS, TrainConfig
from minidist.train.report import Report, peak_flops_per_s
from minidist.train.resume import Progress, RunState

OnStep = Callable[[dict[str, Any]], object]


def train(config: TrainConfig, *, on_step: OnStep | None = None) -> list[float]:
    """Train as `config` says; every rank calls it. Returns the loss of every step of this run.

    Uses the ranks of the existing process group; without a process group those of torchrun;
    without torchrun this process alone.

    Args:
        on_step: called on every rank after each step, with the step's metrics.

    Raises:
        ValueError: the configuration does not fit the ranks; on every rank, before any
            communication.
    """
    layout = check_world(config)
    with _process_group() as device:
        # The mesh, the model, and this rank's part of the model.
        mesh = make_mesh(dp=layout.dp, pp=layout.pp, cp=layout.cp, tp=layout.tp)
        trainer = build_trainer(config, layout, mesh, device)
        scaled = PRECISIONS[config.precision][2]
        scaler = GradScaler(enabled=scaled, group=dist.group.WORLD)  # one decision on all ranks
        # The data.
        loader, eval_data = make_data(config, mesh)
        # The step at which the run continues.
        progress = Progress()
        run = make_run_state(config, trainer, scaler, progress)
        keeps_random = run.load() if config.resume else None
        if keeps_random is False:  # different layout: do not reuse the first steps' random numbers
            seed_dropout(config.seed, mesh, progress.step)
        report = make_report(config, layout, mesh, device, progress.step)
        report.say(f"{layout} on {device}, {config.precision}, from step {progress.step}")
        # The loop.
        with contextlib.closing(report), _preemption() as preempted:
            return loop(
                config,
                trainer,
                scaler,
                loader,
                eval_data,
                run,
                report,
                on_step or (lambda record: None),
                preempted,
            )


def loop(
    config: TrainConfig,
    trainer: HybridTrainer,
    scaler: GradScaler,
    loader: DataLoader[Any],
    eval_data: list[tuple[Tensor, Tensor]],
    run: RunState,
    report: Report,
    on_step: OnStep,
    preempted: Callable[[], bool],
) -> list[float]:
    """Run the remaining steps."""
    progress = run.progress
    losses: list[float] = []
    batches = endless(loader, progress)
    while progress.step < config.steps:
        tokens_BT, targets_BT = next(batches)
        # Forward and backward; then average the gradients over ranks, unscale and clip them.
        loss = trainer.forward_backward(tokens_BT, targets_BT, scale=scaler.get_scale())
        trainer.prepare_gradients()
        scaler.unscale_(trainer)
        grad_norm = trainer.clip_grad_norm(config.max_norm)
        # The update; with fp16 all ranks skip it if a gradient on any rank was not finite.
        lr = learning_rate(config, progress.step)
        trainer.set_lr(lr)
        record = {"scale": scaler.get_scale()} if scaler.is_enabled() else {}
        scaler.step(trainer)
        scaler.update()
        progress.advance(config.global_batch)

        losses.append(loss.item())
        record |= {"step": progress.step, "loss": losses[-1], "lr": lr}
        record |= {"grad_norm": grad_norm.item()} | trainer.metrics() | report.speed()
        is_last = progress.step == config.steps
        if config.eval_every and (progress.step % config.eval_every == 0 or is_last):
            record |= evaluate(trainer, eval_data)
        report.step(record)
        on_step(record)
        ends = preempted()
        if ends or is_last or progress.step % config.save_every == 0:
            run.save()
        if ends:
            report.say(f"told to end: saved at step {progress.step}")
            break
        report.restart_clock()
    return losses


def evaluate(trainer: HybridTrainer, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Mean loss per token and perplexity over the whole evaluation set: each sequence once."""
    total, num_tokens = 0.0, 0.0
    for tokens_BT, targets_BT in batches:
        loss_sum, count = trainer.evaluate(tokens_BT, targets_BT)
        total, num_tokens = total + loss_sum, num_tokens + count
    if not num_tokens:
        return {}
    mean = total / num_tokens
    return {"eval_loss": mean, "eval_perplexity": math.exp(min(mean, 700.0))}


# The parts ----------------------------------------------------------------------------------------


def build_trainer(
    config: TrainConfig, layout: ParallelismConfig, mesh: Mesh, device: torch.device
) -> HybridTrainer:
    """Build the same weights on every rank, seed dropout per rank, then keep this rank's part."""
    dtype, compute_dtype, _ = PRECISIONS[config.precision]
    seed_all(config.seed)
    model = GPT(config.model).to(device, dtype)
    make: Callable[..., HybridTrainer] = HybridTrainer
    if config.experts is not None:
        use_experts(model, config.experts, make_expert_mesh(layout.ep))
        weights = {"balance_weight": config.balance_loss, "bias_speed": config.bias_speed}
        make = functools.partial(ExpertTrainer, **weights)
    seed_dropout(config.seed, mesh)
    per_rank = config.global_batch // layout.dp
    trainer = make(
        model,
        mesh,
        layout,
        micro_batch=config.micro_batch,
        num_micro_batches=per_rank // config.micro_batch,
        compute_dtype=compute_dtype,
        lr=config.lr,
        weight_decay=config.weight_decay,
    )
    for stage in trainer.stages if config.recompute else ():
        for block in stage.blocks.values():
            recompute(block)
    return trainer


def seed_dropout(seed: int, mesh: Mesh, step: int = 0) -> None:
    """Seed different dropout masks on every rank, except along tp.

    The ranks of a tp group hold the same activations, so they need the same masks.
    """
    seed_all(seed, "dropout", step, *(mesh.coordinate(axis) for axis in ("dp", "pp", "cp")))


def make_data(
    config: TrainConfig, mesh: Mesh
) -> tuple[DataLoader[Any], list[tuple[Tensor, Tensor]]]:
    """A loader of this dp rank's training batches, and its list of evaluation batches.

    Ranks with the same dp coordinate get the same samples. The tail is dropped, so all dp ranks
    together use the same samples in step k for any number of dp ranks.
    """
    rank, world_size = mesh.coordinate("dp"), mesh.size("dp")
    batch = config.global_batch // world_size
    shape = (config.context, config.vocab_size)
    train_data = TensorDataset(*make_tokens(config.num_sequences, *shape, seed=config.seed))
    loader = make_loader(
        train_data, batch, rank=rank, world_size=world_size, seed=config.seed, tail="drop"
    )
    # Evaluation: all dp ranks run the same number of batches of equal shape, because pipelines and
    # ZeRO-3 need this. Missing sequences are filled with tokens that do not count.
    num = config.num_eval_sequences
    tokens_NT, targets_NT = make_tokens(num, *shape, seed=config.seed + 1)
    missing = -num % config.global_batch
    tokens_NT = torch.cat([tokens_NT, tokens_NT.new_zeros(missing, config.context)])
    targets_NT = torch.cat([targets_NT, targets_NT.new_full((missing, config.context), -100)])
    own = slice(rank, None, world_size)
    batches = list(
        zip(tokens_NT[own].split(batch), targets_NT[own].split(batch), strict=True) if num else []
    )
    return loader, batches


def endless(loader: DataLoader[Any], progress: Progress) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of all epochs in order, without end, starting at `progress`."""
    while True:
        set_epoch(loader, progress.epoch, progress.num_consumed)
        yield from loader
        progress.next_epoch()


def learning_rate(config: TrainConfig, step: int) -> float:
    return lr_at(
        step,
        peak_lr=config.lr,
        final_lr=config.final_lr,
        warmup_steps=config.warmup_steps,
        total_steps=config.steps,
    )


def make_run_state(
    config: TrainConfig, trainer: HybridTrainer, scaler: GradScaler, progress: Progress
) -> RunState:
    checkpoints = None
    if config.out is not None:
        checkpoints = Checkpoints(Path(config.out) / "checkpoints", keep=config.keep)
    names = ("global_batch", "num_sequences", "seed", "precision")
    facts = asdict(config.model) | {name: getattr(config, name) for name in names}
    facts |= asdict(config.experts) if config.experts is not None else {}
    return RunState(checkpoints, trainer, scaler, progress, facts)


def make_report(
    config: TrainConfig,
    layout: ParallelismConfig,
    mesh: Mesh,
    device: torch.device,
    first_step: int,
) -> Report:
    dtype, compute_dtype, _ = PRECISIONS[config.precision]
    peak = peak_flops_per_s(device, compute_dtype or dtype)
    return Report(
        rank=mesh.rank,
        num_steps=config.steps,
        first_step=first_step,
        tokens_per_step=config.global_batch * config.context,
        model=config.sizes,
        peak=None if peak is None else peak * layout.world_size,
        path=None if config.out is None else Path(config.out) / "metrics.jsonl",
        log_every=config.log_every,
        quiet=config.quiet,
    )


def check_world(config: TrainConfig) -> ParallelismConfig:
    """`config.check` with the size of the process group, or without one torchrun's WORLD_SIZE."""
    if dist.is_initialized():
        return config.check(dist.get_world_size())
    return config.check(int(os.environ.get("WORLD_SIZE", "1")))


@contextlib.contextmanager
def _process_group() -> Iterator[torch.device]:
    """Use the existing process group, or make one of torchrun's ranks or of this process alone.

    Yields the device. At the end a process group that was made here is destroyed.
    """
    owns = not dist.is_initialized()
    if owns:
        backend = choose_backend()
        if backend == "nccl":
            torch.cuda.set_device(choose_device())
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield choose_device() if dist.get_backend() == "nccl" else torch.device("cpu")
        if owns:
            dist.barrier()  # no rank leaves while a different rank still needs it
    finally:
        if owns:
            dist.destroy_process_group()


@contextlib.contextmanager
def _preemption() -> Iterator[Callable[[], bool]]:
    """Yields a collective function: whether any rank was told to end (SIGTERM, SIGUSR1)."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread can handle signals
        return
    with Preemption() as preemption:
        yield preemption.requested
