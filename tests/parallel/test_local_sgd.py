"""Local SGD against a simulation of all ranks in one process, and against DDP where they agree."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidist.data import make_regression
from minidist.launch import run
from minidist.parallel.data import BucketedDDP
from minidist.parallel.local_sgd import LocalSGD, average_tensors, torch_local_sgd

STEPS = 12
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3)
    ).double()


def data(rank: int, step: int):
    x, y = make_regression(8, 6, 3, seed=100 * rank + step)
    return x.double(), y.double()


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def simulate(name, n, period, start_step, average_state=(), shift=0):
    """Every rank's model in this process: the parameters at the end, and the losses.

    The replicas meet at the end of each period, or `shift` steps later.
    """
    models = [make_model() for _ in range(n)]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    losses = [[] for _ in range(n)]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            x, y = data(rank, step)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            losses[rank].append(loss.item())
        if step < start_step:
            for same in zip(*[model.parameters() for model in models], strict=True):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step >= start_step and (step - start_step + 1 - shift) % period == 0:
            for same in zip(*[model.parameters() for model in models], strict=True):
                mean = torch.stack([p.detach() for p in same]).mean(0)
                for p in same:
                    p.data.copy_(mean)
                for key in average_state:
                    states = [o.state[p][key] for o, p in zip(optimizers, same, strict=True)]
                    mean = torch.stack(states).mean(0)
                    for state in states:
                        state.copy_(mean)
            for same in zip(*[model.buffers() for model in models], strict=True):
                if same[0].is_floating_point():
                    mean = torch.stack(same).mean(0)
                    for buffer in same:
                        buffer.copy_(mean)
    return [vector(model) for model in models], losses


CASES = [
    ("sgd", 1, 0, ()),
    ("sgd", 4, 0, ()),
    ("momentum", 3, 3, ("momentum_buffer",)),
    ("momentum", 5, 2, ()),
    ("adam", 4, 4, ("exp_avg", "exp_avg_sq")),
    ("adam", 1, 0, ()),
]


def train_local():
    dist.init_process_group("gloo")
    results = body()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    return results


def train_as_torch_does(rank):
    """torch's own meets after its first local step: one step later than ours."""
    model = make_model()
    ddp, optimizer = torch_local_sgd(model, OPTIMIZERS["sgd"](model.parameters()), 3, start_step=4)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = data(rank, step)
        F.mse_loss(ddp(x), y).backward()
        optimizer.step()
    return vector(model)


def body():
    rank, n = dist.get_rank(), dist.get_world_size()
    results = []
    for name, period, start_step, average_state in CASES:
        model = make_model()
        if rank > 0:  # replicas are made equal
            nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
        optimizer = OPTIMIZERS[name](model.parameters())
        local = LocalSGD(
            model, optimizer, period, start_step=start_step, average_state=average_state
        )
        losses = []
        for step in range(STEPS):
            if step == 7:  # resumed in the middle of a period
                saved = local.state_dict()
                sent = local.sent_bytes, local._gradient_bytes
                local = LocalSGD.__new__(LocalSGD)
                local.__dict__.update(
                    module=model,
                    optimizer=optimizer,
                    period=period,
                    start_step=start_step,
                    average_state=average_state,
                    group=None,
                    sent_bytes=sent[0],
                    _gradient_bytes=sent[1],
                )
                local.load_state_dict(copy.deepcopy(saved))
            optimizer.zero_grad()
            x, y = data(rank, step)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            local.step()
            losses.append(loss.item())
        results.append((vector(model), losses, local.sent_bytes, local.saved_bytes))

    # With DDP: equal to period 1 for linear optimisers, not for Adam.
    ddps = {}
    for name in OPTIMIZERS:
        model = make_model()
        ddp = DistributedDataParallel(model, broadcast_buffers=False)
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = data(rank, step)
            F.mse_loss(ddp(x), y).backward()
            optimizer.step()
        every_step = make_model()
        optimizer = OPTIMIZERS[name](every_step.parameters())
        local = LocalSGD(every_step, optimizer, 1)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = data(rank, step)
            F.mse_loss(every_step(x), y).backward()
            local.step()
        ddps[name] = (vector(model) - vector(every_step)).abs().max().item()

    ddp = DistributedDataParallel(make_model())
    native = train_as_torch_does(rank)
    # Tensors of several dtypes; bf16 is averaged in fp32.
    mixed = [torch.tensor([1.0 + rank]), torch.tensor([256.0 + rank]).bfloat16(), torch.empty(0)]
    average_tensors(mixed)
    assert mixed[0].item() == 1 + (n - 1) / 2
    exact = torch.tensor([256.0 + rank]).bfloat16().float()
    dist.all_reduce(exact)
    assert mixed[1].float().item() == (exact / n).bfloat16().float().item()

    # Wrong use.
    plain = make_model()
    optimizer = OPTIMIZERS["momentum"](plain.parameters())
    for bad, text in [
        (lambda: LocalSGD(plain, optimizer, 0), "at least 1"),
        (lambda: LocalSGD(plain, optimizer, 1, start_step=-1), "at least 0"),
        (lambda: LocalSGD(ddp, optimizer, 1), "plain module, got DistributedDataParallel"),
        (lambda: LocalSGD(BucketedDDP(plain), optimizer, 1), "plain module, got BucketedDDP"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad()
    typo = LocalSGD(plain, optimizer, 1, average_state=("momentum",))
    x, y = data(rank, 0)
    F.mse_loss(plain(x), y).backward()
    with pytest.raises(ValueError, match="momentum_buffer"):
        typo.step()
    return results, ddps, native


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_local_sgd_is_what_its_definition_says(world_size):
    every_rank = run(train_local, world_size)
    size = vector(make_model()).numel() * 8
    floats = size + 2 * 10 * 8  # with the running statistics of the batch norm
    for number, (name, period, start_step, average_state) in enumerate(CASES):
        expected, losses = simulate(name, world_size, period, start_step, average_state)
        for rank in range(world_size):
            got, got_losses, sent, saved = every_rank[rank][0][number]
            torch.testing.assert_close(got, expected[rank], rtol=1e-9, atol=1e-12)
            assert got_losses == pytest.approx(losses[rank], rel=1e-9)
            # Bytes: gradients at first, then parameters (and state) at each meeting.
            meetings = (STEPS - start_step) // period
            share = 2 * (world_size - 1)
            one = share * (floats + size * len(average_state)) // world_size
            assert sent == start_step * (share * size // world_size) + meetings * one
            assert saved == STEPS * (share * size // world_size) - sent
    expected, _ = simulate("sgd", world_size, 3, 4, shift=1)
    for rank in range(world_size):
        torch.testing.assert_close(every_rank[rank][2], expected[rank], rtol=1e-9, atol=1e-12)
    if world_size > 1:
        difference = every_rank[0][1]
        assert difference["sgd"] < 1e-12
        assert difference["momentum"] < 1e-12
        assert difference["adam"] > 1e-4
        # Between two meetings the replicas differ.
        apart, _ = simulate("momentum", world_size, 5, 1)
        assert (apart[0] - apart[-1]).abs().max() > 1e-3
