"""ZeRO-1 and ZeRO-2 against stock torch in one process, in float64."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zero_helper import Gpt, Plain, build, compare, compare_optimizer, train

from minidist.errors import MismatchError
from minidist.launch import run
from minidist.parallel.accumulation import accumulate_step
from minidist.parallel.zero import (
    ShardedOptimizer,
    Zero2Optimizer,
    Zero3,
    count_bytes,
    exchange,
    formula_bytes,
    merge_optimizer_parts,
)
from minidist.parallel.zero.partition import by_element, by_parameter
from minidist.precision import GradScaler

WORLDS = (1, 2, 3, 4)


class Stage1(Plain):
    """ZeRO-1 that averages the gradients itself."""

    def optimize(self, params, optimizer_class, **kwargs):
        options = {"average_gradients": True, "bucket_bytes": 2000} | self.options
        self.optimizer = ShardedOptimizer(params, optimizer_class, **options, **kwargs)
        return self.optimizer

    def clip(self, model, max_norm, norm_type):
        return self.optimizer.clip_grad_norm_(max_norm, norm_type).item()

    def optimizer_state(self):
        return self.optimizer.full_state_dict()


class Stage1OverDdp(Stage1):
    def wrap(self, model):
        return DistributedDataParallel(model)

    def optimize(self, params, optimizer_class, **kwargs):
        self.options = {"average_gradients": False}
        return super().optimize(params, optimizer_class, **kwargs)


class Stage2(Stage1):
    def optimize(self, params, optimizer_class, **kwargs):
        options = {"bucket_bytes": 2000} | self.options
        self.optimizer = Zero2Optimizer(params, optimizer_class, **options, **kwargs)
        return self.optimizer

    def no_sync(self):
        return self.optimizer.no_sync()


SGD = {"optimizer": "SGD", "hyper": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}
CASES = {
    "adamw": {},
    "sgd": SGD,
    "tied, groups": {"config": {"tied": True}, "groups": True},
    "tied and frozen": {"model": "frozen"},
    "scheduler": {"schedule": True},
    "closure": {"closure": True},
    "clip": {"clip": (0.05, 2.0)},
    "clip by largest": {"clip": (0.001, float("inf")), **SGD},
    "group added later": {"add_group": True, **SGD},
    "sometimes used": {
        "model": "sometimes",
        "hyper": {"lr": 0.02, "weight_decay": 0.5, "eps": 1e-4},
    },
    "fewer than ranks": {"model": "tiny", "schedule": True},
    "fewer than ranks, closure, clip": {"model": "tiny", "closure": True, "groups": True},
    "accumulation": {"accumulate": 3},
}
WHOLE = {
    "adafactor": {"optimizer": "Adafactor", "hyper": {"lr": 0.02}, "config": {"bias": False}},
    "nadam": {"optimizer": "NAdam"},
    "asgd": {"optimizer": "ASGD", "hyper": {"lr": 0.1}},
}
STAGE2 = {
    "accumulation without sync": {"accumulate": 3, "skip_sync": True, "clip": (0.05, 2.0)},
    "sometimes, without sync": {"model": "sometimes", "accumulate": 3, "skip_sync": True},
}


def train_all():
    dist.init_process_group("gloo")
    done = {}
    for name, case in {**CASES, **WHOLE}.items():
        done["stage 1", name] = train(Stage1(), **case)
    for name, case in {**CASES, **STAGE2}.items():
        done["stage 2", name] = train(Stage2(), **case)
    for name in ("adamw", "tied, groups", "scheduler", "closure", "clip"):
        done["stage 1, DDP", name] = train(Stage1OverDdp(), **CASES[name])
    dist.barrier()
    dist.destroy_process_group()
    return done


@functools.cache
def oracle(name):
    return train(Plain(), **{**CASES, **WHOLE, **STAGE2}[name])


@pytest.mark.parametrize("world_size", WORLDS)
def test_steps_equal_one_process(world_size):
    results = run(train_all, world_size, deadline_s=200)
    for stage, name in results[0]:
        compare([rank[stage, name] for rank in results], oracle(name))
        if name != "adafactor":
            compare_optimizer(results[0][stage, name]["optimizer"], oracle(name)["optimizer"])


# -- state dicts ---------------------------------------------------------------------------------


def train_and_pack(stage, start, steps, master):
    dist.init_process_group("gloo")
    engine = {1: Stage1, 2: Stage2}[stage]()
    done = train(engine, groups=True, schedule=False, steps=steps, start=start)
    done["shard"] = engine.optimizer.state_dict()
    done["rank 0 only"] = engine.optimizer.full_state_dict(rank0_only=True)
    # A shard goes back to where it came from, and nowhere else.
    engine.optimizer.load_state_dict(done["shard"])
    compare_optimizer(engine.optimizer.full_state_dict(), done["optimizer"])
    if dist.get_world_size() > 1:
        other = {**done["shard"], "rank": dist.get_rank() + 1}
        with pytest.raises(ValueError, match=r"\[rank \d\].*merge the shards"):
            engine.optimizer.load_state_dict(other)
    with pytest.raises(ValueError, match="expected groups of"):
        engine.optimizer.load_state_dict({"state": {}, "param_groups": []})
    dist.barrier()
    dist.destroy_process_group()
    return done


@pytest.mark.parametrize("stage", [1, 2])
def test_state_is_carried_to_another_number_of_ranks(stage):
    expected = train(Plain(), groups=True, steps=10)
    first = run(train_and_pack, 3, stage, None, 4, False)
    assert [bool(each["rank 0 only"]) for each in first] == [True, False, False]
    merged = merge_optimizer_parts([each["shard"] for each in reversed(first)])
    compare_optimizer(merged, first[0]["optimizer"])
    # 3 ranks -> 2 ranks -> one process with stock torch
    second = run(train_and_pack, 2, stage, {**first[0], "optimizer": merged}, 3, False)
    third = train(Plain(), groups=True, steps=3, start=second[1])
    for name, value in expected["values"].items():
        torch.testing.assert_close(third["values"][name], value, rtol=1e-9, atol=1e-12)
    compare_optimizer(third["optimizer"], expected["optimizer"])


# -- mixed precision and memory ------------------------------------------------------------------

WIDE = {"vocab_size": 32, "width": 64, "num_layers": 6, "num_heads": 2, "mlp_ratio": 4}


def measure_memory():
    dist.init_process_group("gloo")
    n = dist.get_world_size()
    found = {}
    for stage in (1, 2):
        for mixed in (False, True):
            torch.manual_seed(0)
            model = Gpt(**WIDE).to(torch.bfloat16 if mixed else torch.float32)
            num_params = sum(p.numel() for p in model.parameters())
            options = {"master_dtype": torch.float32 if mixed else None}
            if stage == 1:
                optimizer = ShardedOptimizer(
                    model.parameters(), torch.optim.Adam, average_gradients=False, **options
                )
                model_or_ddp = DistributedDataParallel(model)
            else:
                optimizer = Zero2Optimizer(model.parameters(), torch.optim.Adam, **options)
                model_or_ddp = model
            inputs, targets = Gpt.batches(1)[0]
            for _ in range(2):
                optimizer.zero_grad()
                model_or_ddp(inputs, targets).backward()
                optimizer.step()
            sizes = {} if mixed else {"param_bytes": 4, "grad_bytes": 4, "state_bytes": 8}
            formula = formula_bytes(num_params, n, stage, **sizes)
            found[stage, mixed] = (count_bytes(model, optimizer), formula)
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", WORLDS)
def test_memory_is_that_of_the_formula(world_size):
    for rank in run(measure_memory, world_size):
        for case, (got, formula) in rank.items():
            for part in ("parameters", "gradients", "optimizer", "total"):
                expected = getattr(formula, part)
                assert getattr(got, part) == pytest.approx(expected, rel=0.05), (case, part)


def test_formula_is_table_1_of_the_paper():
    # GB per GPU of a 7.5B model: stage -> {ranks: GB}
    table = {1: {4: 52.5, 64: 31.4}, 2: {4: 41.3, 64: 16.6}, 3: {4: 30, 64: 1.88}}
    for stage, row in table.items():
        for ranks, expected in row.items():
            assert formula_bytes(7.5e9, ranks, stage).total / 1e9 == pytest.approx(
                expected, rel=4e-3
            )


def train_mixed():
    dist.init_process_group("gloo")
    ends = {}
    for engine in (Stage1, Stage2):
        torch.manual_seed(0)
        model = Gpt().to(torch.bfloat16)
        optimizer = engine(master_dtype=torch.float32).optimize(
            model.parameters(), torch.optim.SGD, lr=1e-4
        )
        before = [p.detach().float() for p in model.parameters()]
        sums = [torch.zeros(p.shape) for p in model.parameters()]
        for inputs, targets in Gpt.batches(20):
            optimizer.zero_grad()
            model(Plain().share(inputs), Plain().share(targets)).backward()
            for total, param in zip(sums, model.parameters(), strict=True):
                if engine is Stage1:
                    grad = param.grad.float()
                    dist.all_reduce(grad)
                    total += grad / dist.get_world_size()
            optimizer.step()
        state = optimizer.full_state_dict()["state"]
        masters = [state[i]["master"] for i in range(len(before))]
        ends[engine.__name__] = (before, sums, masters, [p.detach() for p in model.parameters()])
    dist.barrier()
    dist.destroy_process_group()
    return ends


def test_master_copies_add_up_what_bf16_would_round_away():
    for rank in run(train_mixed, 2):
        before, sums, masters, params = rank["Stage1"]
        for start, total, master, param in zip(before, sums, masters, params, strict=True):
            torch.testing.assert_close(master, start - 1e-4 * total, rtol=1e-3, atol=1e-5)
            assert torch.equal(param, master.to(torch.bfloat16))
            # Rounding after each step would have lost it: the updates are below half an ulp.
        moved = sum((m - s).abs().sum() for m, s in zip(masters, before, strict=True))
        assert moved > 0
        for master, other in zip(masters, rank["Stage2"][2], strict=True):
            torch.testing.assert_close(master, other, rtol=1e-3, atol=1e-5)
        for param, master in zip(rank["Stage2"][3], rank["Stage2"][2], strict=True):
            assert torch.equal(param, master.to(torch.bfloat16))


# -- who owns what -------------------------------------------------------------------------------


def state_numels():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    owned = {}
    for engine in (Stage1, Stage2):
        optimizer = engine().optimize(model.parameters(), torch.optim.Adam)
        owned[engine.__name__] = sum(p.numel() for b in optimizer.buckets for p in b.owned)
    dist.barrier()
    dist.destroy_process_group()
    return owned


def test_weights_and_biases_are_balanced():
    total = 8 * (32 * 32 + 32)
    for world_size in (2, 4):  # dealt out by index, rank 0 of 2 would have all the weights
        shares = run(state_numels, world_size)
        assert {each["Stage1"] for each in shares} == {total // world_size}
        assert {each["Stage2"] for each in shares} == {total // world_size}
    shares = run(state_numels, 3)
    assert max(each["Stage1"] for each in shares) <= 3 * (32 * 32 + 32)  # of 8 layers
    # Every tensor is a bucket here, cut into thirds that are rounded up.
    assert max(each["Stage2"] for each in shares) == 8 * (-(-32 * 32 // 3) + -(-32 // 3))


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 6))
def test_every_element_has_one_owner(numels, world_size):
    for cut in (by_element, by_parameter):
        layout = cut(numels, world_size)
        found = [[0] * numel for numel in numels]
        for pieces, size in zip(layout.rows, layout.sizes, strict=True):
            end = 0
            for piece in pieces:
                assert piece.offset == end  # rows have no holes
                end += piece.numel
                for i in range(piece.begin, piece.end):
                    found[piece.index][i] += 1
            assert end <= size
        assert all(count == 1 for row in found for count in row)
    equal, whole = by_element(numels, world_size), by_parameter(numels, world_size)
    assert set(equal.sizes) == {-(-sum(numels) // world_size)}
    assert sum(whole.sizes) == sum(numels)
    if numels:
        assert max(whole.sizes) <= sum(numels) / world_size + max(numels)


# -- when things travel --------------------------------------------------------------------------


def trace_backward():
    """The order in which gradients appear and rows are sent."""
    dist.init_process_group("gloo")
    events = []
    reduce_rows = exchange.reduce_rows

    def spy(rows, sizes, *args, **how):
        events.append(("send", rows.numel()))
        return reduce_rows(rows, sizes, *args, **how)

    exchange.reduce_rows = spy
    model = build("gpt")
    optimizer = Stage2(bucket_bytes=1000).optimize(model.parameters(), torch.optim.SGD, lr=0.1)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: events.append(("gradient", p.grad)))
    inputs, targets = Gpt.batches(1)[0]
    with optimizer.no_sync():
        model(inputs, targets).backward()
    silent = len([e for e in events if e[0] == "send"])
    events.clear()
    model(inputs, targets).backward()
    left = [p.grad for p in model.parameters()]
    kinds = [kind for kind, _ in events]
    dropped = all(grad is None for kind, grad in events if kind == "gradient")
    dist.barrier()
    dist.destroy_process_group()
    return kinds, silent, left, dropped, len(optimizer.buckets)


def test_gradients_leave_during_backward_and_are_freed():
    for kinds, silent, left, dropped, num_buckets in run(trace_backward, 2):
        assert silent == 0
        assert num_buckets > 4
        assert kinds.count("send") == num_buckets
        # All but the last bucket are on their way before the last gradient has appeared.
        last = len(kinds) - 1 - kinds[::-1].index("gradient")
        assert kinds[:last].count("send") >= num_buckets - 1
        assert left == [None] * len(left)
        assert dropped


# -- wrong use -----------------------------------------------------------------------------------


class Own(torch.optim.SGD):
    pass


def misuse():
    dist.init_process_group("gloo")
    inputs, targets = Gpt.batches(1)[0]
    with pytest.raises(ValueError, match="LBFGS needs all parameters in one place"):
        ShardedOptimizer(build().parameters(), torch.optim.LBFGS)
    with pytest.raises(ValueError, match="Adafactor looks at whole parameters"):
        Zero2Optimizer(build().parameters(), torch.optim.Adafactor)
    with pytest.raises(ValueError, match="empty parameter list"):
        ShardedOptimizer([], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="bucket_bytes must be positive"):
        ShardedOptimizer(build().parameters(), torch.optim.SGD, bucket_bytes=0)
    with pytest.raises(ValueError, match="not contiguous"):
        Zero2Optimizer([nn.Parameter(torch.zeros(4, 3).t())], Own, lr=0.1)
    shared = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="more than one parameter group"):
        ShardedOptimizer([{"params": [shared]}, {"params": [shared]}], Own, lr=0.1)
    twice = ShardedOptimizer([shared, shared], Own, lr=0.1)
    assert len(twice.param_groups[0]["params"]) == 1
    # Ranks that hold different models say so at once, and those with other values take rank 0's.
    rank = dist.get_rank()
    for make in (
        lambda m: ShardedOptimizer(m.parameters(), Own, lr=0.1),
        lambda m: Zero2Optimizer(m.parameters(), Own, lr=0.1),
        lambda m: Zero3(m),
    ):
        for other in (nn.Linear(3, 2 + rank), nn.Linear(3, 2, bias=rank == 0)):
            with pytest.raises(MismatchError, match=rf"\[rank {rank}\] .*rank 1 has"):
                make(other)
    for options in ({"average_gradients": True}, {}):
        torch.manual_seed(rank)
        other = nn.Linear(3, 2)
        kind = ShardedOptimizer if options else Zero2Optimizer
        kind(other.parameters(), Own, lr=0.1, **options)
        weights = [torch.empty_like(other.weight) for _ in range(2)]
        dist.all_gather(weights, other.weight.detach())
        assert torch.equal(*weights)
    # A gradient that is already the average must not be averaged again with a new one.
    model = build()
    optimizer = ShardedOptimizer(model.parameters(), Own, average_gradients=True, lr=0.1)
    model(inputs, targets).backward()
    optimizer.reduce_gradients()
    optimizer.reduce_gradients()
    model(inputs, targets).backward()
    with pytest.raises(RuntimeError, match=r"\[rank \d\] backward\(\) ran after"):
        optimizer.step()
    model = build()
    optimizer = Zero2Optimizer(model.parameters(), Own, lr=0.1)
    with optimizer.no_sync():
        model(inputs, targets).backward()
    with pytest.raises(RuntimeError, match=r"\[rank \d\].*inside no_sync"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = ShardedOptimizer(embedding.parameters(), Own, average_gradients=True, lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense"):
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def test_wrong_use_is_refused():
    run(misuse, 2)


# -- with loss scaling and clipping --------------------------------------------------------------


STEPS, OVERFLOWS_AT = 11, 2  # at this step the last rank's loss is infinite


def make_mlp(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def loss_of(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def mlp_batches(dtype):
    torch.manual_seed(1)
    return [(torch.randn(12, 5).to(dtype), torch.randn(12, 3).to(dtype)) for _ in range(STEPS)]


def scaled_steps(kind):
    """Parameters after a run with a scaler and clipping, the scales, and the norms."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_mlp(torch.float32)
    wrapped, holder = model, None
    if kind == "stage 1, DDP":
        wrapped = DistributedDataParallel(model)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    elif kind == "stage 3":
        holder = Zero3(model, units=[model[0]])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    elif kind == "stage 1":
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, average_gradients=True, lr=0.1
        )
    else:
        # Masters in fp64, so that the path of copies is taken.
        dtype = torch.float64 if "masters" in kind else None
        optimizer = Zero2Optimizer(
            model.parameters(), torch.optim.AdamW, master_dtype=dtype, lr=0.1
        )
    scaler = GradScaler(init_scale=1024.0, growth_interval=3, group=dist.group.WORLD)
    scales, norms = [], []
    for step, batch in enumerate(mlp_batches(torch.float32)):
        share = [part.chunk(world_size)[rank] for part in batch]
        factor = float("inf") if step == OVERFLOWS_AT and rank == world_size - 1 else 1.0
        done = accumulate_step(
            wrapped,
            [share],
            lambda m, b, by=factor: loss_of(m, b) * by,
            optimizer,
            scaler=scaler,
            max_norm=0.5,
        )
        norms.append(float(done.grad_norm))
        scales.append(scaler.get_scale())
    values = holder.full_state_dict() if holder else model.state_dict()
    return {name: value.clone() for name, value in values.items()}, scales, norms


KINDS = ("stage 1, DDP", "stage 1", "stage 2", "stage 2, masters", "stage 3")


def scaled_all():
    dist.init_process_group("gloo")
    done = {kind: scaled_steps(kind) for kind in KINDS}
    misuse = []
    optimizer = Zero2Optimizer(make_mlp(torch.float32).parameters(), torch.optim.SGD, lr=0.1)
    for scaler in (GradScaler(), GradScaler(group=dist.group.WORLD)):  # and no gradients
        try:
            scaler.unscale_(optimizer)
        except (ValueError, RuntimeError) as error:
            misuse.append(str(error))
    dist.barrier()
    dist.destroy_process_group()
    return done, misuse


@pytest.mark.parametrize("world_size", WORLDS)
def test_scaling_and_clipping_equal_one_process(world_size):
    model = make_mlp(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    norms = []
    for step, batch in enumerate(mlp_batches(torch.float64)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        if step != OVERFLOWS_AT:
            optimizer.step()
    results = run(scaled_all, world_size, deadline_s=120)
    for done, misuse in results:
        for kind, (values, scales, got) in done.items():
            for name, value in model.state_dict().items():
                torch.testing.assert_close(
                    values[name].double(), value, rtol=1e-3, atol=1e-4, msg=f"{kind}: {name}"
                )
            assert scales == [1024, 1024, 512, 512, 512, *[1024] * 3, *[2048] * 3], kind
            finite = [i for i in range(STEPS) if i != OVERFLOWS_AT]
            assert [got[i] for i in finite] == pytest.approx([norms[i] for i in finite], rel=1e-3)
        # Nobody divides nothing and then steps with scaled gradients.
        wanted = ["no group", "no parameter"] if world_size > 1 else ["no parameter"] * 2
        assert len(misuse) == 2
        assert all(text in message for text, message in zip(wanted, misuse, strict=True))


def only_the_models_zero_grad():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for kind in (ShardedOptimizer, Zero2Optimizer):
        for master_dtype in (None, torch.float64):
            for overflow in (False, True):
                model = nn.Linear(3, 1, bias=False)
                nn.init.ones_(model.weight)
                options = {"average_gradients": True} if kind is ShardedOptimizer else {}
                optimizer = kind(
                    model.parameters(),
                    torch.optim.SGD,
                    lr=0.5,
                    master_dtype=master_dtype,
                    **options,
                )
                scaler = GradScaler(4.0, group=dist.group.WORLD)
                for step in range(2):
                    model.zero_grad()  # not the optimizer's
                    x = torch.full((1, 3), rank + 1.0)
                    x = x * torch.inf if overflow and step == 0 else x
                    scaler.scale(model(x).sum()).backward()
                    scaler.step(optimizer)
                    scaler.update()
                steps = 1 if overflow else 2
                expected = [1 - steps * 0.5 * 1.5] * 3
                assert model.weight[0].tolist() == expected, (kind, master_dtype, overflow)
    dist.barrier()


def test_a_loop_may_clear_the_models_gradients_only():
    run(only_the_models_zero_grad, 2)


def group_without_parameters_on_one_rank():
    dist.init_process_group("gloo")
    groups = [
        {"params": nn.Linear(3, 3).parameters()},
        {"params": 5 if dist.get_rank() == 1 else []},
    ]
    with pytest.raises((TypeError, ValueError), match="'int' object is not iterable"):
        ShardedOptimizer(groups, torch.optim.SGD, lr=0.1)


def test_every_rank_hears_of_a_group_that_one_rank_cannot_read():
    run(group_without_parameters_on_one_rank, 3)
