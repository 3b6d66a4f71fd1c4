"""The training program with experts: the same run on any number of ranks and any ep, its metrics,
checkpoints and refusals. The oracle is one process that computes every expert for every token and
masks afterwards."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from interrupted_training import interrupted, whole_and_in_two_parts
from torch.testing import assert_close

from minidist.checkpoint import CheckpointError
from minidist.checkpoint.shards import Shard, ShardReader
from minidist.data import make_tokens
from minidist.launch import run
from minidist.lr import lr_at
from minidist.mesh import make_mesh
from minidist.model import GPT, lm_loss
from minidist.parallel.expert import MoE, use_experts
from minidist.train import TrainConfig, parse_args, train
from minidist.train.program import build_trainer

STEPS = 4
# 12 experts and sequences of a batch: 1, 2, 3 and 4 ranks. `max_norm` clips every step.
CONFIG = TrainConfig(
    vocab_size=13,
    context=8,
    width=12,
    num_layers=2,
    num_heads=3,
    num_experts=12,
    expert_width=10,
    bias_speed=0.02,
    global_batch=12,
    micro_batch=1,
    steps=STEPS,
    num_sequences=30,
    num_eval_sequences=7,
    eval_every=2,
    lr=1e-2,
    max_norm=0.3,
    precision="fp64",
    quiet=True,
    save_every=100,
)


# ---------------------------------------------------------------------------------- one process


class Dense:
    """What a layer of experts computes, without the course's router, dispatch and combine."""

    def __init__(self, layer, config):
        self.layer, self.config = layer, config
        self.load = torch.zeros(config.num_experts, dtype=torch.float64)
        self.dropped, self.penalty = 0, torch.zeros(())

    def __call__(self, x_BTD):
        """The tokens of one call share the room of an expert, as those of a micro-batch do."""
        layer, config = self.layer, self.config
        x_ND = x_BTD.flatten(0, 1)
        probs = torch.softmax(x_ND @ layer.router.weight_ED.T, 1)
        order = (probs + layer.router.bias_E).argsort(dim=1, descending=True)[:, : config.top_k]
        room = math.inf
        if config.capacity_factor is not None:
            even = len(x_ND) * config.top_k / config.num_experts
            room = math.ceil(config.capacity_factor * even)
        mask, load = torch.zeros_like(probs), torch.zeros_like(self.load)
        for k in range(config.top_k):
            for token, expert in enumerate(order[:, k].tolist()):
                load[expert] += 1
                mask[token, expert] = float(load[expert] <= room)
        chosen = torch.zeros_like(probs).scatter(1, order, 1.0)
        weights = probs * chosen
        if config.top_k > 1:
            weights = weights / weights.sum(1, keepdim=True)
        y = torch.zeros_like(x_ND)
        for e in range(config.num_experts):
            inner = F.gelu(x_ND @ layer.experts.up_LDF[e])
            y = y + (weights * mask)[:, e : e + 1] * (inner @ layer.experts.down_LFD[e])
        if layer.shared is not None:
            y = y + F.gelu(x_ND @ layer.shared[0].weight.T) @ layer.shared[2].weight.T
        self.load += load
        self.dropped += int(chosen.sum() - mask.sum())
        self.penalty = config.num_experts * (load / load.sum() * probs.mean(0)).sum()
        return y.view_as(x_BTD)


def one_process(config, together):
    """Losses, evaluations, norms, metrics and the model; `together` sequences in one call."""
    torch.manual_seed(config.seed)
    model = GPT(config.model)
    layers = use_experts(model, config.experts)
    model.double()
    dense = [Dense(layer, config) for layer in layers]
    for layer, each in zip(layers, dense, strict=True):
        layer.forward = each
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=config.weight_decay)
    shape = (config.context, config.vocab_size)
    tokens, targets = make_tokens(config.num_sequences, *shape, seed=config.seed)
    eval_tokens, eval_targets = make_tokens(config.num_eval_sequences, *shape, config.seed + 1)
    per_epoch = config.num_sequences // config.global_batch
    records = []
    for step in range(config.steps):
        epoch, at = divmod(step, per_epoch)
        order = torch.randperm(
            config.num_sequences, generator=torch.Generator().manual_seed(config.seed + epoch)
        )
        picked = order[at * config.global_batch : (at + 1) * config.global_batch]
        optimizer.zero_grad()
        for each in dense:
            each.load.zero_()
            each.dropped = 0
        loss, penalty, pieces = 0.0, 0.0, picked.split(together)
        for piece in pieces:
            part = lm_loss(model(tokens[piece]), targets[piece]) / len(pieces)
            extra = torch.stack([each.penalty for each in dense]).mean() / len(pieces)
            (part + config.balance_loss * len(dense) * extra).backward()
            loss, penalty = loss + part.item(), penalty + extra.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.param_groups[0]["lr"] = lr_at(
            step, peak_lr=config.lr, warmup_steps=config.warmup_steps, total_steps=config.steps
        )
        optimizer.step()
        record = {"loss": loss, "grad_norm": norm.item()}
        record["imbalance"] = max((d.load.max() / d.load.mean()).item() for d in dense)
        record["dropped"] = sum(d.dropped for d in dense) / sum(d.load.sum().item() for d in dense)
        if config.balance_loss:
            record["balance_loss"] = penalty
        for layer, each in zip(layers, dense, strict=True):
            bias = layer.router.bias_E
            bias += config.bias_speed * (each.load.mean() - each.load).sign()
        if (step + 1) % config.eval_every == 0:
            with torch.no_grad():
                record["eval_loss"] = lm_loss(model(eval_tokens), eval_targets).item()
        records.append(record)
    return records, model.state_dict()


def saved_model(out, expected):
    """The parameters of the newest checkpoint, whichever ranks wrote which experts."""
    folder = sorted((Path(out) / "checkpoints").glob("step-*"))[-1]
    tied = torch.equal(expected["head.weight"], expected["token_embedding.weight"])
    names = [name for name in expected if not (tied and name == "head.weight")]
    found = {name: torch.full_like(expected[name], math.nan) for name in names}
    ShardReader(folder).fill(
        {
            name: Shard(tensor=t, global_shape=tuple(t.shape), offsets=(0,) * t.dim())
            for name, t in found.items()
        }
    )
    return found


# ------------------------------------------------------------------------------------- the curve


def train_all(configs):
    """Several runs on the same ranks, in a process group of this test's."""
    dist.init_process_group("gloo")
    results = []
    for config in configs:
        records = []
        losses = train(config, on_step=records.append)
        assert losses == [record["loss"] for record in records]
        results.append(records)
    dist.barrier()
    dist.destroy_process_group()
    return results


def case(together=1, **options):
    return together, options


# `together` sequences share the room of an expert, and one auxiliary loss.
SHARED = {"top_k": 3, "shared_experts": 1, "micro_batch": 2}
SWITCH = {"top_k": 1, "balance_loss": 0.3, "bias_speed": 0.0}
ROOM = {"capacity_factor": 1.0}
CASES = {
    1: [case(), case(4, **SWITCH, micro_batch=4), case(**ROOM, recompute=True)],
    2: [
        case(ep=2),
        case(ep=2, zero=1, recompute=True),
        case(**SHARED, zero=1),
        case(6, **SWITCH, ep=2, micro_batch=3, recompute=True),
        case(**ROOM, ep=2, tied=True),
    ],
    3: [case(ep=3, zero=1), case(**SHARED), case(12, **SWITCH, ep=3, micro_batch=4)],
    4: [
        case(ep=2),
        case(**SHARED | {"micro_batch": 3}, ep=4),
        case(ep=2, zero=1, micro_batch=3),
        case(**ROOM, ep=4, zero=1),
        case(**ROOM, ep=2, recompute=True),
        case(12, **SWITCH, ep=2, zero=1, micro_batch=3),
    ],
}


@pytest.mark.parametrize("world_size", CASES)
def test_losses_norms_metrics_and_parameters_are_those_of_one_process(world_size, tmp_path):
    """Two epochs; every step is clipped, and an expert that counted twice would change all."""
    configs = [
        replace(CONFIG, **options, out=str(tmp_path / str(i)))
        for i, (_, options) in enumerate(CASES[world_size])
    ]
    every = run(train_all, world_size, configs, deadline_s=120)
    for i, (config, (together, options)) in enumerate(zip(configs, CASES[world_size], strict=True)):
        expected, state = one_process(config, together)
        for results in every:
            for found, step in zip(results[i], expected, strict=True):
                if config.capacity_factor is not None:
                    step.pop("eval_loss", None)  # it is evaluated in other pieces
                assert {key: found[key] for key in step} == pytest.approx(step, rel=1e-9), options
        if config.capacity_factor is not None:
            assert expected[0]["dropped"] > 0.05
        assert min(step["grad_norm"] for step in expected) > config.max_norm
        for name, tensor in saved_model(config.out, state).items():
            assert_close(tensor, state[name], rtol=1e-8, atol=1e-10, msg=f"{options}: {name}")
        biases = [tensor for name, tensor in state.items() if name.endswith("bias_E")]
        assert all(bool(bias.any()) == bool(config.bias_speed) for bias in biases)


def whole_model(config):
    dist.init_process_group("gloo")
    layout = config.check(dist.get_world_size())
    trainer = build_trainer(config, layout, make_mesh(dp=layout.dp), torch.device("cpu"))
    held = sum(h.tensor.numel() for h in trainer.held)
    state = trainer.full_state_dict()
    dist.barrier()
    dist.destroy_process_group()
    return state, held


def test_each_rank_holds_its_experts_and_all_of_them_are_the_model():
    """In one state, which a model of one process loads by its names."""
    config = replace(CONFIG, ep=2, shared_experts=1)
    torch.manual_seed(config.seed)
    model = GPT(config.model)
    use_experts(model, config.experts)
    model.double()
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    experts = sum(p.numel() for layer in layers for p in layer.experts.parameters())
    rest = sum(p.numel() for p in model.parameters()) - experts
    for state, held in run(whole_model, 4, config):
        assert held == rest + experts // 2
        for name, tensor in model.state_dict().items():
            assert torch.equal(state[name], tensor), name
        assert state.keys() == model.state_dict().keys()
    owned = [held for _, held in run(whole_model, 4, replace(config, zero=1))]
    assert sum(owned) == rest + experts


def test_half_precision_follows_single():
    full = [
        record["loss"] for record in run(train_all, 1, [replace(CONFIG, precision="fp32")])[0][0]
    ]
    configs = [
        replace(CONFIG, precision=precision, ep=2, zero=zero)
        for precision, zero in (("bf16", 0), ("fp16", 1))
    ]
    for results in run(train_all, 2, configs):
        for records in results:
            losses = [record["loss"] for record in records]
            assert losses == pytest.approx(full, rel=0.02)
            assert losses != pytest.approx(full, rel=1e-6)


# ------------------------------------------------------------------------------------ checkpoints


def test_a_run_that_was_told_to_end_goes_on_bit_for_bit(tmp_path):
    layouts = [
        {"ep": 2, "precision": "bf16", "capacity_factor": 1.0},
        {"ep": 4, "zero": 1, "precision": "fp32", "recompute": True, "balance_loss": 0.1},
    ]
    configs = [
        replace(CONFIG, dropout=0.2, **layout, out=str(tmp_path / str(i)))
        for i, layout in enumerate(layouts)
    ]
    for results in run(whole_and_in_two_parts, 4, configs, 2, 1, deadline_s=120):
        for config, (whole, first, rest) in zip(configs, results, strict=True):
            assert len(first) == 2, config
            assert first + rest == whole, config


def test_a_run_goes_on_with_another_ep(tmp_path):
    """And other numbers of ranks, with and without ZeRO-1: the curve is that of one process."""
    config = replace(CONFIG, steps=6, warmup=1, out=str(tmp_path))
    losses = []
    for end, world_size, layout in [
        (1, 4, {"ep": 2, "zero": 1}),
        (2, 4, {"ep": 4}),
        (3, 3, {"ep": 3, "zero": 1}),
        (4, 1, {}),
        (5, 2, {"zero": 1}),
        (6, 2, {"ep": 2}),
    ]:
        part, step = replace(config, **layout), end if end < 6 else -1
        every = run(interrupted, world_size, part, step, world_size - 1)
        assert all(each == every[0] for each in every)
        losses += every[0]
    expected, state = one_process(config, together=1)
    assert losses == pytest.approx([record["loss"] for record in expected], rel=1e-9)
    for name, tensor in saved_model(config.out, state).items():
        assert_close(tensor, state[name], rtol=1e-8, atol=1e-10)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["imbalance"] for record in records] == pytest.approx(
        [record["imbalance"] for record in expected]
    )


def test_a_checkpoint_of_other_experts_is_refused(tmp_path):
    config = replace(CONFIG, steps=1, warmup=0, out=str(tmp_path))
    assert len(train(config)) == 1
    dense = replace(CONFIG, num_experts=0, expert_width=None, bias_speed=1e-3, steps=2)
    for other, text in [
        (replace(config, num_experts=6, steps=2), "made with num_experts 12, now 6"),
        (replace(config, top_k=3, steps=2), "made with top_k 2, now 3"),
        (replace(dense, out=str(tmp_path)), "made with .*num_experts 12, now None"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            train(other)
    dense_run = replace(dense, out=str(tmp_path / "dense"))
    assert len(train(replace(dense_run, steps=1, warmup=0))) == 1
    with pytest.raises(CheckpointError, match=r"made with .*num_experts None, now 12"):
        train(replace(config, steps=2, out=dense_run.out))


# --------------------------------------------------------------------------------------- refusals


def refused(configs):
    dist.init_process_group("gloo")
    for config, text in configs:
        with pytest.raises(ValueError, match=text):
            train(config)
    losses = train(replace(CONFIG, steps=1, warmup=0, ep=3))  # the ranks are still in step
    dist.barrier()
    dist.destroy_process_group()
    return losses


def test_what_does_not_fit_ends_on_every_rank_with_the_arithmetic():
    dense = replace(CONFIG, num_experts=0, expert_width=None, bias_speed=1e-3)
    configs = [
        (replace(CONFIG, ep=2), r"dp 3 x cp 1 x tp 1 = 3 ranks do not divide into groups of ep 2"),
        (replace(CONFIG, ep=3, num_experts=8), r"8 experts do not divide by ep = 3: 8 / 3 = 2.667"),
        (replace(CONFIG, ep=0), r"ep must be an integer >= 1, got 0"),
        (replace(CONFIG, tp=3), r"got tp 3 \(pipeline, context and tensor .*; leave pp, cp and tp"),
        (replace(CONFIG, pp=3, num_layers=3), r"got pp 3 .* are not supported"),
        (replace(CONFIG, cp=3), r"got cp 3 .* are not supported"),
        (replace(CONFIG, zero=2), r"got ZeRO-2 \(ZeRO-2 and ZeRO-3 of experts .* use ZeRO-1"),
        (replace(CONFIG, zero=3), r"got ZeRO-3 .* are not supported"),
        (replace(CONFIG, top_k=13), r"top_k must be 1 to 12, the number of experts, got 13"),
        (replace(CONFIG, capacity_factor=0.0), r"capacity_factor must be positive or None"),
        (replace(CONFIG, expert_width=0), r"expert_width must be at least 1, got 0"),
        (replace(CONFIG, shared_experts=-2), r"shared_experts is at least 0, got -2"),
        (replace(CONFIG, num_experts=-1), r"num_experts must not be negative, got -1"),
        (replace(CONFIG, balance_loss=-0.1), r"balance_loss must not be negative, got -0.1"),
        (replace(dense, ep=3), r"ep 3: the model has no experts"),
        (replace(dense, top_k=1), r"top_k 1 needs experts: set num_experts, got 0"),
        (replace(dense, balance_loss=0.1), r"balance_loss 0.1 needs experts"),
    ]
    losses = run(refused, 3, configs)
    assert losses == [losses[0]] * 3


def test_options_of_the_command_line():
    words = ["--ep", "2", "--num-experts", "8", "--top-k", "1", "--capacity-factor", "1.25"]
    config = parse_args([*words, "--expert-width", "32"])
    assert config == TrainConfig(
        ep=2, num_experts=8, top_k=1, capacity_factor=1.25, expert_width=32
    )
    assert str(config.check(4)) == "dp 4 x pp 1 x cp 1 x tp 1, ep 2"


def test_a_token_costs_by_default_what_it_costs_in_the_dense_model():
    dense = TrainConfig(width=64)
    for options in ({"top_k": 2}, {"top_k": 3, "shared_experts": 1}, {"top_k": 1}):
        sparse = replace(dense, num_experts=8, **options)
        router = 2 * 3 * sparse.num_layers * 64 * 8
        assert sparse.sizes.flops_per_token() == dense.sizes.flops_per_token() + router
        assert sparse.sizes.num_parameters > 1.5 * dense.sizes.num_parameters
