"""Hybrid parallelism against one process in float64: losses, gradient norms and weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.cost.parallelism import ParallelismConfig
from minidist.data import make_tokens
from minidist.launch import run
from minidist.mesh import make_mesh
from minidist.model import GPT, GPTConfig, lm_loss
from minidist.parallel.hybrid import HybridTrainer, boxes_of_range
from minidist.precision import GradScaler

NUM_STEPS = 6
MAX_NORM = 0.5  # the first steps are clipped
ADAMW: Any = {"lr": 1e-2, "weight_decay": 0.1}
# 13 tokens and 6 heads: a vocabulary that divides by nothing, heads for 2 and 3 ranks.
MODEL: Any = {"vocab_size": 13, "context": 8, "width": 12, "num_layers": 2, "num_heads": 6}


def case(batch=4, micro_batch=1, masked=False, model=(), **layout):
    return {
        "batch": batch,
        "micro_batch": micro_batch,
        "masked": masked,
        "layout": layout,
        "model": MODEL | dict(model),
    }


TIED, THREE, FOUR = {"tied": True}, {"num_layers": 3}, {"num_layers": 4}
CASES = {
    1: [case(), case(zero_stage=1, model=TIED), case(zero_stage=3, micro_batch=2)],
    2: [
        case(dp=2, micro_batch=2, masked=True),
        case(pp=2, model=TIED),
        case(tp=2, sequence_parallel=True, model=TIED),
        case(cp=2, masked=True),
        case(pp=2, virtual_stages=2, model=FOUR),
        case(pp=2, virtual_stages=2, model=FOUR | TIED),
        case(pp=2, batch=3),  # micro-batches that the stages do not divide
        case(dp=2, zero_stage=1, model=TIED),
        case(dp=2, zero_stage=3, micro_batch=2),
    ],
    3: [
        case(dp=3, zero_stage=2, batch=6),
        case(dp=3, zero_stage=3, batch=6, masked=True),
        case(pp=3, model=THREE, batch=2),
        case(tp=3, model=TIED),
        case(cp=3, model={"context": 12}),
        case(dp=3, zero_stage=1, batch=6, model=TIED),
        case(pp=3, model=THREE | TIED, batch=4),
    ],
    4: [
        case(dp=2, tp=2),
        case(dp=2, tp=2, zero_stage=1, masked=True),
        case(dp=2, tp=2, zero_stage=2, sequence_parallel=True),
        case(dp=2, tp=2, zero_stage=3, model=TIED),
        case(dp=2, pp=2, masked=True),
        case(dp=2, pp=2, zero_stage=1, model=TIED),
        case(tp=2, pp=2, model=TIED),
        case(cp=2, dp=2, masked=True),
        case(cp=2, dp=2, zero_stage=3),
        case(cp=2, pp=2, zero_stage=1),
        case(tp=2, cp=2, sequence_parallel=True),
        # One axis alone; 4 heads, since tensor parallelism splits them.
        case(tp=4, model=TIED | {"num_heads": 4}),
        case(tp=4, sequence_parallel=True, model={"num_heads": 4}),
        case(pp=4, batch=6, model=FOUR | TIED),
        case(cp=4, masked=True, model={"context": 16}),
        *(case(dp=4, zero_stage=stage, micro_batch=2, batch=8) for stage in range(4)),
    ],
}


def data(batch, masked, model, **_):
    tokens, targets = make_tokens(batch * NUM_STEPS, model["context"], model["vocab_size"])
    if masked:  # sequences of unequal length, so ranks have unequal numbers of tokens
        for i, row in enumerate(targets):
            row[model["context"] - i % 4 :] = -100
    return tokens.split(batch), targets.split(batch)


def one_process(spec):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**spec["model"])).double()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    curve = []
    tokens = targets = torch.empty(0)
    for tokens, targets in zip(*data(**spec), strict=True):
        loss = lm_loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        curve.append([loss.item(), norm.item()])
    with torch.no_grad():
        final = lm_loss(model(tokens), targets).item()
    return curve, final, model.state_dict()


def make_trainer(spec, dtype=torch.float64, **options):
    config = ParallelismConfig(**spec["layout"])
    mesh = make_mesh(dp=config.dp, pp=config.pp, cp=config.cp, tp=config.tp)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**spec["model"])).to(dtype)
    torch.manual_seed(1 + mesh.coordinate("dp"))
    per_rank = spec["batch"] // config.dp
    return HybridTrainer(
        model,
        mesh,
        config,
        micro_batch=spec["micro_batch"],
        num_micro_batches=per_rank // spec["micro_batch"],
        bucket_bytes=2000,
        **ADAMW,
        **options,
    )


def own_batches(trainer, spec):
    at, size = trainer.mesh.coordinate("dp"), trainer.mesh.size("dp")
    for tokens, targets in zip(*data(**spec), strict=True):
        yield tokens[at::size], targets[at::size]


def train_all(specs):
    dist.init_process_group("gloo")
    results = []
    for spec in specs:
        trainer = make_trainer(spec)
        curve, batch = [], ()
        for batch in own_batches(trainer, spec):
            loss = trainer.forward_backward(*batch)
            norm = trainer.clip_grad_norm(MAX_NORM)
            trainer.step()
            curve.append([loss.item(), norm.item()])
        total, count = trainer.evaluate(*batch)
        counted = sum(h.tensor.numel() for h in trainer.held if trainer.counts(h))
        states = [name for name, _ in trainer.optimizer_parts()]
        results.append((curve, total / count, trainer.full_state_dict(), counted, states))
    dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("world_size", CASES)
def test_any_layout_trains_as_one_process(world_size):
    every = run(train_all, world_size, CASES[world_size], deadline_s=150)
    for i, spec in enumerate(CASES[world_size]):
        curve, final, state = one_process(spec)
        for rank, results in enumerate(every):
            got_curve, got_final, got_state, *_ = results[i]
            where = f"rank {rank}, {spec}"
            torch.testing.assert_close(got_curve, curve, rtol=1e-11, atol=0, msg=where)
            assert got_final == pytest.approx(final, rel=1e-11), where
            assert set(got_state) == set(state), where
            for name, whole in state.items():
                torch.testing.assert_close(got_state[name], whole, rtol=0, atol=1e-10, msg=where)
        # Every element counts on one rank; padding of the vocabulary counts, but has no gradient.
        tp = spec["layout"].get("tp", 1)
        padding = (-13 % tp) * spec["model"]["width"] * (1 if spec["model"].get("tied") else 2)
        num_elements = sum(p.numel() for p in GPT(GPTConfig(**spec["model"])).parameters())
        assert sum(results[i][3] for results in every) == num_elements + padding, spec
        names = {name for results in every for name in results[i][4]}
        assert len(names) == 2 * len(dict(GPT(GPTConfig(**spec["model"])).named_parameters()))


def overflow_and_drop(specs):
    dist.init_process_group("gloo")
    results = []
    for spec in specs:
        # fp16: the scale of 2^40 overflows, all ranks skip the step together, until it fits.
        trainer = make_trainer(spec, torch.float32, compute_dtype=torch.float16)
        scaler = GradScaler(init_scale=2.0**40, backoff_factor=2.0**-8, group=dist.group.WORLD)
        trace = []
        for batch in list(own_batches(trainer, spec))[:6]:
            loss = trainer.forward_backward(*batch, scale=scaler.get_scale())
            trainer.prepare_gradients()
            scaler.unscale_(trainer)
            trainer.clip_grad_norm(MAX_NORM)
            scaler.step(trainer)
            scaler.update()
            trace.append((loss.item(), scaler.get_scale(), trainer.num_updates))
        results.append((trace, trainer.full_state_dict()))
    dist.barrier()
    dist.destroy_process_group()
    return results


def test_fp16_skips_a_step_on_all_ranks_or_on_none():
    specs = [
        case(dp=2, tp=2, zero_stage=1),
        case(tp=2, pp=2, model=TIED),
        case(dp=4, zero_stage=2, batch=8),
        case(dp=2, tp=2, zero_stage=3),
    ]
    every = run(overflow_and_drop, 4, specs)
    for i, spec in enumerate(specs):
        traces = [results[i][0] for results in every]
        assert all(trace == traces[0] for trace in traces), spec
        assert traces[0][0][1:] == (2.0**32, 0), spec  # the first step was skipped
        assert 0 < traces[0][-1][2] < 6, spec  # the last was not
        assert all(value.isfinite().all() for value in every[0][i][1].values()), spec


def dropout_masks(specs):
    dist.init_process_group("gloo")
    results = []
    for spec in specs:
        trainer = make_trainer(spec)
        for batch in list(own_batches(trainer, spec))[:3]:
            trainer.forward_backward(*batch)
            trainer.step()
        bias = dict(trainer.stages[0].named_parameters())["blocks.0.attention.out.bias"]
        with torch.no_grad():
            x = torch.ones(1, 8, 12, dtype=torch.float64)
            block: Any = trainer.stages[0].blocks["0"]
            dropped = block.mlp.dropout(x) == 0
        results.append((trainer.mesh.coordinate("dp"), bias.detach(), dropped))
    dist.barrier()
    dist.destroy_process_group()
    return results


def test_dropout_is_the_same_along_tp_and_another_along_dp():
    every = run(dropout_masks, 4, [case(dp=2, tp=2, model={"dropout": 0.3})])
    for (dp, bias, dropped), (other_dp, other_bias, other_dropped) in [
        (every[i][0], every[j][0]) for i in range(4) for j in range(i)
    ]:
        torch.testing.assert_close(bias, other_bias, rtol=0, atol=0)  # replicas stay replicas
        assert torch.equal(dropped, other_dropped) == (dp == other_dp)


def wrong_configurations():
    dist.init_process_group("gloo")
    wrong = [
        (case(dp=3, tp=2), "dp 3 x pp 1 x cp 1 x tp 2 = 6 ranks, but there are 4"),
        (case(tp=4), "6 heads do not divide by tp = 4: 6 / 4 = 1.5"),
        (case(pp=4), "2 layers do not divide by pp = 4: 2 / 4 = 0.5"),
        (
            case(cp=4, model={"context": 12}),
            "12 tokens of context do not divide by 2 x cp = 8: 12 / 8 = 1.5",
        ),
        (case(dp=2, pp=2, zero_stage=2), "ZeRO-2 with pp 2: it would reduce or gather again"),
        (case(dp=2, pp=2, zero_stage=3), "ZeRO-3 with pp 2: it would reduce or gather again"),
        (
            case(dp=2, pp=2, virtual_stages=2, model=FOUR, batch=6),
            "interleaving needs micro-batches 3 / pp 2 whole",
        ),
    ]
    for spec, expected in wrong:
        with pytest.raises(ValueError, match=re.escape(expected)):
            make_trainer(spec)
    # A mesh that is not the configuration's, and a batch that is not the configuration's.
    mesh = make_mesh(dp=2, tp=2)
    with pytest.raises(ValueError, match=r"the mesh is dp 2 .* the configuration dp 4"):
        HybridTrainer(GPT(GPTConfig(**MODEL)), mesh, ParallelismConfig(dp=4))
    copies = ParallelismConfig(dp=2, tp=2, zero_stage=1, replicas=2)
    with pytest.raises(ValueError, match=r"2 copies of them are a plan of minidist.cost only"):
        HybridTrainer(GPT(GPTConfig(**MODEL)), mesh, copies)
    spec = case(dp=2, tp=2)
    trainer = make_trainer(spec)
    with pytest.raises(ValueError, match=r"2 micro-batches x 1 .*\(2, 8\).*got \(3, 8\)"):
        trainer.forward_backward(*(torch.zeros(3, 8, dtype=torch.int64),) * 2)
    # Nobody hangs, and the ranks are still in step.
    batch = next(own_batches(trainer, spec))
    loss = trainer.forward_backward(*batch).item()
    dist.barrier()
    dist.destroy_process_group()
    return loss


def test_wrong_configurations_end_on_every_rank_with_the_arithmetic():
    losses = run(wrong_configurations, 4)
    assert len(set(losses)) == 1


def native(spec):
    """Every division of the ranks among dp and tp."""
    dist.init_process_group("gloo")
    n = dist.get_world_size()
    curves = {
        (n // tp, tp): native_curve(spec, n // tp, tp) for tp in range(1, n + 1) if n % tp == 0
    }
    if n == 4:
        from minidist.parallel.hybrid.native import parallelize_native

        with pytest.raises(ValueError, match="takes the axes dp and tp, got dp 2 x pp 2"):
            parallelize_native(None, make_mesh(dp=2, pp=2))
    dist.barrier()
    dist.destroy_process_group()
    return curves


def native_curve(spec, dp, tp):
    from minidist.parallel.hybrid.native import loss_parallel, parallelize_native

    mesh = make_mesh(dp=dp, tp=tp)
    torch.manual_seed(0)
    model = parallelize_native(GPT(GPTConfig(**spec["model"])).double(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    curve = []
    for tokens, targets in zip(*data(**spec), strict=True):
        own = slice(mesh.coordinate("dp"), None, dp)
        optimizer.zero_grad()
        with loss_parallel():
            loss: Any = lm_loss(model(tokens[own]), targets[own])
            loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        value = loss.full_tensor().detach()
        dist.all_reduce(value, group=mesh.group("dp"))
        curve.append([value.item() / dp, norm.full_tensor().item()])
    return curve


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_torchs_own_two_axes_train_as_one_process(world_size):
    spec = case(batch=12, model={"vocab_size": 12, "num_heads": 12})
    curve, *_ = one_process(spec)
    for layouts in run(native, world_size, spec):
        for layout, got in layouts.items():
            torch.testing.assert_close(got, curve, rtol=1e-11, atol=0, msg=f"dp, tp: {layout}")


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), max_size=4).map(tuple),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_boxes_make_up_the_range(shape, ends):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    begin, end = sorted(round(x * whole.numel()) for x in ends)
    found = [
        whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten()
        for box in boxes_of_range(shape, begin, end)
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(
        range(begin, end)
    )
    assert len(found) <= max(1, 2 * len(shape) - 1)
