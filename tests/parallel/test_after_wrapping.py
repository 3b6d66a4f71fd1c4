"""ZeRO: what changes after wrapping works or is refused at its first use, by all ranks."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from minidist.errors import MismatchError
from minidist.launch import run
from minidist.parallel.data import (
    BucketedDDP,
    OverlappedDDP,
    average_gradients,
    average_gradients_flat,
)
from minidist.parallel.fsdp import no_sync, shard_model
from minidist.parallel.local_sgd import LocalSGD
from minidist.parallel.zero import ShardedOptimizer, Zero2Optimizer, Zero3
from minidist.parallel.zero.elementwise import why_not_elementwise, why_not_per_parameter
from minidist.precision import MasterWeights
from minidist.profile.memory import MemoryTracker

WORLDS = [1, 2, 3, 4]
STEPS = 3


def make() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1)).double()


def data(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(5, 4, generator=generator, dtype=torch.float64)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, eps=1e-3)


# -------------------------------------------------------- before, between and after: what works


def zero1(net: nn.Module, **options: Any) -> Any:
    return ShardedOptimizer(
        net.parameters(), adam_like, average_gradients=True, bucket_bytes=200, **options
    )


def zero2(net: nn.Module, **options: Any) -> Any:
    return Zero2Optimizer(net.parameters(), adam_like, bucket_bytes=200, **options)


adam_like = partial(torch.optim.AdamW, lr=0.1, eps=1e-3)


def optimizer_first(net):
    optimizer = adam(net.parameters())
    return optimizer, Zero3(net, [net[0], net[2]])


def after_a_forward(net):
    zero = Zero3(net, [net[0]])
    net(data(0, 9)).sum()
    return adam(net.parameters()), zero


def after_two_forwards(net):
    zero = Zero3(net, [net[0], net[3]], reshard_after_forward=False)
    for _ in range(2):
        net(data(0, 9)).sum()
    return adam(net.parameters()), zero


def after_an_old_graph(net):
    kept = net(data(0, 9)).sum()
    zero = Zero3(net, [net[2]])
    net.kept = [kept]
    return adam(net.parameters()), zero


def inside_unsharded(net):
    zero = Zero3(net, [net[0]])
    with zero.unsharded():
        assert [p.dim() for p in net.parameters()] == [2, 1, 2, 1, 2, 1]
        net(data(0, 9))
    return adam(net.parameters()), zero


def masters_of_pieces(net):
    zero = Zero3(net, [net[0]])
    return MasterWeights(net.parameters(), adam), zero


def reentrant(net):
    """A unit in two reentrant checkpoints."""
    net.forward = lambda x: _checkpointed(net, x)
    return adam_after(net)


def adam_after(net):
    zero = Zero3(net, [net[0], net[2]])
    return adam(net.parameters()), zero


def _checkpointed(net, x):
    for layer in net:
        x = checkpoint(layer, x.requires_grad_(), use_reentrant=True)
    return x


def loaded(kind):
    """Other values after the optimizer was made, in place and in other memory."""

    def wrap(net):
        other = make()
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1.5)
        with torch.no_grad():
            for p in net.parameters():
                p.div_(1.5)
        optimizer = kind(net)
        net.load_state_dict(other.state_dict())
        for p in net.parameters():
            p.data = (p.data / 1.5).clone()
        return optimizer, None

    return wrap


def unfrozen(kind):
    def wrap(net):
        net[2].requires_grad_(False)
        optimizer = kind(net)
        net[2].requires_grad_(True)
        return optimizer, None

    return wrap


def added_group(kind):
    def wrap(net):
        late = nn.ModuleList([net[2], net[3]])
        optimizer = kind(nn.ModuleList([net[0]]))
        optimizer.add_param_group({"params": list(late.parameters())})
        return optimizer, None

    return wrap


WAYS = {
    fn.__name__: fn
    for fn in (
        optimizer_first,
        after_a_forward,
        after_two_forwards,
        after_an_old_graph,
        inside_unsharded,
        masters_of_pieces,
        reentrant,
        adam_after,
    )
}
for _kind in (zero1, zero2):
    for _way in (loaded, unfrozen, added_group):
        WAYS[f"{_kind.__name__}, {_way.__name__}"] = _way(_kind)
    WAYS[f"{_kind.__name__}, masters, loaded"] = loaded(
        partial(_kind, master_dtype=torch.float32 if _kind is zero1 else torch.float64)
    )


def ranks():
    dist.init_process_group("gloo")
    found = {}
    for name, wrap in WAYS.items():
        net = make()
        optimizer, zero = wrap(net)
        for step in range(STEPS):
            optimizer.zero_grad()
            net(data(dist.get_rank(), step)).square().mean().backward()
            optimizer.step()
        values = zero.full_state_dict() if zero else net.state_dict()
        found[name] = {key: value.clone() for key, value in values.items()}
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_trains_is_the_model(world_size):
    net = make()
    optimizer = adam(net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            (net(data(rank, step)).square().mean() / world_size).backward()
        optimizer.step()
    expected = net.state_dict()
    for found in run(ranks, world_size, deadline_s=120):
        for name, values in found.items():
            exact = 1e-4 if "masters" in name else 1e-9  # fp32 masters of fp64 parameters
            for key, value in values.items():
                torch.testing.assert_close(
                    value,
                    expected[key],
                    rtol=exact,
                    atol=exact,
                    msg=lambda m, at=(name, key): f"{at}: {m}",
                )


# ------------------------------------------------------------------------------- what is refused


class Lamb(torch.optim.Optimizer):
    """Looks at norms; no list of names has it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    p.sub_(group["lr"] * p.grad * p.norm() / (p.grad.norm() + 1e-12))


class Joint(torch.optim.SGD):
    """Looks at all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        nn.utils.clip_grads_with_norm_(
            [p for g in self.param_groups for p in g["params"]],
            0.1,
            torch.stack([g.norm() for g in grads]).norm(),
        )
        return super().step(closure)


class Large(torch.optim.SGD):
    """Looks at the norm of large matrices only, as factored second moments do."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.dim() == 2 and min(p.shape) >= 128:
                p.grad.div_(p.grad.norm())
        return super().step(closure)


class Convolutions(torch.optim.SGD):
    """Centres the gradients of convolutions."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.dim() == 4:
                p.grad.sub_(p.grad.mean((1, 2, 3), keepdim=True))
        return super().step(closure)


class Needy(torch.optim.SGD):
    def __init__(self, params: Any, needed: Any) -> None:
        super().__init__(params, lr=0.1)


class Declared(Needy):
    elementwise = True


def test_optimizers_are_tried_and_not_looked_up():
    by_element = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad")
    for name in (*by_element, "RMSprop", "Rprop", "ASGD"):
        for make_one in (getattr(torch.optim, name), partial(getattr(torch.optim, name), lr=0.0)):
            assert why_not_elementwise(make_one) is None, name
            assert why_not_per_parameter(make_one) is None, name
    # What looks at some shapes, or at everything that a rank has.
    for kind in (Large, Convolutions, Joint):
        assert "differs" in why_not_elementwise(partial(kind, lr=0.1)), kind
    assert why_not_per_parameter(partial(Large, lr=0.1)) is None
    muon = type("Renamed", (torch.optim.Muon,), {})
    for kind in (torch.optim.Adafactor, muon, partial(torch.optim.Muon, lr=0.1), Lamb):
        assert why_not_elementwise(kind) is not None
        assert why_not_per_parameter(kind) is None
    for kind in (partial(Joint, lr=0.1), torch.optim.LBFGS):
        assert why_not_per_parameter(kind) is not None
    assert "elementwise = True" in why_not_elementwise(Needy)
    assert why_not_elementwise(Declared) is None
    state = torch.get_rng_state()
    why_not_elementwise(Lamb)
    assert torch.equal(state, torch.get_rng_state())


def refused():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    where = rf"rank {rank} of 2"
    x = data(rank, 0)
    # Optimizers that look at whole parameters.
    for kind in (Lamb, torch.optim.Adafactor):
        with pytest.raises(ValueError, match=f"looks at whole parameters.*{where}"):
            Zero2Optimizer(make().parameters(), kind, lr=0.1)
        net = make()
        Zero3(net, [net[0]])
        for optimizer in (
            kind(net.parameters(), lr=0.1),
            MasterWeights(net.parameters(), partial(kind, lr=0.1)),
        ):
            net(x).sum().backward()
            with pytest.raises(ValueError, match=f"looks at whole parameters.*{where}"):
                optimizer.step()
            optimizer.zero_grad()
    # A state from before sharding; gradients from before sharding.
    net = make()
    optimizer = adam(net.parameters())
    net(x).sum().backward()
    with pytest.raises(ValueError, match=r"on rank 0: .*zero_grad.*on rank 1: .*zero_grad"):
        Zero3(net)
    optimizer.step()
    optimizer.zero_grad()
    Zero3(net)
    net(x).sum().backward()
    with pytest.raises(ValueError, match=r"took steps before .* load_optimizer_state_dict"):
        optimizer.step()
    # Only one rank has the problem; both say so at once.
    net = make()
    if rank == 1:
        net[2].weight = nn.Parameter(net[2].weight.detach().t().contiguous().t())
    with pytest.raises(ValueError, match=rf"\[rank {rank}\].*on rank 1: .*not contiguous"):
        Zero2Optimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    net = make()
    if rank == 0:
        net[0].weight.grad = torch.ones_like(net[0].weight)
    with pytest.raises(ValueError, match=rf"\[rank {rank}\].*on rank 0: .*0\.weight"):
        Zero3(net)
    matrix = nn.Linear(3, 2)  # one rank owns the bias, which Muon does not take
    with pytest.raises(ValueError, match=rf"\[rank {rank}\].*2D"):
        ShardedOptimizer(matrix.parameters(), torch.optim.Muon, lr=0.1)
    # Converted, or with new parameters.
    for change in ("to", "data", "lora"):
        net = make()
        Zero3(net, [net[0]])
        if change == "to":
            net.to(torch.bfloat16)
        elif change == "data":
            for p in net.parameters():
                p.data = p.data.clone()
        else:
            net[2].lora = nn.Parameter(torch.ones(2))
        with pytest.raises(ValueError, match=rf"Zero3: .*{where}.* before Zero3\(model\)"):
            net(data(rank, 0).to(torch.bfloat16 if change == "to" else torch.float64))
    for kind in (zero1, zero2):
        net = make()
        optimizer = kind(net)
        net.float()

        def train(net=net, optimizer=optimizer):
            net(x.float()).sum().backward()
            optimizer.step()

        with pytest.raises(ValueError, match=rf"float64 on cpu, got torch\.float32.*{where}"):
            train()
    # Copies.
    for thing, instead in ((zero1(make()), "state_dict"), (zero2(make()), "state_dict")):
        for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=instead):
                make_copy(thing)
    net = make()
    zero = Zero3(net, [net[0]])
    for thing in (zero, net, net[0]):
        with pytest.raises(TypeError, match="full_state_dict"):
            copy.deepcopy(thing)
        with pytest.raises(TypeError, match="full_state_dict"):
            torch.save(thing, io.BytesIO())
    # A backward that failed before it had sent anything, and one that had.
    leaf = x.requires_grad_()

    def fail(_):
        raise KeyError

    net = make()
    optimizer = zero2(net)
    handle = leaf.register_hook(fail)
    with optimizer.no_sync(), pytest.raises(KeyError):
        net(leaf).sum().backward()
    handle.remove()
    with pytest.raises(RuntimeError, match=rf"\[rank {rank}\].*zero_grad\(\) first"):
        net(leaf).sum().backward()
    optimizer.zero_grad()
    net(leaf).sum().backward()
    optimizer.step()
    dist.barrier()
    leaf.register_hook(fail)
    with pytest.raises(KeyError):
        net(leaf).sum().backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"out of step: start again from a checkpoint"):
            net(leaf).sum().backward()
        optimizer.zero_grad()


def test_what_would_train_wrong_is_refused():
    run(refused, 2, deadline_s=60)


# -------------------------------------------------------------------------------- nested no_sync


def nested():
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for kind in ("zero2", "zero3", "fsdp"):
        net, local = make(), []
        if kind == "zero2":
            optimizer: Any = Zero2Optimizer(net.parameters(), torch.optim.SGD, lr=1.0)
            quiet, values = optimizer.no_sync, net.state_dict
        elif kind == "zero3":
            zero = Zero3(net, [net[0]])
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            quiet, values = zero.no_sync, zero.full_state_dict
        else:
            shard_model(net, lambda m: [m[0]])
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            quiet = partial(no_sync, net)
            values = lambda net=net: {  # noqa: E731
                name: p.full_tensor() for name, p in net.state_dict().items()
            }
        for _ in range(3):
            optimizer.zero_grad()
            with quiet():
                with quiet():
                    net(data(rank, 0)).square().mean().backward()
                net(data(rank, 1)).square().mean().backward()
                if kind == "fsdp":
                    local.append(net[0].weight.grad is None)
            net(data(rank, 2)).square().mean().backward()
            optimizer.step()
        assert all(local)
        found[kind] = {name: value.clone() for name, value in values().items()}
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_nested_no_sync(world_size):
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(world_size):
            for step in range(3):
                (net(data(rank, step)).square().mean() / world_size).backward()
        optimizer.step()
    for found in run(nested, world_size, deadline_s=60):
        for kind, values in found.items():
            for name, value in values.items():
                torch.testing.assert_close(
                    value, net.state_dict()[name], msg=lambda m, at=(kind, name): f"{at}: {m}"
                )


# --------------------------------------------------------------------------------------- buckets


def bucket_sizes():
    """Bytes of the parameters in each bucket, with the same limit in all of them."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 40)).double()
    options = {"bucket_bytes": 400}
    ddp = BucketedDDP(net, first_bucket_bytes=400, **options)
    found = [[bucket.parameters for bucket in ddp.buckets]]
    for kind in (ShardedOptimizer, Zero2Optimizer):
        optimizer = kind(net.parameters(), torch.optim.SGD, lr=0.1, **options)
        found.append([bucket.params for bucket in optimizer.buckets])
    dist.destroy_process_group()
    return [[[p.nbytes for p in bucket] for bucket in buckets] for buckets in found]


@pytest.mark.parametrize("world_size", WORLDS)
def test_bucket_bytes_means_at_most_everywhere(world_size):
    for found in run(bucket_sizes, world_size):
        for buckets in found:
            assert all(sum(bucket) <= 400 or len(bucket) == 1 for bucket in buckets)
            assert sum(map(len, buckets)) == 10
            assert any(len(bucket) > 1 for bucket in buckets)


def wrapped_twice():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    where = rf"rank {rank} of 2"
    # Around pieces nothing else may average, also where all pieces are of one size.
    net = nn.Linear(4, 4, bias=False)
    sharded = Zero3(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for wrap in (
        BucketedDDP,
        OverlappedDDP,
        Zero3,
        average_gradients,
        average_gradients_flat,
        lambda net: ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1),
        lambda net: Zero2Optimizer(net.parameters(), torch.optim.SGD, lr=0.1),
        lambda net: LocalSGD(net, sgd, 2),
    ):
        with pytest.raises(
            ValueError, match=rf"has cut on {where} .*; Zero3 averages gradients by"
        ):
            wrap(net)
    net(torch.ones(1, 4)).sum().backward()
    assert sharded.clip_grad_norm_(1.0) > 0
    # Hooks on parameters, before and after; those of a DDP, too.
    net = make()
    net[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    late = make()
    late[2].bias.register_post_accumulate_grad_hook(print)
    for hooked in (net, late, BucketedDDP(make())):
        with pytest.raises(ValueError, match=r"have hooks, which no .*; change the gradients of"):
            Zero3(hooked)
    net = make()
    Zero3(net, [net[0]])
    net(data(rank, 0)).sum().backward()
    with MemoryTracker(net, adam(net.parameters())) as tracker:  # it listens in its own way
        net(data(rank, 0)).sum().backward()
    assert tracker.peak_of("gradients") > 0
    net[0].weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match=rf"Linear\.weight has a hook, .* on {where}"):
        net(data(rank, 0))
    # Other units, or other parameters that are kept whole, on one rank.
    net = make()
    with pytest.raises(
        MismatchError, match=r"0\.weight \(unit '0'\).* rank 1 has 0\.weight \(unit ''"
    ):
        Zero3(net, [net[2 * rank]])
    with pytest.raises(MismatchError, match=r"3\.bias \(unit 'whole'\)"):
        Zero3(net, whole=[] if rank else [net[3].bias])
    # What is wrong on one rank only: nobody waits.
    for options, said in (
        ({"units": [nn.Linear(2, 2)] if rank else []}, r"on rank 1: units that are not modules"),
        ({"prefetch": -rank}, r"on rank 1: prefetch must not be negative, got -1"),
    ):
        with pytest.raises(ValueError, match=rf"\[rank {rank}\] Zero3: {said}"):
            Zero3(make(), **options)
    frozen = make().requires_grad_(rank == 0)
    with pytest.raises(ValueError, match=r"BucketedDDP: on rank 1: no parameter of the module"):
        BucketedDDP(frozen)
    for kind in (ShardedOptimizer, Zero2Optimizer):
        with pytest.raises(ValueError, match=r"Invalid learning rate: -1"):
            kind(make().parameters(), torch.optim.SGD, lr=-1.0 if rank else 0.1)
    # Parameters that were put into a group, past add_param_group.
    for kind in (zero1, zero2):
        net = make()
        optimizer = kind(net)
        net[3] = nn.Linear(3, 1).double()
        optimizer.param_groups[0]["params"][-2:] = list(net[3].parameters())
        loss = net(data(rank, 0)).sum()
        if kind is zero1:
            loss.backward()
        with pytest.raises(ValueError, match=rf"2 parameters of param_groups .*\({where}\)"):
            optimizer.step() if kind is zero1 else loss.backward()
    # A bucket of ZeRO-2 that was sent before the second gradient of a parameter came.
    net = make()
    zero2(net)
    shared = checkpoint(net, data(rank, 0).requires_grad_(), use_reentrant=True)
    loss = shared.sum() + sum(p.square().sum() for p in net.parameters())
    with pytest.raises(
        RuntimeError, match=rf"another gradient .* on {where} .*parallel\.recompute"
    ):
        loss.backward()


def test_what_would_be_averaged_twice_or_never_is_refused():
    run(wrapped_twice, 2)
