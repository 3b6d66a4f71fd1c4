"""ZeRO-3 against stock torch in one process, in float64."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_helper import STEPS, Gpt, Plain, build, compare, compare_optimizer, train

from minidist.cost.comm import collective_seconds
from minidist.emulate import Charged, ChargePlan, Cluster, Link
from minidist.emulate import run as run_emulated
from minidist.launch import run
from minidist.parallel.data import clip_grad_norm
from minidist.parallel.zero import Zero3, count_bytes, exchange, flat, formula_bytes, memory_limit

WORLDS = (1, 2, 3, 4)


class Stage3(Plain):
    """ZeRO-3 with a unit per block."""

    def wrap(self, model):
        options = dict(self.options)
        if options.pop("nested", False):
            options["units"] = [*model.blocks, *(block.mlp for block in model.blocks)]
        if options.pop("every_layer", False):
            gpt = model.gpt
            options["units"] = [gpt.token_embedding, gpt.position_embedding, *gpt.blocks, gpt.head]
        if options.pop("one_unit", False):
            options["units"] = []
        where = options.pop("checkpointing", None)
        self.zero = Zero3(model, **({"units": model.blocks} | options))
        if where == "outside the unit":
            for i, block in enumerate(model.blocks):
                model.blocks[i] = Recomputed(block)
        elif where == "inside the unit":
            for block in model.blocks:
                block.mlp.forward = functools.partial(
                    checkpoint, block.mlp.forward, use_reentrant=False
                )
        elif where == "two units at once":
            model.gpt.blocks = nn.ModuleList([Recomputed(nn.Sequential(*model.blocks))])
        return model

    def clip(self, model, max_norm, norm_type):
        return self.zero.clip_grad_norm_(max_norm, norm_type).item()

    def no_sync(self):
        return self.zero.no_sync()

    def values(self, model):
        return self.zero.full_state_dict()

    def optimizer_state(self):
        return self.zero.full_optimizer_state_dict(self.optimizer)

    def load_optimizer_state(self, state):
        self.zero.load_optimizer_state_dict(self.optimizer, state)


class Recomputed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


SGD = {"optimizer": "SGD", "hyper": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}
RARE = {"lr": 0.02, "weight_decay": 0.5, "eps": 1e-4}
CASES = {
    "adamw": {},
    "sgd": SGD,
    "tied, groups": {"config": {"tied": True}, "groups": True},
    "tied and frozen": {"model": "frozen"},
    "scheduler": {"schedule": True},
    "closure": {"closure": True},
    "clip": {"clip": (0.05, 2.0)},
    "clip by largest": {"clip": (0.001, math.inf), **SGD},
    "sometimes used": {"model": "sometimes", "hyper": RARE},
    "fewer than ranks": {"model": "tiny", "schedule": True},
    "accumulation": {"accumulate": 3},
    "accumulation without sync": {"accumulate": 3, "skip_sync": True, "clip": (0.05, 2.0)},
    "sometimes, without sync": {
        "model": "sometimes",
        "hyper": RARE,
        "accumulate": 3,
        "skip_sync": True,
    },
}
OPTIONS = {
    "default": {},
    "one unit": {"one_unit": True},
    "nested": {"nested": True},
    "unit per layer": {"every_layer": True},
    "kept after forward": {"reshard_after_forward": False},
    "no prefetch": {"prefetch": 0},
    "prefetch 3": {"prefetch": 3},
    "offload": {"offload": True},
    "checkpoint outside": {"checkpointing": "outside the unit"},
    "checkpoint inside": {"checkpointing": "inside the unit"},
    "checkpoint of two units": {"checkpointing": "two units at once"},
}


EVERYWHERE = ("nested", "offload", "checkpoint outside")  # the rest on 2 and 3 ranks


def train_all():
    dist.init_process_group("gloo")
    done = {}
    for name, case in CASES.items():
        done["default", name] = train(Stage3(), **case)
    n = dist.get_world_size()
    for option, options in OPTIONS.items():
        if n in (2, 3) or option in EVERYWHERE:
            done[option, "adamw"] = train(Stage3(**options))
    if n in (2, 3):
        for option in ("nested", "unit per layer"):
            for case in ("tied, groups", "accumulation without sync"):
                done[option, case] = train(Stage3(**OPTIONS[option]), **CASES[case])
    dist.barrier()
    dist.destroy_process_group()
    return done


@functools.cache
def oracle(name):
    return train(Plain(), **CASES[name])


@pytest.mark.parametrize("world_size", WORLDS)
def test_steps_equal_one_process(world_size):
    results = run(train_all, world_size, deadline_s=200)
    for option, name in results[0]:
        expected = oracle(name)
        got = [rank[option, name] for rank in results]
        compare(got, expected)
        compare_optimizer(got[0]["optimizer"], expected["optimizer"])


# -- one world of two ranks, many questions --------------------------------------------------------


class Spy:
    """Counts all-gathers and reduce-scatters, and how many elements are whole at most."""

    def __init__(self):
        self.events = []
        self.gather_rows, self.reduce_rows = exchange.gather_rows, exchange.reduce_rows

    def __enter__(self):
        def gather_rows(rows, row, sizes, group):
            self.events.append(("gather", rows.numel(), rows.dtype))
            return self.gather_rows(rows, row, sizes, group)

        def reduce_rows(rows, sizes, group, dtype, **how):
            self.events.append(("reduce", rows.numel(), rows.dtype))
            return self.reduce_rows(rows, sizes, group, dtype, **how)

        flat.gather_rows, exchange.reduce_rows = gather_rows, reduce_rows
        return self

    def __exit__(self, *args):
        flat.gather_rows, exchange.reduce_rows = self.gather_rows, self.reduce_rows

    def count(self, kind):
        return sum(event[0] == kind for event in self.events)


def whole_elements(zero):
    return sum(f.full.untyped_storage().nbytes() // f.full.element_size() for f in zero.flats)


def share(batch):
    return [Plain().share(part) for part in batch]


def count_collectives():
    dist.init_process_group("gloo")
    found = {}
    batches = [share(batch) for batch in Gpt.batches(10)]
    for name, options in (("resharded", {}), ("kept", {"reshard_after_forward": False})):
        model = build(num_layers=4)
        zero = Zero3(model, units=model.blocks, **options)
        most = []

        def measure(*_, most=most, zero=zero):
            most.append(whole_elements(zero))

        for block in model.blocks:
            block.mlp.register_forward_hook(measure)
            block.mlp.register_full_backward_hook(measure)
        for inputs in batches[:2]:
            model(*inputs).backward()
        most.clear()
        with Spy() as spy:
            model(*batches[2]).backward()
        with Spy() as silent, zero.no_sync():
            model(*batches[3]).backward()
        with Spy() as evaluation, torch.no_grad():
            model(*batches[4])
        left = whole_elements(zero)
        sizes = [sum(f.layout.sizes) for unit in zero.units for f in unit.flats]
        found[name] = (
            (spy.count("gather"), spy.count("reduce")),
            (silent.count("gather"), silent.count("reduce")),
            (evaluation.count("gather"), evaluation.count("reduce")),
            max(most),
            left,
            sizes,
        )
    # Checkpointing two blocks at once: while they are computed again, no more than they are whole.
    model = build(num_layers=4)
    blocks = list(model.blocks)
    zero = Zero3(model, units=blocks)
    pairs = [nn.Sequential(*blocks[:2]), nn.Sequential(*blocks[2:])]
    model.gpt.blocks = nn.ModuleList([Recomputed(pair) for pair in pairs])
    most = []
    for block in blocks:
        block.mlp.register_full_backward_hook(lambda *_: most.append(whole_elements(zero)))
    for inputs in batches[:3]:
        most.clear()
        model(*inputs).backward()
    found["recomputed"] = max(most)
    # Overlap: the gather of the next unit starts before this unit computes.
    model = build(num_layers=4)
    Zero3(model, units=model.blocks)
    for inputs in batches[:2]:
        model(*inputs).backward()
    with Spy() as spy:
        for block in model.blocks:
            block.attention.register_forward_hook(lambda *_: spy.events.append(("compute",)))
            block.attention.query.register_full_backward_hook(
                lambda *_: spy.events.append(("compute",))
            )
        model(*batches[2]).backward()
    order = "".join(event[0][0] for event in spy.events)
    dist.barrier()
    dist.destroy_process_group()
    return found, order


def test_collectives_are_as_few_and_as_early_as_promised():
    for found, order in run(count_collectives, 2):
        counts, silent, evaluation, most, left, sizes = found["resharded"]
        root, block = sizes[0], sizes[1]
        # 4 blocks and the root: gathered for forward; 3 blocks again for backward.
        assert counts == (5 + 3, 5)
        assert silent == (5 + 3, 0)
        assert evaluation == (5, 0)
        assert most == root + 2 * block  # the root, the unit that computes, the next one
        assert left == 0
        assert found["recomputed"] == root + 2 * block
        counts, silent, evaluation, most, left, sizes = found["kept"]
        assert (counts, silent, evaluation) == ((5, 5), (5, 0), (5, 0))
        assert left == 0
        # r(oot), g(ather), c(ompute): forward, then backward with the reduce-scatters behind.
        assert order == "gg" + "gc" * 3 + "c" + "g" + "c" + "rgc" * 2 + "rc" + "rr", order


class Policy:
    """Stands for any policy object: only these names are read."""

    def __init__(self, param_dtype=None, reduce_dtype=None, output_dtype=None):
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.output_dtype = output_dtype


def mixed_precision():
    dist.init_process_group("gloo")
    half = torch.bfloat16
    torch.manual_seed(0)
    model = Gpt().float()
    oracle = Gpt().float()
    oracle.load_state_dict(model.state_dict())
    dtypes = []
    model.blocks[0].mlp.up.register_forward_hook(
        lambda module, args, out: dtypes.append((module.weight.dtype, args[0].dtype, out.dtype))
    )
    policy = Policy(half, torch.float32)
    zero = Zero3(model, units=model.blocks, policy=policy)
    with Spy() as spy:
        model(*share(Gpt.batches(1)[0])).backward()
    gradients = dict.fromkeys(e[2] for e in spy.events if e[0] == "reduce")
    gathers = dict.fromkeys(e[2] for e in spy.events if e[0] == "gather")
    # The oracle computes with the same rounding: bf16 copies of fp32 parameters.
    copies = {name: p.to(half) for name, p in oracle.named_parameters()}
    for half_copy in copies.values():
        half_copy.retain_grad()
    torch.func.functional_call(oracle, copies, tuple(Gpt.batches(1)[0])).backward()
    total = sum(copies[name].grad.float().square().sum() for name in copies).sqrt().item()
    norm = zero.clip_grad_norm_(1e9).item()
    shards = {(p.dtype, p.grad.dtype) for p in model.parameters() if p.numel()}
    torch.manual_seed(0)
    model = Gpt().float()
    Zero3(model, units=model.blocks, policy=Policy(half, half, torch.float64))
    with Spy() as spy:
        loss = model(*share(Gpt.batches(1)[0]))
        loss.backward()
    narrow = {e[2] for e in spy.events}
    dist.barrier()
    dist.destroy_process_group()
    return dtypes, list(gathers), list(gradients), shards, (norm, total), loss.dtype, narrow


def test_mixed_precision():
    half, single = torch.bfloat16, torch.float32
    for dtypes, gathers, gradients, shards, norms, out, narrow in run(mixed_precision, 2):
        assert dtypes == [(half, half, half)]
        assert gathers == [half]
        assert gradients == [single]
        assert shards == {(single, single)}
        assert norms[0] == pytest.approx(norms[1], rel=0.02)
        assert out == torch.float64
        assert narrow == {half}


# -- construction on the meta device, memory -------------------------------------------------------


class Stack(nn.Module):
    """No reset_parameters of its own; buffers; layers that initialise themselves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 7, bias=False)
        )
        self.orthogonal = nn.Embedding(6, 7, padding_idx=2)

    def forward(self, x, i):
        return self.layers(x) + self.orthogonal(i)


def meta_init():
    dist.init_process_group("gloo")
    found = {}
    config = {"num_layers": 3, "tied": True}
    for name, make, blocks in (
        ("gpt", lambda: Gpt(**config).gpt, lambda m: m.blocks),
        ("stack", Stack, lambda m: [m.layers]),
    ):
        torch.manual_seed(7)
        whole = make()
        if name == "gpt":
            torch.manual_seed(7)
            whole.reset_parameters()
        with torch.device("meta"):
            model = make()
        torch.manual_seed(7 + dist.get_rank())  # rank 0's seed counts
        zero = Zero3(model, units=blocks(model))
        found[name] = (zero.full_state_dict(), whole.state_dict())

    def own_init(module):
        for param in module.parameters():
            nn.init.trunc_normal_(param, std=0.5)

    with torch.device("meta"):
        layer = nn.Linear(5, 3)
    torch.manual_seed(3)
    zero = Zero3(layer, init=own_init)
    torch.manual_seed(3)
    whole = nn.Linear(5, 3, device="meta").to_empty(device="cpu")
    own_init(whole)
    found["own"] = (zero.full_state_dict(), whole.state_dict())

    class Lost(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.arange(4.0))

    with torch.device("meta"):
        lost = Lost()
    with pytest.raises(ValueError, match=r"nothing sets the values of \['scale', 'table'\]"):
        Zero3(lost)

    def back_and_forth(module):
        module.weight.normal_()
        module.bias.zero_()
        module.weight.mul_(2)

    with torch.device("meta"):
        layer = nn.Linear(5, 3)
    with pytest.raises(ValueError, match=r"comes back to weight"):
        Zero3(layer, init=back_and_forth)
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_meta_device_gives_the_values_of_a_seeded_initialisation(world_size):
    for found in run(meta_init, world_size):
        for got, expected in found.values():
            assert list(got) == list(expected)
            for name, value in expected.items():
                assert torch.equal(got[name], value), name


WIDE = {"vocab_size": 32, "width": 64, "num_layers": 6, "num_heads": 2, "mlp_ratio": 4}


def measure_memory():
    dist.init_process_group("gloo")
    found = {}
    for mixed in (False, True):
        model = Gpt(**WIDE)
        num_params = sum(p.numel() for p in model.parameters())
        policy = Policy(torch.bfloat16, torch.bfloat16) if mixed else None
        Zero3(model, units=model.blocks, policy=policy)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(*Gpt.batches(1)[0]).backward()
            optimizer.step()
        formula = formula_bytes(num_params, dist.get_world_size(), 3)
        found[mixed] = (count_bytes(model, optimizer), formula)
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", WORLDS)
def test_memory_is_that_of_the_formula(world_size):
    for rank in run(measure_memory, world_size):
        for got, formula in rank.values():
            assert got.total == pytest.approx(formula.total, rel=0.05)


def train_within(stage, budget_bytes):
    """Two Adam steps of a model of 20M parameters: 80 MB, 320 MB with gradients and momenta."""
    dist.init_process_group("gloo")
    warm = nn.Linear(4, 4)
    Zero3(warm)  # threads of gloo and autograd have their stacks now
    warm(torch.ones(2, 4)).sum().backward()
    torch.optim.Adam(warm.parameters(), foreach=False).step()
    width, layers = 500, 80
    with memory_limit(budget_bytes):
        try:
            with torch.device("meta"):
                model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
            torch.manual_seed(0)
            if stage == 3:
                Zero3(model, units=list(model))
            else:
                model.to_empty(device="cpu")
                for layer in model:
                    layer.reset_parameters()
            optimizer = torch.optim.Adam(model.parameters(), foreach=False)
            for _ in range(2):
                loss = model(torch.ones(2, width)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            outcome = "trained"
        except (RuntimeError, MemoryError) as error:
            outcome = f"failed: {error}"
    # With the limit gone, ranks that failed can still leave together.
    dist.barrier()
    dist.destroy_process_group()
    return outcome


def test_a_model_that_fits_no_rank_trains():
    budget_bytes = 170 << 20  # ZeRO-3 at 4 ranks: 80 MB and a few layers; plain: 320 MB
    assert set(run(train_within, 4, 3, budget_bytes, deadline_s=120)) == {"trained"}
    (plain,) = run(train_within, 1, 0, budget_bytes)
    assert plain.startswith("failed")
    assert "allocate" in plain
    assert run(train_within, 1, 0, 2 * budget_bytes + (60 << 20)) == ["trained"]


# -- state dicts ---------------------------------------------------------------------------------


def train_and_save(folder, start, steps):
    dist.init_process_group("gloo")
    engine = Stage3()
    done = train(engine, groups=True, steps=steps, start=start)
    engine.zero.save_sharded(folder, engine.optimizer)
    dist.barrier()
    dist.destroy_process_group()
    return done


def load_and_train(folder, steps):
    dist.init_process_group("gloo")
    model = build()
    for param in model.parameters():
        nn.init.zeros_(param)
    zero = Zero3(model, units=model.blocks)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if "bias" not in n]},
            {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.3},
        ],
        lr=123.0,
    )
    zero.load_sharded(folder, optimizer)
    for inputs in Gpt.batches(10)[10 - steps :]:
        optimizer.zero_grad()
        model(*share(inputs)).backward()
        optimizer.step()
    on_one = zero.full_state_dict(rank0_only=True)
    state = zero.full_optimizer_state_dict(optimizer)
    # A part goes back, and only to its own rank.
    zero.load_optimizer_state_dict(optimizer, zero.sharded_optimizer_state_dict(optimizer))
    part = zero.sharded_optimizer_state_dict(optimizer)
    with pytest.raises(ValueError, match=r"\[rank \d\].*merge the shards"):
        zero.load_optimizer_state_dict(optimizer, {**part, "rank": 17})
    # Rank 0 alone has the state dict, the others have none.
    other = build()
    for param in other.parameters():
        nn.init.ones_(param)
    zero_other = Zero3(other, units=other.blocks)
    zero_other.load_full_state_dict(on_one, from_rank0=True)
    copied = zero_other.full_state_dict()
    # Wrong ones are refused on all ranks, also when only rank 0 can see it.
    wrong = {**on_one, "what.is.this": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"unexpected \['what.is.this'\]"):
        zero_other.load_full_state_dict(wrong, from_rank0=True)
    wrong = {**copied, "gpt.head.weight": torch.zeros(2, 2)}
    with pytest.raises(
        ValueError, match=r"gpt.head.weight: expected shape \(13, 6\), got \(2, 2\)"
    ):
        zero_other.load_full_state_dict(wrong)
    dist.barrier()
    dist.destroy_process_group()
    return on_one, copied, state


def test_a_checkpoint_is_read_by_another_number_of_ranks(tmp_path):
    expected = train(Plain(), groups=True, steps=10)
    first = run(train_and_save, 3, str(tmp_path), None, 4)
    results = run(load_and_train, 2, str(tmp_path), 6)
    assert results[1][0] == {}
    for values in (results[0][0], results[0][1], results[1][1]):
        for name, value in expected["values"].items():
            torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-12)
    compare_optimizer(results[0][2], expected["optimizer"])
    # The full ones go on in stock torch.
    rest = train(Plain(), groups=True, steps=6, start=first[0])
    for name, value in expected["values"].items():
        torch.testing.assert_close(rest["values"][name], value, rtol=1e-9, atol=1e-12)
    # A folder without a rank's file is refused.
    (tmp_path / "rank00001-of-00003.pt").unlink()
    with pytest.raises(Exception, match="expected the files of all ranks"):
        run(load_and_train, 2, str(tmp_path), 6)


# -- unusual use -----------------------------------------------------------------------------------


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.zeroth, self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x, skip):
        x = self.zeroth(x)
        return self.last(x if skip else torch.tanh(self.first(x))).square().mean()


def unusual():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    batches = Gpt.batches(4)
    # Ranks that start apart: rank 0's values count.
    torch.manual_seed(rank)
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(rank + 1.0)
    nn.init.normal_(model.weight)
    weight = model.weight.detach().clone()
    dist.broadcast(weight, 0)
    zero = Zero3(model)
    state = zero.full_state_dict()
    assert torch.equal(state["weight"], weight)
    assert state["running_mean"].tolist() == [1.0] * 3

    # Two forwards before their backwards, a forward without backward, a change in between.
    def losses(model):
        return [model(*share(batch)) for batch in batches[:2]]

    def gradients(reference):
        return torch.cat([p.grad.flatten() for p in reference.parameters()])

    reference = build()
    for batch in batches[:2]:
        reference(*batch).backward()
    for together in (True, False):
        model = build()
        zero = Zero3(model, units=model.blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            optimizer.zero_grad()
            model(*share(batches[3]))
            first, second = losses(model)
            if together:
                (first + second).backward()
            else:
                first.backward()
                second.backward()
            optimizer.step()
        for piece, param in zip(model.parameters(), reference.parameters(), strict=True):
            flat_, index = zero._homes[piece]
            cut = flat_.cuts[index]
            expected = param.grad.flatten()[cut.begin : cut.end]
            if not cut.numel:
                assert piece.grad is None
                continue
            torch.testing.assert_close(piece.grad, expected, rtol=1e-9, atol=1e-14)
        assert whole_elements(zero) == 0

    # Parameters that are kept whole are not used after the optimiser has changed the shards.
    model = build()
    zero = Zero3(model, units=model.blocks, reshard_after_forward=False)
    model(*share(batches[0]))  # no backward
    with torch.no_grad():
        for piece in (piece for each in zero.flats for piece in each.pieces):
            piece.mul_(2)
    doubled = build()
    with torch.no_grad():
        for param in doubled.parameters():
            param.mul_(2)
    torch.testing.assert_close(model(*share(batches[1])), doubled(*share(batches[1])))

    # Look at, and change, whole parameters.
    model = build()
    zero = Zero3(model, units=model.blocks)
    with zero.unsharded(writeback=True), torch.no_grad():
        assert model.gpt.head.weight.shape == (13, 6)
        model.gpt.head.weight.fill_(3.0)
    assert model.gpt.head.weight.dim() == 1
    assert zero.full_state_dict()["gpt.head.weight"].unique().tolist() == [3.0]

    # Freeze and thaw after sharding.
    for frozen in (True, False):
        model.gpt.head.weight.requires_grad_(not frozen)
        zero.discard_gradients()
        model(*share(batches[0])).backward()
        head = model.gpt.head.weight
        assert (head.grad is None) == frozen or not head.numel()
        assert model.gpt.norm.weight.grad is not None or not model.gpt.norm.weight.numel()

    # A unit that runs in no_sync() only: its gradients leave with the next backward outside.
    torch.manual_seed(0)
    model = Skipping().double()
    reference = Skipping().double()
    reference.load_state_dict(model.state_dict())
    zero = Zero3(model, units=[model.first])
    x = Gpt.batches(1)[0][0].double()
    with zero.no_sync():
        model(Plain().share(x), False).backward()
    model(Plain().share(x), True).backward()
    reference(x, False).backward()
    reference(x, True).backward()
    norm = zero.clip_grad_norm_(1e9).item()
    assert norm == pytest.approx(gradients(reference).norm().item(), rel=1e-9)

    # A backward that fails in the middle does not spoil the next one.
    model = build()
    zero = Zero3(model, units=model.blocks)

    def fail(grad):
        raise KeyError("on purpose")

    handle = model.blocks[0].mlp.register_forward_hook(
        lambda m, a, out: out.register_hook(fail) and None
    )
    with pytest.raises(KeyError, match="on purpose"):
        model(*share(batches[0])).backward()
    handle.remove()
    reference = build()
    reference(*batches[0]).backward()
    model(*share(batches[0])).backward()
    norm = zero.clip_grad_norm_(1e9).item()
    assert norm == pytest.approx(gradients(reference).norm().item(), rel=1e-9)

    # A rank's own norm is never taken for that of all; what is not a norm works as ever.
    norms_of_pieces(model, norm)

    # Wrong use.
    with pytest.raises(ValueError, match=r"not modules of the model: \['Linear'\]"):
        Zero3(build(), units=[nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="prefetch must not be negative"):
        Zero3(build(), prefetch=-1)
    with pytest.raises(ValueError, match="no parameters"):
        Zero3(nn.ReLU())
    model = build()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = Zero3(model)
    zero.full_optimizer_state_dict(early)
    with pytest.raises(ValueError, match="made for a different model"):
        zero.full_optimizer_state_dict(torch.optim.SGD(build().parameters(), lr=0.1))
    with zero.no_sync():
        model(*share(batches[0])).backward()
    with pytest.raises(RuntimeError, match=r"\[rank \d\].*inside no_sync"):
        zero.clip_grad_norm_(1.0)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 3])
def test_unusual_and_wrong_use(world_size):
    run(unusual, world_size, deadline_s=120)


def norms_of_pieces(model, norm):
    pieces = [p for p in model.parameters() if p.grad is not None]
    several = dist.get_world_size() > 1
    takers = (
        lambda: nn.utils.clip_grad_norm_(pieces, 1e9),
        lambda: clip_grad_norm(pieces, 1e9),
        lambda: torch.stack([p.grad.norm() for p in pieces]).norm(),
    )
    for take in takers:
        if several:
            with pytest.raises(ValueError, match=r"rank \d.*zero\.clip_grad_norm_"):
                take()
        else:
            assert take().item() == pytest.approx(norm, rel=1e-6)
    over_ranks = clip_grad_norm(pieces, 1e9, shard_group=dist.group.WORLD)
    assert over_ranks.item() == pytest.approx(norm, rel=1e-9)
    grad = pieces[0].grad
    for plain in (grad * 1, copy.deepcopy(grad), pickle.loads(pickle.dumps(grad))):
        assert type(plain) is Tensor
        assert torch.equal(plain, grad.as_subclass(Tensor))


def sub_group():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    model = build()
    zero = Zero3(model, units=model.blocks, group=mine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)
    for batch in Gpt.batches(10)[:STEPS]:
        optimizer.zero_grad()
        part = [each.chunk(2)[rank // 2] for each in batch]
        model(*part).backward()
        optimizer.step()
    done = zero.full_state_dict()
    dist.barrier()
    dist.destroy_process_group()
    return done


def test_a_group_of_some_ranks():
    expected = oracle("adamw")["values"]
    for values in run(sub_group, 4):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-12)


# -- on the emulated cluster, to the last digit ----------------------------------------------------

DEPTH, WIDTH_OF_LAYER = 6, 40


def train_charged(steps):
    """Layers whose time is charged; every layer is a unit."""
    torch.manual_seed(0)
    layers = [Charged(nn.Linear(WIDTH_OF_LAYER, WIDTH_OF_LAYER), i) for i in range(DEPTH)]
    model = nn.Sequential(*layers)
    Zero3(model, units=layers)
    x = torch.ones(2, WIDTH_OF_LAYER, requires_grad=True)
    for _ in range(steps):
        model(x).sum().backward()


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_schedule_is_as_good_as_can_be(world_size):
    forward_s, backward_s = 0.010, 0.020
    plan = ChargePlan((forward_s,) * DEPTH, (backward_s,) * DEPTH, secret=b"zero")
    num_bytes = 4 * (WIDTH_OF_LAYER**2 + WIDTH_OF_LAYER)
    link = Link(bandwidth_bytes_per_s=num_bytes / 0.008, latency_s=1e-6)
    cluster = Cluster(
        name="test",
        nodes=1,
        devices_per_node=world_size,
        intra_node=link,
        inter_node=link,
        peak_flops_per_s=1e12,
        memory_bandwidth_bytes_per_s=1e12,
    )
    ends = [
        run_emulated(train_charged, world_size, cluster, steps, plan=plan)[1].makespan_s
        for steps in (2, 3)
    ]
    # Nothing can compute before the first all-gather, and the last gradients come last.
    gather_s = collective_seconds(
        kind="all_gather", num_bytes=num_bytes, num_ranks=world_size, link=link
    )
    reduce_s = collective_seconds(
        kind="reduce_scatter", num_bytes=num_bytes, num_ranks=world_size, link=link
    )
    best_s = gather_s + DEPTH * (forward_s + backward_s) + reduce_s
    assert best_s - 1e-9 <= ends[1] - ends[0] <= 1.01 * best_s
