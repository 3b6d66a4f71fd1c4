"""Mixture of experts over ranks against one process in float64 that computes every expert for every
token and masks afterwards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close

from minidist import emulate
from minidist.data import make_tokens
from minidist.emulate.teach import run_traced
from minidist.errors import LaunchError
from minidist.launch import run
from minidist.model import GPT, GPTConfig, lm_loss
from minidist.parallel.expert import (
    MoE,
    MoEConfig,
    Router,
    all_to_all,
    all_to_all_bytes,
    average_gradients,
    balance_loss,
    count_choices,
    expert_capacity,
    imbalance,
    keep_within_capacity,
    make_expert_mesh,
    update_bias,
    use_experts,
)

ALPHA = 0.1
SIZES: dict[str, Any] = {"width": 6, "expert_width": 5, "num_experts": 12}
CASES = {
    "top 2": {"top_k": 2},
    "top 1": {"top_k": 1},
    "top 3, shared": {"top_k": 3, "shared_experts": 2},
    "dropped": {"top_k": 2, "capacity_factor": 0.75},
    "dropped, shared, room": {"top_k": 2, "shared_experts": 1, "capacity_factor": 1.5},
}
LAYOUTS = [(1, 1), (2, 2), (2, 1), (3, 3), (4, 4), (4, 2), (4, 1)]  # ranks, ep


def world(check, *args):
    dist.init_process_group("gloo")
    result = check(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(config, mesh=None, bias=True):
    torch.manual_seed(0)
    layer = MoE(config, mesh).double()
    if bias:  # so that choices and probabilities differ
        layer.router.bias_E.copy_(0.05 * draw(config.num_experts, seed=7))
    return layer


def dense(x_ND, layer, config):
    """One rank's tokens, every expert on every token: the output, P, f, and what was dropped."""
    probs = torch.softmax(x_ND @ layer.router.weight_ED.T, 1)
    weights = torch.zeros_like(probs)
    room = [math.inf] * config.num_experts
    if config.capacity_factor is not None:
        even = len(x_ND) * config.top_k / config.num_experts
        room = [math.ceil(config.capacity_factor * even)] * config.num_experts
    order = (probs + layer.router.bias_E).argsort(dim=1, descending=True)[:, : config.top_k]
    load, dropped = torch.zeros(config.num_experts, dtype=torch.float64), 0
    whole = [probs[t, order[t]].sum() if config.top_k > 1 else 1 for t in range(len(x_ND))]
    gates = [[probs[t, e] / whole[t] for e in order[t]] for t in range(len(x_ND))]
    mask = torch.zeros_like(probs)
    for k in range(config.top_k):
        for t in range(len(x_ND)):
            expert = int(order[t, k])
            load[expert] += 1
            room[expert] -= 1
            if room[expert] >= 0:
                mask[t, expert] = 1
            else:
                dropped += 1
    rows = torch.arange(len(x_ND))[:, None].expand_as(order).flatten()
    flat = torch.stack([g for of_token in gates for g in of_token])
    weights = weights.index_put((rows, order.flatten()), flat) * mask
    y = torch.zeros_like(x_ND)
    for e in range(config.num_experts):
        y = y + weights[:, e : e + 1] * (
            F.gelu(x_ND @ layer.experts.up_LDF[e]) @ layer.experts.down_LFD[e]
        )
    if layer.shared is not None:
        inner = F.gelu(x_ND @ layer.shared[0].weight.T)
        y = y + inner @ layer.shared[2].weight.T
    return y, probs.mean(0), load, dropped


def check_layer(ep, sizes, cases):
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = make_expert_mesh(ep)
    for name, options in cases.items():
        config = MoEConfig(**sizes, **options)
        whole = build(config)
        x = draw(size, 3, 8, config.width).requires_grad_()
        goal = draw(size, 3, 8, config.width, seed=2)
        found = [dense(part.flatten(0, 1), whole, config) for part in x]
        losses = [(y * g.flatten(0, 1)).mean() for (y, *_), g in zip(found, goal, strict=True)]
        f = sum(load for _, _, load, _ in found)
        p = sum(probs for _, probs, _, _ in found) / size
        balance = config.num_experts * (f / f.sum() * p).sum()
        (sum(losses) / size + ALPHA * balance).backward()

        layer = build(config, mesh)
        own = x[rank].detach().clone().requires_grad_()
        y = layer(own)
        assert layer.routing is not None
        assert_close(y.flatten(0, 1), found[rank][0], msg=lambda m, name=name: f"{name}: {m}")
        assert layer.num_dropped == found[rank][3]
        assert (layer.num_dropped > 0) == name.startswith("dropped")
        assert count_choices(layer.routing).tolist() == f.tolist()
        ((y * goal[rank]).mean() + ALPHA * balance_loss(layer.routing)).backward()
        average_gradients(layer, mesh)
        assert_close(own.grad / size, x.grad[rank])
        experts = mesh.own_experts(config.num_experts)
        for key, parameter in layer.named_parameters():
            expected = whole.get_parameter(key).grad
            assert expected.abs().max() > 0
            if key.startswith("experts."):
                expected = expected[experts.start : experts.stop]
            assert_close(parameter.grad, expected, msg=lambda m, k=key, n=name: f"{n}, {k}: {m}")


@pytest.mark.parametrize(("n", "ep"), LAYOUTS)
def test_outputs_and_gradients_are_those_of_one_process(n, ep):
    run(world, n, check_layer, ep, SIZES, CASES)


def test_a_layer_without_ranks_is_the_same():
    config = MoEConfig(**SIZES, top_k=2, shared_experts=1, capacity_factor=1.0)
    layer, x = build(config), draw(5, 4, 6)
    y, _, load, dropped = dense(x.flatten(0, 1), layer, config)
    assert_close(layer(x).flatten(0, 1), y)
    assert layer.num_dropped == dropped > 0
    assert layer.routing.load_E.tolist() == load.tolist()


def check_uneven():
    """Other numbers of tokens on each rank, experts without a token, and all tokens on one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = make_expert_mesh()
    config = MoEConfig(width=6, expert_width=5, num_experts=2 * size, top_k=1)
    whole, layer = build(config, bias=False), build(config, mesh, bias=False)
    for model in (whole, layer):
        model.router.bias_E[-1] = 10.0  # all choose the last expert, on the last rank
    x = [draw(2 + 3 * r, 6, seed=r).requires_grad_() for r in range(size)]
    (sum(dense(part, whole, config)[0].square().sum() for part in x) / size).backward()
    own = x[rank].detach().clone().requires_grad_()
    layer(own).square().sum().backward()
    average_gradients(layer, mesh)
    assert_close(own.grad / size, x[rank].grad)
    experts = mesh.own_experts(config.num_experts)
    for key in ("up_LDF", "down_LFD"):
        expected = getattr(whole.experts, key).grad[experts.start : experts.stop]
        assert_close(getattr(layer.experts, key).grad, expected)
    assert bool(layer.experts.up_LDF.grad.any()) == (rank == size - 1)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_uneven_tokens_and_idle_experts(n):
    run(world, n, check_uneven)


def check_a_rank_without_tokens():
    mesh = make_expert_mesh()
    for factor in (None, 1.0):
        config = MoEConfig(**SIZES, shared_experts=1, capacity_factor=factor)
        whole, layer = build(config), build(config, mesh)
        x = draw(8, 6)[: 8 * dist.get_rank()]  # none on rank 0
        y = layer(x)
        assert_close(y, dense(x, whole, config)[0] if len(x) else x)
        y.sum().backward()
        average_gradients(layer, mesh)
        assert layer.experts.up_LDF.grad.any()


def test_a_rank_without_tokens_still_serves_its_experts():
    run(world, 2, check_a_rank_without_tokens)


def check_mixed_precision():
    torch.manual_seed(0)
    layer = MoE(MoEConfig(**SIZES, shared_experts=1), make_expert_mesh())
    x = draw(4, 8, 6, seed=dist.get_rank()).float().requires_grad_()
    exact = layer(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().square().sum().backward()
    assert_close(y.float(), exact, rtol=0.05, atol=0.05)
    assert layer.experts.up_LDF.grad.dtype == x.grad.dtype == torch.float32
    layer.bfloat16()
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_mixed_precision():
    run(world, 2, check_mixed_precision)


def check_training(ep):
    """A GPT whose MLPs are experts; both ways of balancing at once, a few steps of AdamW."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = make_expert_mesh(ep)
    sizes = GPTConfig(vocab_size=16, context=8, width=8, num_layers=2, num_heads=2)
    config = MoEConfig(width=8, expert_width=8, num_experts=12, top_k=2, shared_experts=1)

    def make(mesh):
        torch.manual_seed(3)
        model = GPT(sizes)
        layers = use_experts(model, config, mesh)
        model.double()
        return model, layers, torch.optim.AdamW(model.parameters(), lr=1e-2)

    alone, alone_layers, alone_optimizer = make(None)
    model, layers, optimizer = make(mesh)
    losses = []
    for _ in range(4):
        tokens, answers = make_tokens(2 * size, 8, 16, seed=0)
        alone_optimizer.zero_grad()
        alone_loss = lm_loss(alone(tokens), answers)
        penalty = sum(one_process_balance(layer.routing) for layer in alone_layers)
        (alone_loss + ALPHA * penalty).backward()
        alone_optimizer.step()
        for layer in alone_layers:
            update_bias(layer.router, layer.routing.load_E, speed=0.01)

        optimizer.zero_grad()
        mine = slice(2 * rank, 2 * rank + 2)
        loss = lm_loss(model(tokens[mine]), answers[mine])
        penalty = sum(balance_loss(layer.routing) for layer in layers)
        (loss + ALPHA * penalty).backward()
        average_gradients(model, mesh)
        optimizer.step()
        for layer in layers:
            update_bias(layer.router, count_choices(layer.routing), speed=0.01)
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert_close(total / size, alone_loss.detach())
        losses.append(alone_loss.item())
    assert losses[-1] < losses[0]
    for key, parameter in model.state_dict().items():
        expected = alone.state_dict()[key]
        if ".experts." in key:
            experts = mesh.own_experts(12)
            expected = expected[experts.start : experts.stop]
        assert_close(parameter, expected, msg=lambda m, key=key: f"{key}: {m}")
    assert all(layer.router.bias_E.any() for layer in layers)


def one_process_balance(routing):
    """Without a word to other ranks: the oracle's process group is not its own."""
    share = routing.load_E.double() / routing.load_E.sum()
    return len(share) * (share * routing.probs_NE.mean(0)).sum()


@pytest.mark.parametrize(("n", "ep"), LAYOUTS)
def test_training_is_that_of_one_process(n, ep):
    run(world, n, check_training, ep)


# ------------------------------------------------------------------------------------ all-to-all


def check_all_to_all():
    rank, size = dist.get_rank(), dist.get_world_size()
    send = [(rank + 2 * to) % 3 for to in range(size)]  # zeros among them
    receive = [(source + 2 * rank) % 3 for source in range(size)]
    rows = (100 * rank + torch.arange(sum(send), dtype=torch.float64))[:, None].repeat(1, 2)
    rows.requires_grad_()
    got = all_to_all(rows, send, receive)
    expected = []
    for source in range(size):
        before = sum((source + 2 * to) % 3 for to in range(rank))
        expected += [100.0 * source + before + i for i in range(receive[source])]
    assert got[:, 0].tolist() == expected
    # The gradient of a row comes from the rank that has got it.
    (got * (rank + 1)).sum().backward()
    places = [to + 1.0 for to in range(size) for _ in range(send[to])]
    assert rows.grad[:, 1].tolist() == places


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_to_all_of_unequal_parts_and_its_gradient(n):
    run(world, n, check_all_to_all)


def send_once(num_tokens):
    config = MoEConfig(width=8, expert_width=4, num_experts=dist.get_world_size(), top_k=1)
    layer = MoE(config, make_expert_mesh())
    with torch.no_grad():  # token i of every rank wants expert i % n
        layer.router.weight_ED.zero_()
        layer.router.weight_ED.fill_diagonal_(50.0)
    x = F.one_hot(torch.arange(num_tokens) % config.num_experts, 8).float().requires_grad_()
    layer(x).sum().backward()


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_on_the_emulated_cluster(n):
    _, trace = run_traced(send_once, n, 16)
    timeline = emulate.simulate(trace, emulate.clusters.dgx_h100())
    once = all_to_all_bytes(num_tokens=16, top_k=1, width=8, itemsize=4, num_ranks=n)
    sizes = (n - 1) * 1 * 8  # one int64 per expert and rank
    assert timeline.bytes_per_link["device 0"] == 4 * once + sizes


# ---------------------------------------------------------------------------- router and balance


def test_the_bias_changes_choices_and_not_weights():
    router = Router(width=4, num_experts=5, top_k=2).double()
    x = draw(50, 4)
    before = router(x)
    assert_close(before.weights_NK.sum(1), torch.ones(50, dtype=torch.float64))
    rare = int(before.load_E.argmin())
    router.bias_E[rare] = 2.0
    after = router(x)
    assert after.load_E[rare] == 50
    chosen = after.probs_NE.gather(1, after.choices_NK)
    assert_close(after.weights_NK, chosen / chosen.sum(1, keepdim=True))
    assert_close(after.probs_NE, before.probs_NE, rtol=0, atol=0)


def test_autocast_does_not_change_what_a_router_chooses():
    torch.manual_seed(0)
    router, x = Router(width=64, num_experts=64, top_k=4), torch.randn(500, 64)
    exact = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = router(x)
    assert torch.equal(found.choices_NK, exact.choices_NK)
    assert torch.equal(found.weights_NK, exact.weights_NK)
    assert router(x.bfloat16()).weights_NK.dtype == torch.float32


def test_a_router_with_one_choice_learns():
    router = Router(width=4, num_experts=5, top_k=1).double()
    routing = router(draw(50, 4))
    assert torch.equal(routing.weights_NK[:, 0], routing.probs_NE.max(1).values)
    routing.weights_NK.sum().backward()
    assert router.weight_ED.grad.abs().max() > 0.01


def test_update_bias_balances_a_skewed_router():
    torch.manual_seed(0)
    router = Router(width=4, num_experts=8, top_k=2)
    x = torch.randn(512, 4) + 1.0
    first = imbalance(router(x).load_E)
    for _ in range(300):
        update_bias(router, router(x).load_E, speed=0.005)
    assert first > 2
    assert imbalance(router(x).load_E) < 1.15
    even = router.bias_E.clone()
    update_bias(router, torch.full((8,), 3))
    assert torch.equal(router.bias_E, even)


def test_balance_loss_of_known_loads():
    router = Router(width=4, num_experts=4, top_k=1).double()
    with torch.no_grad():
        router.weight_ED.copy_(100.0 * torch.eye(4))
    eye = torch.eye(4, dtype=torch.float64)
    assert balance_loss(router(eye)).item() == pytest.approx(1.0)
    assert balance_loss(router(eye[:1].repeat(9, 1))).item() == pytest.approx(4.0)
    assert balance_loss(router(eye[[0, 0, 0, 1]])).item() == pytest.approx(4 * (9 + 1) / 16)


def test_the_gradient_of_the_balance_loss_evens_the_load():
    torch.manual_seed(0)
    router = Router(width=4, num_experts=8, top_k=2)
    x = torch.randn(512, 4) + 1.0
    optimizer = torch.optim.SGD(router.parameters(), lr=0.5)
    first = imbalance(router(x).load_E)
    for _ in range(200):
        optimizer.zero_grad()
        balance_loss(router(x)).backward()
        optimizer.step()
    assert imbalance(router(x).load_E) < 0.6 * first


def test_first_choices_go_before_second_ones():
    choices = torch.tensor([[0, 2], [1, 0], [2, 0], [0, 1]])
    kept = keep_within_capacity(choices, 3, 2)
    assert kept.tolist() == [[True, True], [True, False], [True, False], [True, True]]
    assert keep_within_capacity(choices, 3, 1).sum() == 3
    assert keep_within_capacity(choices, 3, 4).all()
    assert expert_capacity(4, 2, 3, 1.0) == 3


# -------------------------------------------------------------------------------------- refusals


def make_layer(ep, num_experts):
    sizes: Any = {"width": 6, "expert_width": 5, "num_experts": num_experts, "top_k": 1}
    MoE(MoEConfig(**sizes), make_expert_mesh(ep))


@pytest.mark.parametrize(
    ("n", "ep", "experts", "message"),
    [
        (3, 3, 8, r"num_experts 8 cannot be spread evenly over ep 3 \(8 = 3 x 2 \+ 2\)"),
        (2, 2, 1, r"num_experts 1 cannot be spread evenly over ep 2 \(1 = 2 x 0 \+ 1\)"),
        (3, 2, 6, r"3 ranks cannot be split into groups of ep 2 \(3 = 2 x 1 \+ 1\)"),
        (2, 0, 6, "ep must be at least 1, got 0"),
        (2, 4, 4, r"2 ranks cannot be split into groups of ep 4 \(2 = 4 x 0 \+ 2\)"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_arithmetic(n, ep, experts, message):
    with pytest.raises(LaunchError, match=message):
        run(world, n, make_layer, ep, experts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 13}, "top_k must be 1 to 12"),
        ({"top_k": 0}, "top_k must be 1 to 12"),
        ({"shared_experts": -1}, "shared_experts is at least 0, got -1"),
        ({"capacity_factor": 0.0}, "capacity_factor must be positive or None, got 0.0"),
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
    ],
)
def test_impossible_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**(SIZES | options))


def test_tokens_of_a_different_width_are_refused():
    layer = MoE(MoEConfig(**SIZES))
    with pytest.raises(ValueError, match=r"expected tokens of width 6, got .* \(2, 12\)"):
        layer(torch.zeros(2, 12))  # would be four tokens of width 6


def test_experts_of_a_different_width_are_refused():
    with pytest.raises(ValueError, match="the model has width 32, the experts 6"):
        use_experts(GPT(GPTConfig()), MoEConfig(**SIZES))
