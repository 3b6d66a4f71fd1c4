"""Data parallelism: every form against one process in float64, and what it must survive."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import charged_net
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from minidist.collectives import ring_all_reduce
from minidist.collectives.buckets import cut_into_buckets
from minidist.errors import LaunchError, MinidistError, MismatchError
from minidist.launch import run
from minidist.parallel.data import (
    BucketedDDP,
    DataParallel,
    DDPOptions,
    OverlappedDDP,
    SyncBatchNorm,
    average_gradients,
    average_gradients_flat,
    broadcast_state,
    clip_grad_norm,
    clip_grad_norm_native,
    convert_sync_batch_norm,
    join,
    train_uneven,
    wrap_ddp,
)

STEPS = 6  # two more than the period of what is unused
WIDTH = 6


# ------------------------------------------------------------- every form against one process


class Net(nn.Module):
    """Tied weights, a frozen layer, optional branches, and an order of calls that may differ."""

    def __init__(self, mixed=False):
        super().__init__()
        self.first, self.frozen, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.double()
        self.frozen.requires_grad_(False)
        if mixed:  # a second dtype
            self.branches[1].float()
            self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float32))

    def forward(self, x, used=(0, 1, 2, 3)):
        x = torch.tanh(self.first(x))
        total = self.frozen(x)
        for i in used:  # the order decides in which order the gradients come
            layer = self.branches[i]
            total = total + torch.tanh(layer(x.to(layer.weight.dtype))).to(x.dtype)
        if hasattr(self, "scale"):
            total = total * self.scale
        return self.last(total)


@dataclass(frozen=True)
class Case:
    """How one run wraps, skips, accumulates and zeroes."""

    how: str = "bucketed"
    options: dict[str, Any] = field(default_factory=dict)
    unused: str = "none"  # "one rank", "all ranks", "random"
    micro_batches: int = 1
    no_sync: bool = True  # around all but the last micro-batch
    set_to_none: str = "true"  # "false", "alternating", "never zeroed"
    mixed: bool = False
    none_stays: bool = False  # a gradient that no rank has stays None

    def branches(self, rank, step):
        order = [(i + rank) % 4 for i in range(4)]  # other orders on other ranks
        if self.unused == "one rank":
            order = [i for i in order if not (i == step % 4 and rank == 0)]
        if self.unused == "all ranks":
            order = [i for i in order if i != step % 4 and i != 3]
        if self.unused == "random":
            generator = torch.Generator().manual_seed(100 * rank + step)
            keep = torch.randint(0, 2, (4,), generator=generator).tolist()
            order = [i for i in order if keep[i]]
        return order


SMALL = {"bucket_bytes": 400, "first_bucket_bytes": 100}
CASES = {
    "naive": Case("naive"),
    "naive, unused": Case("naive", unused="random"),
    "flat": Case("flat", mixed=True),
    "flat, unused": Case("flat", unused="random"),
    "overlapped": Case("overlapped"),
    "overlapped, unused": Case("overlapped", unused="random"),
    "one bucket": Case(),
    "small buckets": Case(options=SMALL),
    "bucket per parameter": Case(options={"bucket_bytes": 0}),
    "no reorder": Case(options={**SMALL, "reorder": False}),
    "two dtypes": Case(options=SMALL, mixed=True),
    "views": Case(options={**SMALL, "gradient_as_bucket_view": True}, mixed=True),
    "views, zeroed": Case(
        options={**SMALL, "gradient_as_bucket_view": True}, set_to_none="alternating"
    ),
    "zeroed in place": Case(options=SMALL, set_to_none="false"),
    "never zeroed": Case(options=SMALL, set_to_none="never zeroed"),
    "views, never zeroed": Case(
        options={**SMALL, "gradient_as_bucket_view": True}, set_to_none="never zeroed"
    ),
    "accumulation": Case(options=SMALL, micro_batches=3),
    "accumulation, views": Case(
        options={**SMALL, "gradient_as_bucket_view": True},
        micro_batches=3,
        set_to_none="alternating",
    ),
    "two synchronised backwards": Case(options=SMALL, micro_batches=2, no_sync=False),
    "two synchronised backwards, views": Case(
        options={**SMALL, "gradient_as_bucket_view": True}, micro_batches=2, no_sync=False
    ),
}
for _unused in ("one rank", "all ranks", "random"):
    CASES |= {
        f"unused on {_unused}": Case(options=SMALL, unused=_unused),
        f"unused on {_unused}, found": Case(
            options={**SMALL, "find_unused": True}, unused=_unused, none_stays=True
        ),
        f"unused on {_unused}, found, views, accumulation": Case(
            options={"bucket_bytes": 0, "find_unused": True, "gradient_as_bucket_view": True},
            unused=_unused,
            none_stays=True,
            micro_batches=2,
            set_to_none="alternating",
        ),
    }
CASES["stock DDP"] = Case("stock")
CASES["stock DDP, unused"] = Case(
    "stock", {"find_unused_parameters": True}, unused="random", none_stays=True
)


def batch(rank, step, part=0):
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + part)
    return torch.randn(3 + rank, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(output):
    return output.square().mean()


def seeded(make, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def zero(optimizer, case, step):
    if case.set_to_none != "never zeroed":
        to_none = {"true": True, "false": False, "alternating": step % 2 == 0}[case.set_to_none]
        optimizer.zero_grad(set_to_none=to_none)


def snapshot(module):
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def oracle(case, world_size):
    """Gradients of every step and the last parameters, all ranks one after the other."""
    model = seeded(partial(Net, case.mixed))
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), lr=0.01, weight_decay=0.1)
    grads = []
    for step in range(STEPS):
        zero(optimizer, case, step)
        total: dict[str, torch.Tensor] = {}
        for rank in range(world_size):
            for part in range(case.micro_batches):
                output = model(batch(rank, step, part), case.branches(rank, step))
                own = torch.autograd.grad(loss_of(output), named.values(), allow_unused=True)
                for name, grad in zip(named, own, strict=True):
                    if grad is not None:
                        total[name] = total.get(name, 0) + grad / world_size
        for name, parameter in named.items():
            if name not in total and (parameter.grad is not None or case.none_stays):
                continue
            before = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = before + total.get(name, 0)
        grads.append(snapshot(model))
        optimizer.step()
    return grads, {n: p.detach() for n, p in model.named_parameters()}


def train(case):
    """The same on this rank's batches, with whatever the case says."""
    rank = dist.get_rank()
    model = seeded(partial(Net, case.mixed), seed=rank)  # other weights: wrapping must cure that
    after = lambda: None  # noqa: E731
    if case.how in ("naive", "flat"):
        broadcast_state(model)
        call: Any = model
        average = average_gradients if case.how == "naive" else average_gradients_flat
        after = partial(average, model)
    elif case.how == "overlapped":
        call = OverlappedDDP(model)
        after = call.finish
    elif case.how == "stock":
        call = nn.parallel.DistributedDataParallel(model, **case.options)
    else:
        call = BucketedDDP(model, **case.options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    grads = []
    for step in range(STEPS):
        zero(optimizer, case, step)
        for part in range(case.micro_batches):
            local = case.no_sync and part < case.micro_batches - 1
            with call.no_sync() if local else contextlib.nullcontext():
                loss_of(call(batch(rank, step, part), case.branches(rank, step))).backward()
        after()
        grads.append(snapshot(model))
        optimizer.step()
    return grads, {n: p.detach() for n, p in model.named_parameters()}


# Four ranks on a small machine are slow: every second case there, and the others on one rank.
NAMES = {1: list(CASES)[1::2], 2: list(CASES), 3: list(CASES), 4: list(CASES)[::2]}


def train_all():
    dist.init_process_group("gloo")
    results = {name: train(CASES[name]) for name in NAMES[dist.get_world_size()]}
    dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def trained():
    return cache(lambda world_size: run(train_all, world_size, deadline_s=240))


def assert_same(got, expected, what):
    assert got.keys() == expected.keys(), what
    for name, value in expected.items():
        if value is None or got[name] is None:
            assert value is None, f"{what}: {name} has no gradient, expected {value}"
            assert got[name] is None, f"{what}: {name} has a gradient, expected None"
            continue
        rtol = 1e-4 if value.dtype == torch.float32 else 1e-10
        torch.testing.assert_close(
            got[name],
            value,
            rtol=rtol,
            atol=rtol * max(1.0, value.abs().max().item()),
            msg=lambda m, n=name: f"{what}, {n}: {m}",
        )


@pytest.mark.parametrize(
    ("name", "world_size"), [(name, num) for num, names in NAMES.items() for name in names]
)
def test_gradients_and_steps_equal_one_process(name, world_size, trained):
    case = CASES[name]
    grads, parameters = oracle(case, world_size)
    if case.mixed:  # float32 parts differ in the order of sums, and AdamW carries that on
        parameters = {n: p.float() for n, p in parameters.items()}
        grads = [{n: None if g is None else g.float() for n, g in step.items()} for step in grads]
    for rank, results in enumerate(trained(world_size)):
        got_grads, got_parameters = results[name]
        if case.mixed:
            got_parameters = {n: p.float() for n, p in got_parameters.items()}
            got_grads = [
                {n: None if g is None else g.float() for n, g in step.items()} for step in got_grads
            ]
        for step in range(STEPS):
            assert_same(got_grads[step], grads[step], f"rank {rank}, gradients of step {step}")
        assert_same(got_parameters, parameters, f"rank {rank}, parameters at the end")


# ---------------------------------------------------------------- the behaviour of BucketedDDP


class Outputs(nn.Module):
    """One layer per output; the container of the outputs is chosen at the call."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.penalised = nn.Parameter(torch.ones(3))  # used by the loss only
        self.double()

    def forward(self, x, container):
        y, z = self.a(x), self.b(x)
        if container == "dict":
            return {"y": y, "other": [z, None]}
        if container == "opaque":
            return Opaque(y, z)
        return y, z


@dataclass
class Opaque:
    y: torch.Tensor
    z: torch.Tensor


def outputs_of_any_type():
    """The loss uses y only, so b gets no gradient; a penalty uses a parameter directly."""
    rank, n = dist.get_rank(), dist.get_world_size()
    checked = []
    for find_unused in (False, True):
        for container in ("tuple", "dict", "opaque"):
            ddp = BucketedDDP(seeded(Outputs), bucket_bytes=0, find_unused=find_unused)
            for _ in range(3):
                ddp.zero_grad()
                out = ddp(torch.full((2, 3), rank + 1.0, dtype=torch.float64), container)
                y = out["y"] if container == "dict" else out[0] if container == "tuple" else out.y
                (y.sum() + (rank * ddp.module.penalised).sum()).backward()
                mean = (n + 1) / 2
                grads = {k: p.grad for k, p in ddp.module.named_parameters()}
                torch.testing.assert_close(
                    grads["a.weight"], torch.full_like(y[:1], 2 * mean).expand(3, 3)
                )
                torch.testing.assert_close(
                    grads["penalised"], torch.full((3,), mean - 1, dtype=torch.float64)
                )
                b = grads["b.weight"]
                assert b is None if find_unused else not b.any()
            checked.append((find_unused, container))
    return len(checked)


def a_rank_without_any_used_parameter():
    """On rank 0 the output does not depend on the parameters: it has to take part all the same."""
    rank, n = dist.get_rank(), dist.get_world_size()

    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.weight if dist.get_rank() > 0 else x * 2

    for find_unused in (False, True):
        ddp = BucketedDDP(Skipping(), find_unused=find_unused)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.full((4,), float(rank), requires_grad=True)).sum().backward()
            grad = ddp.module.weight.grad
            if n == 1 and find_unused:
                assert grad is None
            else:
                torch.testing.assert_close(grad, torch.full((4,), (n - 1) / 2))
    return True


class Launches:
    """An all-reduce that writes down what it was given, and when."""

    def __init__(self, events):
        self.events = events

    def __call__(self, flat):
        self.events.append(("launch", flat.numel()))
        return dist.all_reduce(flat, async_op=True)


def overlap_and_order():
    """Buckets start before backward ends, in the order in which gradients come, from step 2."""
    events: list[tuple[str, int]] = []
    # Registered in the wrong order: the first layer last.
    layers = nn.ModuleList(nn.Linear(4 + i, 4 + i + 1, bias=False) for i in reversed(range(4)))

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    ddp = BucketedDDP(Chain(), bucket_bytes=0, reduce=Launches(events))
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(
            lambda p: events.append(("gradient", p.numel()))
        )
    steps = []
    for _ in range(2):
        events.clear()
        ddp(torch.ones(1, 4)).sum().backward()
        steps.append(list(events))
    with ddp.no_sync():
        events.clear()
        ddp(torch.ones(1, 4)).sum().backward()
        steps.append(list(events))
    return steps, [bucket.num_bytes for bucket in ddp.buckets]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 1)
        self.register_buffer("flag", torch.tensor([True, False]))

    def forward(self, x):
        return self.layer(self.norm(x))


def buffers_come_from_rank_0():
    rank = dist.get_rank()
    model = Normed()
    model.norm.running_mean.fill_(rank)
    model.flag.fill_(rank == 0)
    ddp = BucketedDDP(model)
    assert model.norm.running_mean.eq(0).all()
    assert model.flag.all()
    seen = []
    model.register_forward_pre_hook(lambda m, _: seen.append(m.norm.running_mean.clone()))
    for step in range(3):
        # Two forwards before one backward: writing buffers must not upset autograd.
        (
            ddp(batch(rank, step)[:, :3].float()) + ddp(batch(rank, step)[:, 3:].float())[0]
        ).sum().backward()
    with ddp.no_sync():
        model.norm.running_mean.fill_(rank)
        ddp(batch(rank, 9)[:, :3].float()).sum().backward()
    ddp.eval()
    model.norm.running_mean.fill_(rank)
    with torch.no_grad():
        ddp(batch(rank, 9)[:, :3].float())
        if rank == 0:  # an evaluation on one rank calls no collective
            ddp(batch(rank, 9)[:, :3].float())
    if rank == 0:
        ddp(batch(rank, 9)[:, :3].float())
    ddp.broadcast_buffers()
    after = model.norm.running_mean.clone()
    return seen, after


def errors_are_raised_on_every_rank():
    rank = dist.get_rank()
    texts = []

    def expect(kind, fn):
        with pytest.raises(kind) as caught:
            fn()
        texts.append(str(caught.value))

    expect(MismatchError, lambda: BucketedDDP(nn.Linear(2 + rank // 2, 2)))
    expect(ValueError, lambda: BucketedDDP(nn.Linear(2, 2).requires_grad_(False)))
    expect(ValueError, lambda: BucketedDDP(nn.Linear(2, 2), bucket_bytes=-1))

    model = Net()
    ddp = BucketedDDP(model)
    model.frozen.requires_grad_(True)
    expect(ValueError, lambda: ddp(batch(rank, 0)))

    def fail(_):
        raise ZeroDivisionError("on purpose")

    ddp = BucketedDDP(Net())
    x = batch(rank, 0).requires_grad_()
    x.register_hook(fail)
    expect(ZeroDivisionError, lambda: ddp(x).sum().backward())
    expect(MinidistError, lambda: ddp(batch(rank, 0)))

    ddp = OverlappedDDP(Net())
    ddp(batch(rank, 0)).sum().backward()
    expect(MinidistError, lambda: ddp(batch(rank, 0)).sum().backward())

    ddp = BucketedDDP(nn.Embedding(4, 2, sparse=True))
    expect(ValueError, lambda: ddp(torch.tensor([1])).sum().backward())
    return texts


def checkpointing_frozen_later_and_more():
    rank, n = dist.get_rank(), dist.get_world_size()

    # Checkpointed segments, both kinds.
    for reentrant in (True, False):
        layers = seeded(lambda: nn.ModuleList(nn.Linear(3, 3) for _ in range(3)))

        class Checkpointed(nn.Module):
            def __init__(self, layers=layers, reentrant=reentrant):
                super().__init__()
                self.layers, self.reentrant = layers, reentrant

            def forward(self, x):
                for layer in self.layers:
                    x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
                return x

        plain = copy.deepcopy(layers)
        ddp = BucketedDDP(Checkpointed(), bucket_bytes=0)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.full((1, 3), rank + 1.0, requires_grad=True)).sum().backward()
        for other in range(n):
            x = torch.full((1, 3), other + 1.0)
            for layer in plain:
                x = torch.tanh(layer(x))
            (x.sum() / n).backward()
        for p, q in zip(ddp.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)

    # Frozen after wrapping: left alone. Memory formats: gradients are laid out as parameters.
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(
        memory_format=torch.channels_last
    )
    ddp = BucketedDDP(model, gradient_as_bucket_view=True)
    model[0].requires_grad_(False)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((1, 3, 8, 8), rank + 1.0)).sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad.stride() == model[1].weight.stride()

    # Asking autograd for other gradients in between leaves the mean right.
    ddp = BucketedDDP(seeded(lambda: nn.Linear(3, 1)))
    x = torch.full((1, 3), rank + 1.0, requires_grad=True)
    (slope,) = torch.autograd.grad(ddp(x).sum(), x, create_graph=True)
    (ddp(x).sum() + slope.square().sum()).backward()
    expected = (n + 1) / 2 + 2 * ddp.module.weight.detach()
    torch.testing.assert_close(ddp.module.weight.grad, expected)

    # Two models in one step, as a GAN has, one frozen meanwhile.
    first, second = (BucketedDDP(seeded(lambda: nn.Linear(3, 3))) for _ in range(2))
    second.requires_grad_(False)
    second(first(torch.full((1, 3), rank + 1.0))).sum().backward()
    assert second.module.weight.grad is None
    every = [torch.empty(3, 3) for _ in range(n)]
    dist.all_gather(every, first.module.weight.grad)
    for other in every:
        torch.testing.assert_close(other, every[0])
    return True


def other_ways_to_reduce():
    """A sum of one's own instead of dist.all_reduce, asynchronous and not."""
    rank, n = dist.get_rank(), dist.get_world_size()

    def gather_and_add(flat):
        every = [torch.empty_like(flat) for _ in range(n)]
        dist.all_gather(every, flat)
        flat.copy_(torch.stack(every).sum(0))

    ways = {
        "blocking": {"reduce": gather_and_add},
        "ring": {"reduce": lambda flat: ring_all_reduce(flat, async_op=True)},
        "ring, in views": {"reduce": ring_all_reduce, "gradient_as_bucket_view": True},
    }
    grads = {}
    for name, options in ways.items():
        ddp = BucketedDDP(seeded(Net), **SMALL, **options)
        for step in range(3):
            ddp.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
        grads[name] = {
            k: None if p.grad is None else p.grad.clone() for k, p in ddp.module.named_parameters()
        }
    return grads


def behaviours():
    dist.init_process_group("gloo")
    results = {
        fn.__name__: fn()
        for fn in (
            outputs_of_any_type,
            a_rank_without_any_used_parameter,
            overlap_and_order,
            buffers_come_from_rank_0,
            errors_are_raised_on_every_rank,
            checkpointing_frozen_later_and_more,
            other_ways_to_reduce,
        )
    }
    dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def behaved():
    return run(behaviours, 3, deadline_s=120)


def test_outputs_may_have_any_type_and_a_rank_may_use_no_parameter(behaved):
    for results in behaved:
        assert results["outputs_of_any_type"] == 6
        assert results["a_rank_without_any_used_parameter"]
        assert results["checkpointing_frozen_later_and_more"]


def test_buckets_start_while_backward_runs_in_the_order_of_the_gradients(behaved):
    sizes = [7 * 8, 6 * 7, 5 * 6, 4 * 5]  # as gradients come: last layer first
    for results in behaved:
        (first, second, local), bucket_bytes = results["overlap_and_order"]
        # Step 1 guesses the reverse of the registration, which is wrong here: nothing overlaps.
        assert [e for e in first if e[0] == "launch"] == [("launch", s) for s in sizes[::-1]]
        assert first[:3] == [("gradient", s) for s in sizes[:3]]
        # From step 2 on every bucket starts with its gradient.
        assert [e for e in second if e[0] == "launch"] == [("launch", s) for s in sizes]
        for size in sizes[:-1]:
            assert second.index(("launch", size)) < second.index(("gradient", sizes[-1]))
        assert local == [("gradient", s) for s in sizes]
        assert bucket_bytes == [4 * s for s in sizes]


def test_buffers(behaved):
    results = [each["buffers_come_from_rank_0"] for each in behaved]
    seen_0, _ = results[0]
    for rank, (seen, after) in enumerate(results):
        for step in range(6):  # before every synchronised forward
            torch.testing.assert_close(seen[step], seen_0[step])
        assert seen[6].eq(rank).all()  # under no_sync
        assert seen[7].eq(rank).all()  # in evaluation
        torch.testing.assert_close(after, torch.zeros(3))
    assert not seen_0[1].eq(seen_0[0]).all()


def test_errors_say_what_and_on_which_rank(behaved):
    for rank, each in enumerate(behaved):
        texts = each["errors_are_raised_on_every_rank"]
        assert len(texts) == 8
        assert texts[0] == (
            f"[rank {rank}] the ranks hold different models: rank 0 of the group has weight "
            "float32[2, 2], rank 2 has weight float32[2, 3]"
        )
        assert "no parameter" in texts[1]
        assert "bucket_bytes=-1" in texts[2]
        assert "frozen.weight was frozen" in texts[3]
        assert "out of step" in texts[5]
        assert "before finish()" in texts[6]
        assert "dense" in texts[7]


def test_other_ways_to_reduce(behaved):
    expected, _ = oracle_step(3, 2)
    for rank, each in enumerate(behaved):
        for way, grads in each["other_ways_to_reduce"].items():
            assert_same(grads, expected, f"rank {rank}, {way}")


def oracle_step(world_size, step):
    model = seeded(Net)
    for rank in range(world_size):
        (loss_of(model(batch(rank, step))) / world_size).backward()
    return snapshot(model), model


# --------------------------------------------------------------------- sub-groups, GPT, uneven


def train_gpt_on_a_mesh():
    """dp 2 x tp 2, both tp ranks of a dp rank with the same data: gradients of two ranks."""
    from minidist.data import make_tokens
    from minidist.mesh import make_mesh
    from minidist.model import GPT, GPTConfig, lm_loss

    dist.init_process_group("gloo")
    mesh = make_mesh(dp=2, tp=2)
    config = GPTConfig(vocab_size=32, context=8, width=16, num_layers=2, tied=True)
    inputs, targets = make_tokens(8 * STEPS, 8, 32)
    torch.manual_seed(dist.get_rank() % 2)  # the groups {0, 2} and {1, 3} start differently
    model = BucketedDDP(
        GPT(config).double(), group=mesh.group("dp"), bucket_bytes=8000, first_bucket_bytes=1000
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    start = 4 * mesh.coordinate("dp")
    for step in range(STEPS):
        rows = slice(8 * step + start, 8 * step + start + 4)
        optimizer.zero_grad()
        lm_loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    return {n: p.detach() for n, p in model.module.named_parameters()}


def test_a_gpt_in_sub_groups_takes_the_steps_of_one_process():
    from minidist.data import make_tokens
    from minidist.model import GPT, GPTConfig, lm_loss

    results = run(train_gpt_on_a_mesh, 4)
    config = GPTConfig(vocab_size=32, context=8, width=16, num_layers=2, tied=True)
    inputs, targets = make_tokens(8 * STEPS, 8, 32)
    for seed in range(2):
        model = seeded(lambda: GPT(config).double(), seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(STEPS):
            rows = slice(8 * step, 8 * step + 8)
            optimizer.zero_grad()
            lm_loss(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        expected = {n: p.detach() for n, p in model.named_parameters()}
        for rank in (seed, seed + 2):
            assert_same(results[rank], expected, f"rank {rank}")


NUM_BATCHES = {1: (10,), 2: (10, 2), 3: (0, 10, 3), 4: (3, 0, 10, 7)}
UNEVEN = {
    "all": ({}, "all"),
    "active": ({}, "active"),
    "found, views": ({"find_unused": True, "gradient_as_bucket_view": True}, "all"),
    "stock": ({}, "all"),
}


class UnevenNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))
        self.never = nn.Linear(2, 2)
        self.register_buffer("num_forwards", torch.zeros(()))
        self.double()

    def forward(self, x):
        self.num_forwards += 1
        return self.net(x) + 0 * self.never.weight.sum() if x.sum() > 1e9 else self.net(x)


def uneven():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    results = {}
    for name, (options, divide_by) in UNEVEN.items():
        model = seeded(UnevenNet)
        model.never.requires_grad_(name != "stock")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mine = [(batch(rank, step), torch.zeros(())) for step in range(NUM_BATCHES[n][rank])]
        losses = []

        def loss_fn(y, _, losses=losses):
            losses.append(loss_of(y))
            return losses[-1]

        if name == "stock":
            ddp = nn.parallel.DistributedDataParallel(model)
            train_uneven(ddp, optimizer, mine, loss_fn)
        else:
            ddp = BucketedDDP(model, **SMALL, **options)
            with join(ddp, divide_by):
                for x, y in mine:
                    optimizer.zero_grad()
                    loss_fn(ddp(x), y).backward()
                    optimizer.step()
        state = {k: v.clone() for k, v in model.state_dict().items()}
        results[name] = [loss.item() for loss in losses], state
    # Kinds of step that do not fit together are an error on every rank.
    ddp = BucketedDDP(seeded(UnevenNet))
    text = ""
    try:
        with join(ddp), ddp.no_sync() if rank == 0 else contextlib.nullcontext():
            loss_of(ddp(batch(rank, 0))).backward()
    except MismatchError as error:
        text = str(error)
    with pytest.raises(ValueError, match="divide_by"), join(ddp, "some"):
        pass
    dist.barrier()
    dist.destroy_process_group()
    return results, text


@pytest.mark.parametrize("world_size", NUM_BATCHES)
def test_uneven_inputs(world_size):
    ranks = run(uneven, world_size)
    for rank, (results, text) in enumerate(ranks):
        where = f"[rank {rank}] join: ranks are at different kinds of step"
        assert text.startswith(where) or world_size == 1
        for name, (_, divide_by) in UNEVEN.items():
            model = seeded(UnevenNet)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for step in range(max(NUM_BATCHES[world_size])):
                active = [r for r, num in enumerate(NUM_BATCHES[world_size]) if num > step]
                optimizer.zero_grad()
                for r in active:
                    divisor = len(active) if divide_by == "active" else world_size
                    loss = loss_of(model(batch(r, step)))
                    (loss / divisor).backward()
                    if r == rank:
                        losses.append(loss.item())
                optimizer.step()
            expected = {k: v for k, v in model.state_dict().items() if k != "num_forwards"}
            got_losses, got = results[name]
            assert got_losses == pytest.approx(losses, rel=1e-10), f"rank {rank}, {name}"
            assert got.pop("num_forwards") == max(NUM_BATCHES[world_size])
            assert_same(got, expected, f"rank {rank}, {name}")


# ------------------------------------------------------------------------------ the native way


def native():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    case = Case()
    variants = {
        "plain": DDPOptions(),
        "views, small": DDPOptions(gradient_as_bucket_view=True, bucket_cap_mb=0.0002),
        "unused": DDPOptions(find_unused_parameters=True, broadcast_buffers=False),
        "static": DDPOptions(static_graph=True),
        "fp16": DDPOptions(hook="fp16"),
        "powersgd": DDPOptions(hook="powersgd", powersgd_rank=2),
    }
    results = {}
    for name, options in variants.items():
        model = seeded(Net)
        ddp = wrap_ddp(model, options)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
        grads = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(ddp(batch(rank, step), case.branches(rank, step))).backward()
            grads.append(snapshot(model))
            optimizer.step()
        results[name] = grads, {n: p.detach() for n, p in model.named_parameters()}
    for hook in ("bf16", "other"):
        with pytest.raises(ValueError, match="hook"):
            wrap_ddp(seeded(Net), DDPOptions(hook=hook))
    dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_native_way(world_size):
    expected, parameters = oracle(Case(), world_size)
    for rank, results in enumerate(run(native, world_size, env={"CUDA_VISIBLE_DEVICES": ""})):
        for name, (grads, got) in results.items():
            what = f"rank {rank}, {name}"
            if name == "fp16":  # later steps of Adam magnify what was rounded
                for key, value in expected[0].items():
                    if value is not None:
                        torch.testing.assert_close(grads[0][key], value, rtol=5e-3, atol=1e-4)
                for key, value in parameters.items():
                    torch.testing.assert_close(got[key], value, rtol=0, atol=5e-3)
                continue
            for step, (one, other) in enumerate(zip(grads, expected, strict=True)):
                assert_same(one, other, f"{what}, gradient of step {step}")
            assert_same(got, parameters, what)


# ---------------------------------------------------------------------------- emulated cluster


def emulated(how, cap_bytes):
    rank = dist.get_rank()
    model = charged_net.Net()
    if how == "stock":
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap_bytes / 2**20)
    else:
        ddp = BucketedDDP(model, bucket_bytes=cap_bytes, gradient_as_bucket_view=how == "views")
    for step in range(3):
        ddp.zero_grad()
        generator = torch.Generator().manual_seed(10 * rank + step)
        ddp(torch.randn(5, 24, generator=generator), step).square().mean().backward()
    return True


def test_overlap_on_the_emulated_cluster_is_as_good_as_possible():
    from minidist.emulate import simulate
    from minidist.emulate.teach import run_traced

    depth, width = charged_net.DEPTH, charged_net.WIDTH
    layer_bytes = 4 * (width * width + width)
    plan = charged_net.plan_for()
    compute_s = sum(plan.forward_s) + sum(plan.backward_s)
    cluster = charged_net.grading_cluster(3, depth * layer_bytes, compute_s)
    efficiency = {}
    for how in ("stock", "copies", "views"):
        _, trace = run_traced(emulated, 3, how, layer_bytes, plan=plan)
        assert trace.faults == []
        efficiency[how] = min(step.efficiency for step in simulate(trace, cluster).steps[1:])
    # Everything is hidden but the bucket of the first layer, which nothing can hide.
    best = compute_s / (compute_s + 0.43 * compute_s / depth)
    for how in ("copies", "views"):
        assert efficiency[how] >= 0.99 * best
        assert efficiency[how] >= efficiency["stock"] - 1e-9


# ------------------------------------------------------------------------------------- buckets


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 60), st.sampled_from("fdh")), min_size=1, max_size=25),
    cap=st.integers(0, 300),
    first=st.integers(0, 300),
)
def test_buckets_hold_each_parameter_once_and_keep_to_the_limit(sizes, cap, first):
    dtypes = {"f": torch.float32, "d": torch.float64, "h": torch.float16}
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtypes[kind])) for n, kind in sizes]
    buckets = cut_into_buckets(parameters, cap, first)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        members = [parameters[i] for i in bucket]
        assert len({p.dtype for p in members}) == 1
        num_bytes = sum(p.nbytes for p in members)
        assert num_bytes <= cap or sum(p.nbytes > 0 for p in members) == 1
    # Complete in this order.
    assert [b[-1] for b in buckets] == sorted(b[-1] for b in buckets)


# -------------------------------------------------------------------------------- SyncBatchNorm


SIZES = {
    1: [(4,)],
    2: [(4, 4), (1, 5), (0, 3), (1, 1)],
    3: [(2, 0, 5), (0, 0, 2)],
    4: [(2, 0, 5, 1), (0, 0, 2, 0)],
}
SHAPES = [(), (6,), (4, 3), (2, 3, 2)]


def norm_batches(sizes, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    total = torch.randn(sum(sizes), 3, *shape, generator=generator, dtype=torch.float64)
    return list((3 * total + 5).split(sizes))


def weights(y, rank):
    """A loss in which each output counts differently."""
    n = torch.arange(y.numel(), dtype=y.dtype).view(y.shape)
    return (y * torch.cos(n + rank)).sum()


def make_norm(kind, momentum, affine, group=None):
    norm = kind(3, momentum=momentum, affine=affine, **({} if group is None else {"group": group}))
    norm.double()
    if affine:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
            norm.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    return norm


def normalise():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    results = []
    for sizes in SIZES[n]:
        for shape in SHAPES:
            for momentum, affine in ((0.1, True), (None, False)):
                norm = make_norm(SyncBatchNorm, momentum, affine)
                for seed in range(2):
                    x = norm_batches(sizes, shape, seed)[rank].clone()
                    if len(shape) == 2:
                        x = x.to(memory_format=torch.channels_last)
                    x.requires_grad_()
                    norm.zero_grad()
                    y = norm(x)
                    weights(y, rank).backward()
                norm.eval()
                results.append(
                    {
                        "y": y.detach(),
                        "dx": x.grad,
                        "eval": norm(x).detach(),
                        "dw": norm.weight.grad if affine else None,
                        "db": norm.bias.grad if affine else None,
                        "mean": norm.running_mean,
                        "var": norm.running_var,
                        "num": norm.num_batches_tracked,
                    }
                )
    texts = []
    norm = SyncBatchNorm(3)
    for x in (torch.ones(1 if rank == 0 else 0, 3), torch.ones(2, 4)):
        with pytest.raises(ValueError, match="SyncBatchNorm: ") as caught:
            norm(x)
        texts.append(str(caught.value))
    # bf16 in, bf16 out, statistics in fp32.
    assert norm(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    dist.barrier()
    dist.destroy_process_group()
    return results, texts


@pytest.mark.parametrize("world_size", SIZES)
def test_sync_batch_norm_equals_batch_norm_of_the_joint_batch(world_size):
    ranks = run(normalise, world_size)
    index = 0
    for sizes in SIZES[world_size]:
        for shape in SHAPES:
            for momentum, affine in ((0.1, True), (None, False)):
                kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape)]
                norm = make_norm(kind, momentum, affine)
                for seed in range(2):
                    parts = norm_batches(sizes, shape, seed)
                    x = torch.cat(parts).requires_grad_()
                    norm.zero_grad()
                    y = norm(x)
                    sum(weights(p, r) for r, p in enumerate(y.split(sizes))).backward()
                norm.eval()
                expected = {"y": y, "dx": x.grad, "eval": norm(x)}
                for rank, (results, _) in enumerate(ranks):
                    got = results[index]
                    for name, value in expected.items():
                        torch.testing.assert_close(
                            got[name], value.detach().split(sizes)[rank], rtol=1e-9, atol=1e-9
                        )
                    torch.testing.assert_close(got["mean"], norm.running_mean)
                    torch.testing.assert_close(got["var"], norm.running_var)
                    assert got["num"] == norm.num_batches_tracked == 2
                if affine:
                    for name, parameter in (("dw", norm.weight), ("db", norm.bias)):
                        total = sum(results[index][name] for results, _ in ranks)
                        torch.testing.assert_close(total, parameter.grad, rtol=1e-9, atol=1e-9)
                index += 1
    for results, texts in ranks:
        assert index == len(results)
        assert "at least 2 values per channel on all ranks together, got 1" in texts[0]
        assert "expected shape (N, 3, ...), got (2, 4)" in texts[1]


def train_resnet(joint):
    from minidist.data import make_images
    from minidist.model import ResNet

    batch = 11  # which no number of ranks but one divides
    images, labels = make_images(batch * STEPS, num_classes=4, size=8)
    images = images.double()
    model: Any = seeded(lambda: ResNet(num_classes=4, width=4).double())
    world_size, rank = 1, 0
    if not joint:
        dist.init_process_group("gloo")
        world_size, rank = dist.get_world_size(), dist.get_rank()
        model = BucketedDDP(convert_sync_batch_norm(model), bucket_bytes=4000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, gradients = [], {}
    for step in range(STEPS):
        rows = torch.arange(batch * step + rank, batch * (step + 1), world_size)
        optimizer.zero_grad()
        logits = model(images[rows])
        # The mean over the batch of all ranks, of which DDP takes the mean over the ranks.
        loss = nn.functional.cross_entropy(logits, labels[rows], reduction="sum") / batch
        (loss * world_size).backward()
        losses.append(loss.item())
        gradients = gradients or {f"gradient of {k}": v for k, v in snapshot(model).items()}
        optimizer.step()
    if not joint:
        dist.barrier()
        dist.destroy_process_group()
        model = model.module
        gradients = {k.replace("of module.", "of "): v for k, v in gradients.items()}
    return losses, gradients | {k: v.double() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_resnet_with_sync_batch_norm_takes_the_steps_of_one_process(world_size):
    losses, expected = train_resnet(True)
    results = run(train_resnet, world_size, False)
    total = [sum(step) for step in zip(*(each for each, _ in results), strict=True)]
    assert total == pytest.approx(losses, rel=1e-9)
    for rank, (_, got) in enumerate(results):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                got[name],
                value,
                rtol=1e-7,
                atol=1e-9,
                msg=lambda m, n=name, r=rank: f"{r}, {n}: {m}",
            )


def test_converting_keeps_tensors_and_structure():
    norm = nn.BatchNorm2d(3, eps=1e-3, momentum=0.2)
    norm.running_mean.fill_(4)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.Sequential(norm)).eval()
    converted = convert_sync_batch_norm(model)
    assert isinstance(converted[1], SyncBatchNorm)
    assert converted[1] is converted[2][0]
    assert converted[1].weight is norm.weight
    assert (converted[1].eps, converted[1].momentum, converted[1].training) == (1e-3, 0.2, False)
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(converted[1](x), norm(x))  # without a process group
    norm.train()
    torch.testing.assert_close(converted[1].train()(x), norm(x))
    assert isinstance(convert_sync_batch_norm(nn.BatchNorm1d(2)), SyncBatchNorm)


def test_the_gradient_of_sync_batch_norm_is_exact():
    norm = make_norm(SyncBatchNorm, 0.1, True)
    x = norm_batches([5], (2,), 0)[0].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w, b: torch.func.functional_call(norm, {"weight": w, "bias": b}, x),
        (x, norm.weight, norm.bias),
    )


# ------------------------------------------------------------------------------------- clipping


def clip_shards():
    dist.init_process_group("gloo")
    rank, num_owners = dist.get_rank(), max(1, dist.get_world_size() - 1)
    # Six gradients, dealt out so that the last of several ranks holds none.
    results = {}
    for norm_type in (1.0, 2.0, math.inf):
        mine = [p for i, p in enumerate(gradients()) if i % num_owners == rank]
        norm = clip_grad_norm(mine, 0.5, norm_type=norm_type, shard_group=dist.group.WORLD)
        results[norm_type] = (norm, [p.grad for p in mine])
    bad = gradients()[:1]
    bad[0].grad.fill_(float("nan") if rank == 0 else 1.0)
    with pytest.raises(MinidistError, match="norm is nan"):
        clip_grad_norm(bad, 1.0, shard_group=dist.group.WORLD, error_if_nonfinite=True)
    dist.barrier()
    dist.destroy_process_group()
    return results


def gradients(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for i in range(6):
        p = nn.Parameter(torch.zeros(i + 1, 2, dtype=dtype))
        p.grad = torch.randn(i + 1, 2, generator=generator, dtype=torch.float64).to(dtype)
        parameters.append(p)
    return parameters


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_clipping_shards_equals_clipping_all(world_size):
    ranks = run(clip_shards, world_size)
    num_owners = max(1, world_size - 1)
    for norm_type in (1.0, 2.0, math.inf):
        expected = gradients()
        norm = torch.nn.utils.clip_grad_norm_(expected, 0.5, norm_type)
        for rank, results in enumerate(ranks):
            got_norm, grads = results[norm_type]
            torch.testing.assert_close(got_norm, norm)
            theirs = [p.grad for i, p in enumerate(expected) if i % num_owners == rank]
            for got, want in zip(grads, theirs, strict=True):
                torch.testing.assert_close(got, want)


def test_clipping_replicated_gradients():
    for dtype in (torch.float64, torch.float32, torch.float16):
        for max_norm in (0.1, 1e4):
            ours, theirs = gradients(dtype), gradients(dtype)
            ours.append(nn.Parameter(torch.zeros(3)))  # without a gradient
            norm = clip_grad_norm(ours, max_norm)
            torch.testing.assert_close(
                norm.double(), clip_grad_norm_native(theirs, max_norm).double(), rtol=1e-3, atol=0
            )
            for p, q in zip(ours, theirs, strict=False):
                torch.testing.assert_close(p.grad, q.grad, rtol=2e-3, atol=1e-6)
    # Squares of half-precision gradients do not overflow.
    p = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    p.grad = torch.full((4,), 6e4, dtype=torch.float16)
    assert clip_grad_norm([p], 1.0).item() == pytest.approx(2 * 59999, rel=1e-3)
    assert clip_grad_norm([], 1.0).item() == 0
    for arguments in ({"max_norm": 0.0}, {"max_norm": 1.0, "norm_type": 0.0}):
        with pytest.raises(ValueError, match="clip_grad_norm: "):
            clip_grad_norm([p], **arguments)


# --------------------------------------------------------------------------------- DataParallel


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 5])
def test_data_parallel_takes_the_steps_of_one_device(num_devices):
    plain, model = seeded(Net), seeded(Net)
    parallel = DataParallel(model, ["cpu"] * num_devices)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01)
        for m in (plain, model)
    ]
    for step in range(STEPS):
        x = batch(step % 5, step)  # 3 to 7 samples: not divisible, or fewer than devices
        for m, optimizer in zip((plain, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(m(x)).backward()
        assert_same(snapshot(model), snapshot(plain), f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
    expected = {n: p.detach() for n, p in plain.named_parameters()}
    assert_same({n: p.detach() for n, p in model.named_parameters()}, expected, "at the end")


def test_data_parallel_moves_everything_through_device_0():
    n, batch_size = 4, 8
    model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Linear(20, 5))
    parallel = DataParallel(model, ["cpu"] * n)
    x = torch.randn(batch_size, 10, requires_grad=True)
    parallel(x).sum().backward()
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    buffer_bytes = sum(b.nbytes for b in model.buffers())
    away = batch_size - batch_size // n
    assert parallel.traffic.bytes == {
        "scatter": away * 10 * 4,
        "replicate": (n - 1) * (parameter_bytes + buffer_bytes),
        "gather": away * 5 * 4,
        "output gradients": away * 5 * 4,
        "add gradients": (n - 1) * parameter_bytes,
        "input gradients": away * 10 * 4,
    }
    assert parallel.traffic.total_bytes == sum(parallel.traffic.bytes.values())
    # Statistics of replica 0 persist.
    assert model[1].num_batches_tracked == 1
    expected = 0.1 * model[0](x[:2]).mean(0)
    torch.testing.assert_close(model[1].running_mean, expected.detach())
    parallel.traffic.reset()
    with torch.no_grad():
        parallel(x)
    assert "add gradients" not in parallel.traffic.bytes
    # Frozen weights are replicated, and bring no gradients home.
    model[0].requires_grad_(False)
    parallel.traffic.reset()
    parallel(x.detach()).sum().backward()
    trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert parallel.traffic.bytes["add gradients"] == (n - 1) * trained_bytes
    assert model[0].weight.grad is not None  # from before
    assert "input gradients" not in parallel.traffic.bytes


def test_data_parallel_carries_autocast_into_its_threads_and_errors_out_of_them():
    parallel = DataParallel(nn.Linear(3, 3), ["cpu"] * 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert parallel(torch.ones(4, 3)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError) as caught:
        parallel(torch.ones(4, 7))
    assert "in replica 0 of 2, on cpu" in caught.value.__notes__
    with pytest.raises(ValueError, match="no samples"):
        parallel(torch.ones(0, 3))
    with pytest.raises(ValueError, match="at least one device"):
        DataParallel(nn.Linear(3, 3), [])
    with pytest.raises(ValueError, match="must be on meta"):
        DataParallel(nn.Linear(3, 3), ["meta", "cpu"])


def pack_early():
    """How many gradients are in no bucket when the last one arrives; the first bucket waits."""
    dist.init_process_group("gloo")
    used, unused = (nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(n))) for n in (6, 1))
    model = nn.ModuleList([used, unused])
    model.forward = lambda x: used(x)
    ddp = BucketedDDP(
        model, bucket_bytes=256, first_bucket_bytes=256, reorder=False, gradient_as_bucket_view=True
    )
    slots = {slot.data_ptr() for bucket in ddp.buckets for slot in bucket.slots}
    outside = []

    def look(_: Any) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        outside.append(sum(grad.data_ptr() not in slots for grad in grads))

    used[0].weight.register_post_accumulate_grad_hook(look)
    ddp(torch.randn(3, 8)).sum().backward()
    return len(ddp.buckets), outside


def test_a_complete_bucket_frees_its_gradients_though_an_earlier_one_waits():
    assert run(pack_early, 2) == [(7, [0])] * 2


@pytest.mark.gpu
def test_data_parallel_on_gpus():
    devices = [f"cuda:{i % torch.cuda.device_count()}" for i in range(2)]
    plain = seeded(Net).to(devices[0])
    parallel = DataParallel(copy.deepcopy(plain), devices)
    for model in (plain, parallel):
        loss_of(model(batch(3, 0).to(devices[0]))).backward()
    assert_same(snapshot(parallel.module), snapshot(plain), "gradients")


def test_a_rank_that_fails_is_named():
    with pytest.raises(LaunchError, match="different models"):
        run(wrap_different, 2)


def wrap_different():
    dist.init_process_group("gloo")
    BucketedDDP(nn.Linear(2, 2 + dist.get_rank()))
