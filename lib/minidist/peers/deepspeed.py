"""A run of `minidist.train` in DeepSpeed: ZeRO over all ranks, or a pipeline on dp x pp ranks.

Example::

    torchrun --nproc-per-node 4 -m minidist.peers.deepspeed --zero 3 --precision bf16
    deepspeed --num_gpus 4 --module minidist.peers.deepspeed --pp 2 --global-batch 32

>>> from minidist.train import TrainConfig
>>> config = deepspeed_config(TrainConfig(zero=2, global_batch=16, micro_batch=2), world_size=4)
>>> config["gradient_accumulation_steps"], config["zero_optimization"]["stage"]
(2, 2)
>>> deepspeed_config(TrainConfig(tp=2), world_size=4)
Traceback (most recent call last):
    ...
ValueError: DeepSpeed recipe: tp 2: its layers are not split here, use dp, pp and zero

Phases: translate the configuration; build model and engine; run the loop with the samples, learning
rates and clipping of `minidist.train`, so that the loss curves are equal except for rounding.

Differences: with bf16 and fp16 DeepSpeed casts the whole model and keeps fp32 copies in the
optimiser, while `minidist.train` runs autocast over fp32 parameters. DeepSpeed numbers the ranks of
a pipeline stage by stage (dp varies fastest), and each stage clips by its own gradient norm, not by
the norm of the whole model.

Papers: ZeRO (arXiv 1910.02054), DeepSpeed pipelines (deepspeed.ai/tutorials/pipeline).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from minidist.data import make_tokens
from minidist.device import choose_backend, choose_device
from minidist.model import GPT, lm_loss
from minidist.sampler import make_loader
from minidist.seeding import seed_all
from minidist.train import TrainConfig, parse_args
from minidist.train.program import endless, learning_rate
from minidist.train.resume import Progress


def deepspeed_config(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize(config=...)`. Needs no DeepSpeed.

    Raises:
        ValueError: the configuration does not fit the ranks (`TrainConfig.check`), or has a setting
            that this recipe cannot translate.
    """
    layout = config.check(world_size)
    for name, why in {
        "tp": "its layers are not split here, use dp, pp and zero",
        "cp": "its sequences are not split here, use dp, pp and zero",
        "virtual_stages": "its pipeline has one chunk per rank",
    }.items():
        if getattr(config, name) > 1:
            raise ValueError(f"DeepSpeed recipe: {name} {getattr(config, name)}: {why}")
    if config.num_experts:
        raise ValueError(
            f"DeepSpeed recipe: num_experts {config.num_experts}: its layers are dense"
        )
    if config.precision == "fp64":
        raise ValueError("DeepSpeed recipe: precision fp64: it has fp32, bf16 and fp16")
    if config.pp > 1 and config.tied:
        raise ValueError(f"DeepSpeed recipe: tied weights on pp {config.pp}: not in this recipe")
    num_micro_batches = layout.num_microbatches(
        global_batch=config.global_batch, micro_batch=config.micro_batch
    )
    return {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": config.max_norm,
        "zero_optimization": {"stage": config.zero},
        "zero_allow_untested_optimizer": True,  # torch's AdamW, as everywhere else in the course
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": {"enabled": config.precision == "fp16"},
    }


def train_deepspeed(config: TrainConfig) -> list[float]:
    """Train, and return the loss of every step: the mean over all tokens of all ranks.

    Collective: every rank of the default process group calls it. Without a process group, every
    rank of torchrun calls it.

    Raises:
        ValueError: as `deepspeed_config`, before DeepSpeed is imported.
        ModuleNotFoundError: DeepSpeed is not installed.
    """
    # Translate.
    is_there = dist.is_initialized()
    world_size = dist.get_world_size() if is_there else int(os.environ.get("WORLD_SIZE", "1"))
    settings = deepspeed_config(config, world_size)
    deepspeed = _import_deepspeed()
    if not is_there:
        dist.init_process_group(choose_backend())
    deepspeed.init_distributed(choose_backend(), auto_mpi_discovery=False)  # uses this group
    # Build: the same weights on every rank, from one seed.
    seed_all(config.seed)
    model: nn.Module = GPT(config.model)
    if config.pp > 1:
        model = deepspeed.pipe.PipelineModule(
            pipeline_layers(model),
            num_stages=config.pp,
            loss_fn=lm_loss,
            partition_method="uniform",
        )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, weight_decay=config.weight_decay
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    # The loop.
    dp = world_size // config.pp
    dp_rank = engine.grid.get_data_parallel_id() if config.pp > 1 else dist.get_rank()
    progress = Progress()
    batches = _batches(config, dp_rank, dp, progress)
    losses = []
    while progress.step < config.steps:
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate(config, progress.step)
        step = _pipeline_step if config.pp > 1 else _zero_step
        losses.append(step(engine, next(batches), config))
        progress.advance(config.global_batch)
    if not is_there:
        dist.barrier()
        dist.destroy_process_group()
    return losses


def pipeline_layers(model: nn.Module) -> list[nn.Module]:
    """A GPT as a list of layers, which a PipelineModule splits into stages."""
    assert isinstance(model, GPT)
    return [_Embedding(model), *model.blocks, _Head(model)]


class _Embedding(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token, self.position = model.token_embedding, model.position_embedding

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.token(tokens_BT) + self.position(positions_T)


class _Head(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(self.norm(x_BTD))


def _zero_step(engine: Any, batch: tuple[Tensor, Tensor], config: TrainConfig) -> float:
    """One step. The engine counts micro-batches: it reduces and updates at the last of the step."""
    pieces = [part.to(engine.device).split(config.micro_batch) for part in batch]
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for tokens_BT, targets_BT in zip(*pieces, strict=True):
        loss = lm_loss(engine(tokens_BT), targets_BT)
        engine.backward(loss)  # divides by the number of micro-batches
        engine.step()
        total += loss.detach().double() / len(pieces[0])
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _pipeline_step(engine: Any, batch: tuple[Tensor, Tensor], config: TrainConfig) -> float:
    pieces = [part.split(config.micro_batch) for part in batch]
    loss = engine.train_batch(data_iter=iter(list(zip(*pieces, strict=True))))
    return float(loss)


def _batches(
    config: TrainConfig, rank: int, world_size: int, progress: Progress
) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples that `minidist.train` gives this data-parallel rank in each step."""
    shape = (config.context, config.vocab_size)
    data = TensorDataset(*make_tokens(config.num_sequences, *shape, seed=config.seed))
    batch = config.global_batch // world_size
    loader = make_loader(
        data, batch, rank=rank, world_size=world_size, seed=config.seed, tail="drop"
    )
    return endless(loader, progress)


def _import_deepspeed() -> Any:
    if choose_device().type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # pyright: ignore[reportMissingImports]
    import deepspeed.pipe  # pyright: ignore[reportMissingImports]

    if choose_device().type == "cpu":
        # DeepSpeed compiles its own shared-memory all-reduce at the first use, which takes minutes.
        # A rank that is stopped during this time leaves a lock behind. gloo does not need it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def main() -> None:
    config = parse_args()
    losses = train_deepspeed(config)
    if os.environ.get("RANK", "0") == "0" and not config.quiet:
        for step, loss in enumerate(losses, 1):
            if step % config.log_every == 0 or step == len(losses):
                print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
