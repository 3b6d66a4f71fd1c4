"""Formats against torch.finfo and torch's casts; the scaler against torch's, also on many ranks."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from minidist.data import make_regression
from minidist.launch import run
from minidist.precision import (
    FORMATS,
    GradScaler,
    MasterWeights,
    MixedPrecisionPolicy,
    accumulation_error,
    autocast_step,
    matmul_error,
    round_to,
    spacing,
    underflow_share,
    update_survives,
)

WITH_DTYPE = [fmt for fmt in FORMATS.values() if fmt.dtype is not None]


# ------------------------------------------------------------------ formats


@pytest.mark.parametrize("fmt", WITH_DTYPE, ids=lambda fmt: fmt.name)
def test_formats_agree_with_finfo(fmt):
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max
    assert fmt.epsilon == info.eps
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.storage_bits == info.bits
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == info.bits
    # The smallest subnormal is the bit pattern 1.
    pattern = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[info.bits]
    one = torch.tensor([1], dtype=pattern).view(fmt.dtype)
    assert one.double().item() == fmt.smallest_subnormal


def test_tf32_is_fp32s_range_with_fp16s_precision():
    tf32, fp32, fp16 = FORMATS["tf32"], FORMATS["fp32"], FORMATS["fp16"]
    assert tf32.epsilon == fp16.epsilon == 2**-10
    assert tf32.smallest_normal == fp32.smallest_normal
    assert 0.999 < tf32.max / fp32.max < 1
    assert tf32.dtype is None


@pytest.mark.parametrize("fmt", WITH_DTYPE, ids=lambda fmt: fmt.name)
def test_rounding_is_torchs_cast(fmt):
    generator = torch.Generator().manual_seed(0)
    # All magnitudes, ties, subnormals, and both edges.
    exponent = torch.empty(20000).uniform_(-160, 130, generator=generator)
    values = torch.randn(20000, generator=generator).sign() * torch.exp2(exponent)
    near = torch.randn(20000, generator=generator) * fmt.smallest_normal
    ones = 1 + torch.arange(4000) * fmt.epsilon / 8
    edges = torch.tensor([0.0, -0.0, fmt.max, -fmt.max, fmt.smallest_subnormal, math.nan])
    x = torch.cat([values, near, ones.float(), ones.float() * fmt.smallest_normal, edges])
    if not fmt.has_infinity:  # there torch's versions differ beyond the largest number
        x = x[(x.abs() <= fmt.max) | x.isnan()]
    expected = x.to(fmt.dtype).to(torch.float32)
    torch.testing.assert_close(round_to(x, fmt), expected, rtol=0, atol=0, equal_nan=True)
    if fmt.has_infinity:
        beyond = torch.tensor([math.inf, -math.inf, fmt.max * 1.5, fmt.max * (1 + fmt.epsilon / 8)])
        beyond = beyond.double()
        assert round_to(beyond, fmt).tolist() == [math.inf, -math.inf, math.inf, fmt.max]
    else:
        assert round_to(torch.tensor([1e9, -math.inf]), fmt).tolist() == [fmt.max, -fmt.max]


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=20),
)
def test_rounding_is_idempotent_monotone_and_near(fmt, values):
    x = torch.tensor(sorted(values), dtype=torch.float64)
    y = round_to(x, fmt)
    assert torch.equal(round_to(y, fmt), y)
    assert (y[1:] >= y[:-1]).all()
    inside = x.abs() <= fmt.max
    assert ((y - x).abs() <= spacing(x, fmt) / 2)[inside].all()
    assert ((y - x).abs() <= fmt.epsilon / 2 * x.abs() + fmt.smallest_subnormal / 2)[inside].all()


def test_underflow_and_lost_updates():
    fp16, bf16 = FORMATS["fp16"], FORMATS["bf16"]
    gradients = torch.logspace(-12, 0, 1000, dtype=torch.float64)
    zero, subnormal = underflow_share(gradients, fp16)
    assert zero == pytest.approx((12 + math.log10(fp16.smallest_subnormal / 2)) / 12, abs=2e-3)
    assert subnormal == pytest.approx(math.log10(2 * 2**10) / 12, abs=2e-3)
    assert underflow_share(gradients, bf16) == (0.0, 0.0)
    assert underflow_share(gradients, fp16, scale=2.0**16)[0] < zero - 0.35
    assert underflow_share(torch.zeros(3), fp16) == (0.0, 0.0)
    # Half of epsilon is where an update to 1 is lost.
    for fmt in (fp16, bf16):
        assert not update_survives(1.0, fmt.epsilon / 2, fmt)  # a tie, to even
        assert update_survives(1.0, fmt.epsilon * 0.51, fmt)
    assert update_survives(1.0, 1e-6, FORMATS["fp32"])


def test_comparisons_order_the_formats():
    rows = {(row.format, row.size): row.error for row in matmul_error((16, 64))}
    for size in (16, 64):
        errors = [rows[name, size] for name in ("fp32", "tf32", "bf16", "fp8_e4m3", "fp8_e5m2")]
        assert errors == sorted(errors)
        assert rows["fp32", size] < 1e-6
        # Same mantissa: with inputs near 1, tf32 and fp16 err alike.
        assert rows["fp16", size] == pytest.approx(rows["tf32", size], rel=0.05)
        # Rounding errors are uniform, so a product's is sqrt(2/3) x 2**-8 or so for bf16.
        assert 0.2 * 2**-8 < rows["bf16", size] < 2**-8
    # Against torch's own bf16 product of the same numbers: inputs rounded, sums in fp32.
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator, dtype=torch.float64) for _ in "ab")
    got = (a.bfloat16().float() @ b.bfloat16().float()).double()
    error = ((got - a @ b).norm() / (a @ b).norm()).item()
    assert rows["bf16", 64] == pytest.approx(error, rel=1e-3)
    kept16 = matmul_error((64,), formats=["fp16"], accumulate="fp16")[0]
    assert kept16.error > 2 * rows["fp16", 64]
    assert (kept16.accumulate, kept16.size) == ("fp16", 64)

    rows = {(row.format, row.size): row.error for row in accumulation_error((256, 4096), value=1.0)}
    assert rows["fp32", 4096] == 0.0
    assert rows["fp16", 4096] == 0.5  # stops at 2048
    assert rows["bf16", 256] == 0.0
    assert rows["bf16", 4096] == 1 - 256 / 4096  # stops at 256


# ------------------------------------------------------------------ the scaler, one process


class Pair:
    """The same model twice, one with torch's scaler and one with ours."""

    def __init__(self, **arguments):
        self.models = [self._model(), self._model()]
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in self.models]
        self.scalers = [torch.amp.GradScaler("cpu", **arguments), GradScaler(**arguments)]

    @staticmethod
    def _model():
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    def compare(self):
        theirs, ours = self.scalers
        assert ours.get_scale() == theirs.get_scale()
        assert ours.state_dict() == theirs.state_dict()
        for a, b in zip(self.models[0].parameters(), self.models[1].parameters(), strict=True):
            assert torch.equal(a, b)
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None and b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("unscale_first", [True, False])
@pytest.mark.parametrize("growth_factor", [2.0, 1.7])
def test_our_scaler_does_what_torchs_does(unscale_first, growth_factor):
    pair = Pair(
        init_scale=2.0**100, growth_factor=growth_factor, backoff_factor=0.3, growth_interval=3
    )
    skipped = 0
    for step in range(120):
        bad = {7: math.inf, 8: math.nan, 30: -math.inf}.get(step)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        for model, optimizer, scaler in zip(
            pair.models, pair.optimizers, pair.scalers, strict=True
        ):
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean() * 1e10
            scaler.scale(loss).backward()
            if bad is not None:
                assert model.weight.grad is not None
                model.weight.grad[1, 2] = bad
            if unscale_first:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if scaler is pair.scalers[1]:
                skipped += torch.equal(model.weight, before)
        pair.compare()
    assert 10 < skipped < 60
    assert pair.scalers[1].get_scale() != 2.0**100
    for scaler in pair.scalers:
        scaler.update(64.0)
    pair.compare()


def test_growth_stops_before_infinity():
    pair = Pair(init_scale=2.0**126, growth_interval=1)
    for _ in range(4):
        for model, optimizer, scaler in zip(
            pair.models, pair.optimizers, pair.scalers, strict=True
        ):
            optimizer.zero_grad()
            (model(torch.ones(1, 4)).sum() * 0.0).backward()
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
        pair.compare()
    assert pair.scalers[1].get_scale() == 2.0**127


def test_scaler_state_resumes_and_is_torchs():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    for _ in range(4):
        theirs.scale(model(torch.ones(1, 2)).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
    ours = GradScaler()
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scale() == 16.0
    assert ours.state_dict() == theirs.state_dict()
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(ours.state_dict())
    assert again.state_dict() == ours.state_dict()
    with pytest.raises(RuntimeError, match="disabled"):
        ours.load_state_dict(GradScaler(enabled=False).state_dict())


def test_wrong_order_and_wrong_arguments():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fresh() -> GradScaler:
        scaler = GradScaler()
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        return scaler

    scaler = fresh()
    with pytest.raises(RuntimeError, match="update: no step"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_: called twice"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="step: called twice"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="called after step"):
        scaler.unscale_(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, lambda: None)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, closure=lambda: None)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="no parameter of the optimizer has a gradient"):
        scaler.step(optimizer)
    half = torch.optim.SGD(nn.Linear(2, 2).half().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="fp16 parameter of shape"):
        GradScaler().unscale_(half)
    for bad in ((0.0, 2.0, 0.5, 1), (1.0, 1.0, 0.5, 1), (1.0, 2.0, 1.0, 1), (1.0, 2.0, 0.5, 0)):
        with pytest.raises(ValueError, match="GradScaler"):
            GradScaler(*bad)
    # Disabled, it is not there.
    off = GradScaler(enabled=False)
    loss = model(torch.ones(1, 2)).sum()
    assert off.scale(loss) is loss
    loss.backward()
    off.unscale_(optimizer)
    off.step(optimizer)
    off.update()
    assert off.get_scale() == 1.0
    assert not off.is_enabled()


# ------------------------------------------------------------------ training


def regression(seed: int = 0):
    return make_regression(64, 8, 4, seed=seed)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def tiny_loss(outputs, targets):
    """Mean squared error in units that make every fp16 gradient less than 3e-8."""
    return F.mse_loss(outputs.float(), targets) * 1e-7


def fp16_training(scaler, steps: int = 60) -> tuple[float, float]:
    """Loss before and after; parameters and activations are fp16, masters fp32."""
    x, y = regression()
    model = make_model().half()
    optimizer = MasterWeights(model.parameters(), lambda p: torch.optim.SGD(p, lr=1e6))
    losses = []
    for _ in range(steps):
        losses.append(F.mse_loss(model(x.half()).float(), y).item())
        optimizer.zero_grad()
        loss = tiny_loss(model(x.half()), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return losses[0], losses[-1]


def test_fp16_needs_the_scaler():
    before, after = fp16_training(None)
    assert after == before  # every gradient was zero
    scaler = GradScaler(init_scale=2.0**50, growth_interval=10)
    before, after = fp16_training(scaler)
    assert after < 0.3 * before
    assert scaler.get_scale() < 2.0**50  # it started too large, and backed off
    # fp32 gets little further (no step of it was skipped).
    x, y = regression()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    for _ in range(60):
        optimizer.zero_grad()
        tiny_loss(model(x), y).backward()
        optimizer.step()
    assert after < 1.5 * F.mse_loss(model(x), y).item()


def test_fp16_gradients_that_overflow_diverge_without_the_scaler():
    """The other side: large gradients. Unchecked they make the weights inf and NaN."""
    x, y = regression()

    def train(scaler):
        model = make_model().half()
        optimizer = MasterWeights(model.parameters(), lambda p: torch.optim.SGD(p, lr=1e-7))
        for step in range(30):
            optimizer.zero_grad()
            factor = 1e8 if step == 5 else 1e4  # one batch with an extreme loss
            loss = F.mse_loss(model(x.half()).float(), y) * factor
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return F.mse_loss(model(x.half()).float(), y).item()

    assert not math.isfinite(train(None))
    assert train(GradScaler(init_scale=1.0)) < 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_keep_small_updates(dtype):
    """Ten steps of 1e-4 from 1.0: lost in 16 bits one by one, not in the master."""
    parameter = nn.Parameter(torch.ones(5, dtype=dtype))
    naive = nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer = MasterWeights([parameter], lambda p: torch.optim.SGD(p, lr=1e-4))
    plain = torch.optim.SGD([naive], lr=1e-4)
    for _ in range(100):
        for p, o in ((parameter, optimizer), (naive, plain)):
            o.zero_grad()
            (p.float().sum() * -1.0).backward()
            o.step()
    assert (naive == 1.0).all()
    torch.testing.assert_close(optimizer.masters[0].detach(), torch.full((5,), 1.01))
    assert (parameter.float() - 1.01).abs().max() <= FORMATS["bf16"].epsilon / 2
    # Resume: the master, not the rounded parameter.
    other = nn.Parameter(torch.zeros(5, dtype=dtype))
    resumed = MasterWeights([other], lambda p: torch.optim.SGD(p, lr=1e-4))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(resumed.masters[0], optimizer.masters[0])
    assert torch.equal(other, parameter)
    with pytest.raises(ValueError, match="masters of shapes"):
        MasterWeights([nn.Parameter(torch.zeros(4))], plain.__class__).load_state_dict(
            optimizer.state_dict()
        )
    with pytest.raises(ValueError, match="trainable floating-point"):
        MasterWeights([], plain.__class__)


def test_master_weights_follow_an_fp32_optimiser():
    """10 AdamW steps with fp32 parameters and 2 micro-batches are the optimiser's, bit for bit."""
    a, b = make_model(), make_model()
    ours = MasterWeights(a.parameters(), lambda p: torch.optim.AdamW(p, lr=0.01))
    theirs = torch.optim.AdamW(b.parameters(), lr=0.01)
    x, y = regression()
    for _ in range(10):
        for model, optimizer in ((a, ours), (b, theirs)):
            optimizer.zero_grad(set_to_none=False)
            F.mse_loss(model(x[:32]), y[:32]).backward()
            if optimizer is ours:
                ours.prepare_gradients()
                assert all(p.grad is None for p in a.parameters())
            F.mse_loss(model(x[32:]), y[32:]).backward()
            optimizer.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_autocast_step(dtype):
    x, y = regression()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    seen = []
    next(model.children()).register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    scaler = GradScaler(init_scale=2.0**30) if dtype == torch.float16 else None
    losses = [
        autocast_step(model, F.mse_loss, x, y, optimizer, dtype=dtype, scaler=scaler, max_norm=1.0)
        for _ in range(60)
    ]
    assert losses[-1] < 0.5 * losses[0]
    assert set(seen) == {dtype or torch.float32}
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not losses[0].requires_grad
    # Clipped to the norm of unscaled gradients.
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert norm <= 1.0 + 1e-4


def test_policy():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert policy.output_dtype is None
    assert MixedPrecisionPolicy() == MixedPrecisionPolicy(None, None, None)
    with pytest.raises(ValueError, match="reduce_dtype must be a floating-point dtype"):
        MixedPrecisionPolicy(reduce_dtype=torch.int8)


# ------------------------------------------------------------------ many ranks


NUM_UPDATES, OVERFLOWS_AT = 10, 3


def on_ranks():
    dist.init_process_group("gloo")
    results = one_decision()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    return results


def one_decision():
    rank, n = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    trace = []

    # 1. Each rank owns one shard; only rank (step % n) overflows, in some steps. The last rank
    #    of three has an optimiser whose parameter never gets a gradient.
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = GradScaler(init_scale=1024.0, growth_interval=4, group=world)
    alone = GradScaler(init_scale=1024.0, growth_interval=4)
    for step in range(12):
        overflows = step in (1, 2, 9)
        optimizer.zero_grad()
        if rank < 2:
            scaler.scale((parameter * 1.0).sum()).backward()
            assert parameter.grad is not None
            if overflows and rank == step % min(n, 2):
                parameter.grad[0] = math.inf
        before = parameter.detach().clone()
        scaler.unscale_(optimizer)
        # What a rank that decides for itself would have done.
        mine = all(p.grad is None or p.grad.isfinite().all() for p in (parameter,))
        scaler.step(optimizer)
        scaler.update()
        stepped = not torch.equal(before, parameter)
        assert stepped == (not overflows and rank < 2), step
        trace.append((scaler.get_scale(), mine))
    assert alone.get_scale() == 1024.0

    # 2. The same through FSDP2's sharded gradients (DTensor), beside torch's DDP and scaler: ten
    #    updates, and one step that is skipped.
    sharded = make_model().double()
    replica = make_model().double()
    mesh = init_device_mesh("cpu", (n,))
    fully_shard(sharded, mesh=mesh)
    ddp = DistributedDataParallel(replica)
    x, y = (t.double() for t in regression(seed=rank))
    pairs = [
        (sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), GradScaler(1024.0, group=world)),
        (ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 1024.0)),
    ]
    losses, gradients = [], []
    for step in range(NUM_UPDATES + 1):
        for model, optim, each in pairs:
            optim.zero_grad()
            loss = F.mse_loss(model(x), y)
            losses.append(loss.item())
            if step == OVERFLOWS_AT and rank == n - 1:
                loss = loss * math.inf
            each.scale(loss).backward()
            each.unscale_(optim)
            if step == 0:
                gradients.append([whole(p.grad).clone() for p in model.parameters()])
            each.step(optim)
            each.update()
        assert pairs[0][2].state_dict() == pairs[1][2].state_dict()
    parameters = [[whole(p.detach()) for p in m.parameters()] for m in (sharded, replica)]
    trained = (losses[::2], losses[1::2]), gradients, parameters
    assert pairs[0][2].get_scale() == 512.0

    # 3. An overflow in one shard only: FSDP's reduction would spread it, so put it there by hand.
    for group, agrees in ((world, True), (None, n == 1)):
        single = GradScaler(1024.0, group=group)
        optim = pairs[0][1]
        optim.zero_grad()
        single.scale(F.mse_loss(sharded(x), y)).backward()
        weight = next(iter(sharded.parameters()))
        if rank == 0:
            weight.grad.to_local().view(-1)[0] = math.nan  # type: ignore[union-attr]
        single.unscale_(optim)
        single.update()
        scales: list = [None] * n
        dist.all_gather_object(scales, single.get_scale())
        assert (len(set(scales)) == 1) == agrees, scales
        assert scales[0] == 512.0

    # 4. Wrong order: an error on every rank, and no rank waits.
    with pytest.raises(RuntimeError, match=rf"no step.*rank {rank}"):
        scaler.update()
    return trace, trained


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def one_process(world_size):
    """Ten updates without any scaler; the step that overflows is left out."""
    model = make_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [[t.double() for t in regression(seed=rank)] for rank in range(world_size)]
    losses, gradients = [], []
    for step in range(NUM_UPDATES + 1):
        optimizer.zero_grad()
        each = [F.mse_loss(model(x), y) for x, y in data]
        torch.stack(each).mean().backward()
        gradients = gradients or [whole(p.grad).clone() for p in model.parameters()]
        if step != OVERFLOWS_AT:
            optimizer.step()
        losses.append([loss.item() for loss in each])
    return losses, gradients, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_ranks_decide_alike_and_train_as_one_process(world_size):
    results = run(on_ranks, world_size)
    traces = [trace for trace, _ in results]
    losses, gradients, parameters = one_process(world_size)
    for rank, (_, trained) in enumerate(results):
        for got_losses, got_gradients, got_parameters in zip(*trained, strict=True):
            assert got_losses == pytest.approx([each[rank] for each in losses], rel=1e-10)
            torch.testing.assert_close(got_gradients, gradients, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(got_parameters, parameters, rtol=1e-10, atol=1e-12)
    scales = [[scale for scale, _ in trace] for trace in traces]
    assert all(each == scales[0] for each in scales)
    expected = [1024.0, 512.0, 256.0, 256.0, 256.0, 256.0, 512.0, 512.0, 512.0, 256.0, 256.0, 256.0]
    assert scales[0] == expected
    if world_size > 1:
        # Some rank saw nothing wrong in a step that was skipped.
        assert any(mine for _, mine in [traces[0][1], traces[1][1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
def test_scaler_finds_what_is_not_finite_in_any_gradient(dtype, bad):
    """Of several dtypes and sizes at once; what is merely huge is no overflow."""
    shapes = [(), (3, 2), (0,), (5,)]
    parameters = [torch.nn.Parameter(torch.ones(s, dtype=dtype)) for s in shapes]
    parameters.append(torch.nn.Parameter(torch.ones(4)))
    scaler = GradScaler(init_scale=4.0)
    for i, p in enumerate(parameters):
        p.grad = torch.full_like(p, torch.finfo(p.dtype).max / 2 if i == 1 else 8.0)
    expected = [p.grad.clone() / 4 for p in parameters]
    if bad is not None:
        parameters[3].grad[2] = bad
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler.unscale_(optimizer)
    assert scaler._found_inf[id(optimizer)] is (bad is not None)
    for i, (p, value) in enumerate(zip(parameters, expected, strict=True)):
        if i != 3 or bad is None:
            assert torch.equal(p.grad, value)


# ------------------------------------------------------------------ as loops are written


def test_gradients_of_any_kind_are_unscaled():
    embedding = nn.Embedding(5, 2, sparse=True)
    turn = nn.Parameter(torch.tensor([3 + 4j]))
    before = embedding.weight.detach().clone(), turn.detach().clone()
    optimizer, scaler = torch.optim.SGD([embedding.weight, turn], lr=1.0), GradScaler(1024.0)
    for bad in (False, True):
        optimizer.zero_grad()
        losses = [embedding(torch.tensor([1, 1, 3])).sum(), turn.abs().sum()]
        for loss in scaler.scale(losses):
            (loss * (math.inf if bad else 1)).backward()
        scaler.step(optimizer)  # the second is skipped
        scaler.update()
    expected = torch.tensor([0.0, 2, 0, 1, 0]).unsqueeze(1).expand(5, 2)
    torch.testing.assert_close(before[0] - embedding.weight, expected)
    torch.testing.assert_close((before[1] - turn).detach(), torch.tensor([0.6 + 0.8j]))
    assert scaler.get_scale() == 512


@pytest.mark.parametrize("overflow", [False, True])
def test_masters_are_cleared_without_their_own_zero_grad(overflow):
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = MasterWeights(model.parameters(), lambda p: torch.optim.SGD(p, lr=0.25))
    scaler = GradScaler(4.0)
    for x in (math.inf if overflow else 1.0, 1.0):
        model.zero_grad()  # not the optimizer's
        loss = model(torch.full((1, 1), x, dtype=torch.bfloat16)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert model.weight.item() == (0.75 if overflow else 0.5)


def test_masters_have_each_parameter_once_and_as_wide():
    def sgd(masters):
        return torch.optim.SGD(masters, lr=1e-3)

    weight = nn.Parameter(torch.ones(1, dtype=torch.float64) / 3)
    optimizer = MasterWeights([("weight", weight)], sgd)
    weight.sum().backward()
    optimizer.step()
    assert weight.item() == 1 / 3 - 1e-3
    with pytest.raises(ValueError, match="2 parameters, of which only 1"):
        MasterWeights([weight, weight], sgd)
    with pytest.raises(ValueError, match=r"got dict.*in make_optimizer"):
        MasterWeights([{"params": [weight]}], sgd)  # type: ignore[list-item]
