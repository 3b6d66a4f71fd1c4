"""Pipelines whose stages share weights, and whose micro-batches have unequal numbers of targets.

The oracle is one process in float64 that sees the whole batch.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from minidist.launch import run
from minidist.model import GPT, GPTConfig, ResNet, lm_loss
from minidist.parallel.pipeline import (
    ModelParallel,
    PipeDreamExecutor,
    PipelineExecutor,
    TensorSpec,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    split_model,
    zb_h1,
)
from minidist.parallel.pipeline.model_parallel import forward_backward
from minidist.parallel.pipeline.native import NativePipeline

VOCAB, T = 11, 5


def world(check, *args):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    check(*args)
    dist.barrier()
    dist.destroy_process_group()


def same_module_twice() -> nn.Module:
    shared = nn.Linear(6, 6)
    middle = [nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(nn.Embedding(VOCAB, 6), shared, *middle, shared, nn.Linear(6, VOCAB))


def thrice() -> nn.Module:
    shared = nn.Linear(6, 6)
    tanh = nn.Tanh()
    parts = [shared, tanh, shared, tanh, nn.Sequential(shared, nn.Linear(6, 6))]
    return nn.Sequential(nn.Embedding(VOCAB, 6), *parts, nn.Linear(6, VOCAB))


def tied_weight() -> nn.Module:
    embedding, head = nn.Embedding(VOCAB, 6), nn.Linear(6, VOCAB)
    head.weight = embedding.weight
    middle = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    return nn.Sequential(embedding, *middle, head)


def gpt(tied: bool = True, shared_block: bool = False) -> nn.Module:
    config = GPTConfig(
        vocab_size=VOCAB, context=T, width=6, num_layers=6, num_heads=2, mlp_ratio=2, tied=tied
    )
    model = GPT(config)
    if shared_block:
        model.blocks[5] = model.blocks[0]
    return model


MODELS = {
    "nothing shared": lambda: gpt(tied=False),
    "same module twice": same_module_twice,
    "thrice": thrice,
    "tied weight": tied_weight,
    "tied GPT": gpt,
    "tied GPT with a shared block": lambda: gpt(shared_block=True),
}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().double()


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Twelve sequences; most targets of the later ones do not count, some micro-batches' none."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB, (2, 12, T), generator=generator)
    targets[3:, 1:] = -100
    targets[9:] = -100
    return tokens, targets


def oracle(kind: str, num_steps: int) -> tuple[list[Tensor], nn.Module]:
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        # Two batches per update: gradients add up.
        for seed in (2 * step, 2 * step + 1):
            loss = lm_loss(model(draw(seed)[0]), draw(seed)[1])
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def compare(stages: Any, model: nn.Module, kind: str) -> None:
    expected = dict(model.named_parameters(remove_duplicate=False))
    for stage in stages:
        for name, weight in stage.named_parameters(remove_duplicate=False):
            assert_close(weight, expected[name], rtol=1e-7, atol=1e-9, msg=f"{kind}, {name}")


def check_pipelines(kind: str) -> None:
    rank, p = dist.get_rank(), dist.get_world_size()
    losses, model = oracle(kind, 3)
    for schedule in (gpipe(p, 4), one_f_one_b(p, 6), zb_h1(p, 4), interleaved(p, 12, 2)):
        if schedule.num_stages > 6:
            continue
        stages = split_model(make(kind), schedule.num_stages)[rank::p]
        optimizer = torch.optim.AdamW([w for s in stages for w in s.parameters()], lr=0.01)
        wrapped = [nn.Sequential(stage) for stage in stages]  # ties are found in wrappers, too
        pipeline = PipelineExecutor(wrapped, schedule, lm_loss)
        for step in range(3):
            for batch in (2 * step, 2 * step + 1):
                result = pipeline.step(*draw(batch))
                if result.loss is not None:
                    assert_close(result.loss, losses[batch], msg=f"{kind}, {schedule.name}")
            optimizer.step()
            optimizer.zero_grad()
        compare(stages, model, f"{kind}, {schedule.name}")
        evaluated = pipeline.evaluate(*draw(9))
        if evaluated.loss is not None:
            expected = lm_loss(model(draw(9)[0]), draw(9)[1])
            assert_close(evaluated.loss, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shared_weights_and_unequal_targets(world_size, kind):
    run(world, world_size, check_pipelines, kind, deadline_s=120)


def check_others() -> None:
    rank, p = dist.get_rank(), dist.get_world_size()
    for kind in MODELS:
        model = make(kind)
        loss = lm_loss(model(draw(0)[0]), draw(0)[1])
        loss.backward()
        gradients = {n: w.grad for n, w in model.named_parameters(remove_duplicate=False)}
        # torch's pipeline.
        stage: Any = split_model(make(kind), p)[rank]
        got = NativePipeline(stage, "GPipe", 4, lm_loss).step(*draw(0))
        if got is not None:
            assert_close(got, loss.detach())
        for name, weight in stage.named_parameters():
            assert_close(weight.grad, gradients[name], msg=f"{kind}, torch's, {name}")
        # One micro-batch, by hand.
        stage = split_model(make(kind), p)[rank]
        spec = TensorSpec((12, T, 6), torch.float64)
        inputs, targets = draw(0)
        got = forward_backward(stage, lm_loss, inputs=inputs, targets=targets, input_spec=spec)
        if got is not None:
            assert_close(got, loss.detach())
        for name, weight in stage.named_parameters():
            assert_close(weight.grad, gradients[name], msg=f"{kind}, by hand, {name}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_pipeline_and_the_naive_form(world_size):
    run(world, world_size, check_others, deadline_s=120)


# ---------------------------------------------------------------------------------- what counts


def mean_by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
    """A masked mean that is nan, with gradients of nan, where nothing counts."""
    keep = targets != 7
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * keep.flatten()).sum() / keep.sum()


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    weight = torch.arange(1.0, VOCAB + 1, dtype=torch.float64)
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), weight=weight)


def check_counts() -> None:
    rank, p = dist.get_rank(), dist.get_world_size()
    tokens, targets = draw(0)
    own = torch.where(targets == -100, 7, targets)
    cases: Any = [
        (mean_by_hand, own, lambda t: (t != 7).sum()),
        (weighted, own, lambda t: (t + 1).sum()),
        (lambda y, t: F.mse_loss(y[..., 0], t), own.double(), None),
        (lambda y, t: F.mse_loss(y[..., 0], t), torch.full_like(own, -100).double(), None),
    ]
    for loss_fn, wanted, count in cases:
        model = make("tied weight")
        loss = loss_fn(model(tokens), wanted)
        loss.backward()
        expected = {n: w.grad for n, w in model.named_parameters(remove_duplicate=False)}
        stage = split_model(make("tied weight"), p)[rank]
        options = {} if count is None else {"count": count}
        pipeline = PipelineExecutor(stage, one_f_one_b(p, 4), loss_fn, **options)
        result = pipeline.step(tokens, wanted)
        if result.loss is not None:
            assert_close(result.loss, loss.detach())
        for name, weight in stage.named_parameters():
            assert_close(weight.grad, expected[name])
    # Nothing counts in the whole batch: as torch, a loss of nan and gradients of zero.
    stage = split_model(make("tied weight"), p)[rank]
    result = PipelineExecutor(stage, one_f_one_b(p, 4), lm_loss).step(
        tokens, torch.full_like(targets, -100)
    )
    assert result.loss is None or result.loss.isnan()
    assert all(not weight.grad.any() for weight in stage.parameters() if weight.grad is not None)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_counts_is_a_choice(world_size):
    run(world, world_size, check_counts, deadline_s=120)


def check_other_means() -> None:
    stage, schedule = nn.Linear(2, 2), one_f_one_b(1, 2)
    weight = torch.ones(2)
    for loss_fn, said in (
        (nn.CrossEntropyLoss(ignore_index=0), "ignore_index=0"),
        (nn.CrossEntropyLoss(weight=weight), "weight=tensor"),
        (nn.NLLLoss(reduction="sum"), "reduction='sum'"),
        (nn.MSELoss(reduction="sum"), "reduction='sum'"),
        (partial(F.cross_entropy, ignore_index=-1, weight=weight), "ignore_index=-1, weight="),
    ):
        with pytest.raises(ValueError, match=rf"PipelineExecutor: the loss has {said}.*give count"):
            PipelineExecutor(stage, schedule, loss_fn)
        with pytest.raises(ValueError, match=rf"NativePipeline: the loss has {said}"):
            NativePipeline(stage, "gpipe", 2, loss_fn)
        PipelineExecutor(stage, schedule, loss_fn, count=lambda t: (t != 0).sum())
    for loss_fn in (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        partial(F.cross_entropy),
        nn.L1Loss(),
    ):
        PipelineExecutor(stage, schedule, loss_fn)


def test_losses_whose_mean_counts_otherwise_say_how():
    run(world, 1, check_other_means)


# ------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_cut_is_named():
    norm = nn.BatchNorm1d(4)
    both = nn.Sequential(norm, nn.Linear(4, 4), norm)
    with pytest.raises(ValueError, match=r"'0' and '2' are one BatchNorm1d on both sides"):
        split_model(both, 2)
    split_model(nn.Sequential(norm, nn.Linear(4, 4), nn.ReLU()), 2)
    with pytest.raises(ValueError, match=r"ModelParallel: .* tied"):
        ModelParallel(split_model(tied_weight(), 2), ["cpu", "cpu"])

    class Scaled(GPT):
        def __init__(self, config: GPTConfig) -> None:
            super().__init__(config)
            self.scale = nn.Parameter(torch.ones(()))
            self.embedding_dropout = nn.Dropout(0.1)

    config = GPTConfig(vocab_size=VOCAB, context=T, width=6, num_layers=2, num_heads=2)
    with pytest.raises(ValueError, match=r"Scaled also has scale, embedding_dropout"):
        split_model(Scaled(config), 2)
    resnet = ResNet()
    resnet.auxiliary = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"ResNet also has auxiliary"):
        split_model(resnet, 2)

    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    with pytest.raises(ValueError, match="got Twice with a forward of its own"):
        split_model(Twice(nn.Linear(2, 2), nn.Linear(2, 2)), 2)


def check_pipedream_refuses() -> None:
    stage = split_model(tied_weight(), 2)[dist.get_rank()]
    sgd = torch.optim.SGD(stage.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="tied weights, need the sum"):
        PipeDreamExecutor(stage, pipedream(2, 2), lm_loss, sgd)


def test_pipedream_refuses_ties():
    run(world, 2, check_pipedream_refuses)
