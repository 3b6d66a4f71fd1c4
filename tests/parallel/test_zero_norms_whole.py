"""Zero3 with some parameters whole on every rank, by choice: norms, as in many courses' FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.launch import run
from minidist.parallel.data import clip_grad_norm
from minidist.parallel.zero import WholeOptimizer, Zero3
from minidist.precision import MasterWeights, MixedPrecisionPolicy

RANKS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.norm1 = nn.RMSNorm(6)
        self.up = nn.Linear(6, 9, bias=False)
        self.norm2 = nn.LayerNorm(9)
        self.head = nn.Linear(9, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.up(self.norm1(self.embedding(tokens)))
        return self.head(self.norm2(x.relu()))

    @property
    def norms(self) -> list[nn.Module]:
        return [self.norm1, self.norm2]

    @property
    def units(self) -> list[nn.Module]:
        return [self.embedding, self.up, self.head]


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 11, (3, 5), generator=generator)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def same_bits() -> list[str]:
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    rank = dist.get_rank()
    alone, model = Net(), Net()
    zero = Zero3(model, units=model.units, whole=model.norms, deterministic=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (alone, model)]
    for step in range(4):
        for r in range(RANKS):
            (loss_of(alone, step, r) / RANKS).backward()
        loss_of(model, step, rank).backward()
        # Norms have their shapes and the same gradients on all ranks; no gradient is missing.
        for name, p in model.named_parameters():
            assert p.grad is not None, (rank, name)
            assert p.grad.shape == p.shape, (rank, name)
        for name in ("norm1.weight", "norm2.weight", "norm2.bias"):
            assert torch.equal(model.get_parameter(name).grad, alone.get_parameter(name).grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    got = zero.full_state_dict()
    return [name for name, value in alone.state_dict().items() if not torch.equal(got[name], value)]


def test_four_ranks_with_whole_norms_train_to_the_bits_of_one_process() -> None:
    assert run(same_bits, RANKS) == [[]] * RANKS


def clipped(folder: Path, ranks: int) -> float:
    """Clipping, accumulation, checkpoints: the largest difference from one process."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone, model = Net().double(), Net().double()
    model.norm1.weight.requires_grad_(False)
    alone.norm1.weight.requires_grad_(False)
    if rank:  # the values of rank 0 count
        for p in model.parameters():
            p.data.zero_()
    zero = Zero3(model, units=[model.up], whole=[*model.norms, model.head.weight])
    assert model.head.weight.shape == (11, 9)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3) for m in (alone, model)]
    for step in range(4):
        for r in range(ranks):
            (loss_of(alone, step, r) / ranks).backward()
            (loss_of(alone, step + 10, r) / ranks).backward()
        with zero.no_sync():
            loss_of(model, step, rank).backward()
        loss_of(model, step + 10, rank).backward()
        wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        assert wanted > 0.1
        if step % 2:
            own = zero.clip_grad_norm_(0.1)
        else:
            own = clip_grad_norm(model.parameters(), 0.1, shard_group=zero.group)
        torch.testing.assert_close(own, wanted)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            zero.save_sharded(folder, optimizers[1])
            model = Net().double()
            model.norm1.weight.requires_grad_(False)
            zero = Zero3(model, units=[model.up], whole=[*model.norms, model.head.weight])
            optimizers[1] = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
            zero.load_sharded(folder, optimizers[1])
    got = zero.full_state_dict()
    state = zero.full_optimizer_state_dict(optimizers[1])["state"]
    assert state[4]["exp_avg"].shape == (9,)
    return max((got[k] - v).abs().max().item() for k, v in alone.state_dict().items())


@pytest.mark.parametrize("ranks", [2, 3])
def test_clipping_accumulation_and_checkpoints(ranks: int, tmp_path: Path) -> None:
    assert max(run(clipped, ranks, tmp_path, ranks)) < 1e-12


def others() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Matrices in 16 bits, norms in 32 bits.
    model = Net()
    seen: list[Any] = []
    for module in (model.up, model.norm2):
        module.register_forward_hook(lambda m, args, out: seen.append((m.weight.dtype, out.dtype)))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    Zero3(model, units=model.units, whole=model.norms, policy=policy)
    loss_of(model, 0, rank).backward()
    assert [dtype for dtype, _ in seen] == [torch.bfloat16, torch.float32]
    assert model.norm2.weight.grad.dtype == torch.float32
    # The norm of the masters counts a whole parameter once.
    alone, model = Net(), Net()
    Zero3(model, units=model.units, whole=model.norms)
    masters = MasterWeights(model.parameters(), lambda some: torch.optim.SGD(some, lr=0.1))
    for r in range(2):
        (loss_of(alone, 0, r) / 2).backward()
    loss_of(model, 0, rank).backward()
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    torch.testing.assert_close(masters.clip_grad_norm_(0.01).float(), wanted)
    # An optimizer for whole parameters, over what is whole and what is cut.
    alone, model = Net().double(), Net().double()
    zero = Zero3(model, units=model.units, whole=[model.up])
    plain = torch.optim.Adafactor(alone.parameters(), lr=0.1)
    sharded = WholeOptimizer(zero, model.parameters(), torch.optim.Adafactor, lr=0.1)
    for r in range(2):
        (loss_of(alone, 0, r) / 2).backward()
    loss_of(model, 0, rank).backward()
    plain.step()
    sharded.step()
    got = zero.full_state_dict()
    assert max((got[k] - v).abs().max() for k, v in alone.state_dict().items()) < 1e-10
    # On the meta device; and what is not of the model.
    with torch.device("meta"):
        model = Net()
    zero = Zero3(model, units=model.units, whole=model.norms)
    assert model.norm2.weight.tolist() == [1.0] * 9
    loss_of(model, 0, rank).backward()
    with pytest.raises(ValueError, match="2 parameters of `whole` are not of the model"):
        Zero3(Net(), whole=[nn.Linear(2, 2)])


def test_precision_masters_whole_optimizers_and_meta_device() -> None:
    run(others, 2)
