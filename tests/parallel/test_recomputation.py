"""Activation checkpointing draws the same dropout masks again, in every form of parallelism.

The oracle is one process in float64 without recomputation. It gets the masks that the ranks drew in
their first forward pass, put together to those of whole sequences and whole batches.
"""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from minidist.data import make_tokens
from minidist.launch import run
from minidist.model import GPT, GPTConfig, lm_loss
from minidist.parallel.context import (
    context_parallel_gpt,
    shard_sequence,
    sum_gradients,
    unshard_sequence,
)
from minidist.parallel.data import convert_sync_batch_norm
from minidist.parallel.pipeline import (
    PipeDreamExecutor,
    PipelineExecutor,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    split_model,
    zb_h1,
)
from minidist.parallel.recompute import recompute
from minidist.parallel.tensor import full_state_dict, parallelize_gpt
from minidist.parallel.tensor.block import ParallelDropout

KINDS = ["none", "reentrant", "non-reentrant", "ours"]
P = 0.3


class Fixed(nn.Module):
    """Dropout with a mask that is given."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.mask, x / (1 - P), 0.0)


def make_model(num_layers: int = 2) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=12, context=24, width=24, num_layers=num_layers, num_heads=12, dropout=P
    )
    return GPT(config).double()


def batch(num_sequences: int = 4) -> tuple[Tensor, Tensor]:
    return make_tokens(num_sequences, 24, 12)


def apply(kind: str, blocks) -> None:
    """Recompute every block, as `kind` says."""
    for block in blocks:
        if kind == "ours":
            assert recompute(block) is block
            recompute(block)  # a second call changes nothing
        elif kind != "none":
            forward, reentrant = block.forward, kind == "reentrant"
            block.forward = lambda x, f=forward, r=reentrant: checkpoint(f, x, use_reentrant=r)


def record_masks(module: nn.Module) -> dict[str, list[Tensor]]:
    """The masks of all dropouts, by name, one for each call outside of a backward pass."""
    masks: dict[str, list[Tensor]] = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Dropout | ParallelDropout):

            def keep(part, inputs, output, name=name):
                if torch._C._current_graph_task_id() == -1:
                    masks.setdefault(name, []).append(output.detach() != 0)

            part.register_forward_hook(keep)
    return masks


def oracle(masks: dict[str, Tensor], num_layers: int = 2) -> tuple[Tensor, dict[str, Any]]:
    """Loss and gradients of one process with these masks."""
    model = make_model(num_layers)
    for name, mask in masks.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Fixed(mask))
    loss = lm_loss(model(batch()[0]), batch()[1])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def gather(tensor: Tensor, dim: int) -> Tensor:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return torch.cat(every, dim)


def world(check, *args):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    check(*args)
    dist.barrier()
    dist.destroy_process_group()


# -------------------------------------------------------------------------- tensor and sequence


def check_tensor() -> None:
    for sequence_parallel, overlap in [(False, False), (True, False), (True, True)]:
        for kind in KINDS:
            split: Any = parallelize_gpt(
                make_model(), sequence_parallel=sequence_parallel, overlap=overlap
            )
            apply(kind, split.blocks)
            masks = record_masks(split)
            torch.manual_seed(5)
            loss = split.loss(*batch())
            loss.backward()
            sequence = sequence_parallel and dist.get_world_size() > 1
            whole = {n: gather(m[0], 1) if sequence else m[0] for n, m in masks.items()}
            expected, gradients = oracle(whole)
            # The gradients have the parts of the parameters: put together, they are the oracle's.
            with torch.no_grad():
                for p in split.parameters():
                    p.copy_(p.grad)
            message = f"sequence_parallel={sequence_parallel}, {kind}"
            assert_close(loss.detach(), expected, msg=message)
            assert_close(full_state_dict(split), gradients, msg=lambda m: f"{message}: {m}")  # noqa: B023


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_tensor_and_sequence_parallel(world_size):
    run(world, world_size, check_tensor, deadline_s=120)


# ------------------------------------------------------------------------------------- context


def check_context() -> None:
    for method in ("ring", "ulysses"):
        for kind in KINDS:
            model = context_parallel_gpt(make_model(), method=method)
            apply(kind, model.blocks)
            masks = record_masks(model)
            torch.manual_seed(5 + dist.get_rank())
            loss = model.loss(*(shard_sequence(x) for x in batch()))
            loss.backward()
            sum_gradients(model)
            expected, gradients = oracle({n: unshard_sequence(m[0]) for n, m in masks.items()})
            assert_close(loss.detach(), expected, msg=f"{method}, {kind}")
            for name, p in model.named_parameters():
                assert_close(p.grad, gradients[name], msg=f"{method}, {kind}, {name}")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_context_parallel(world_size):
    run(world, world_size, check_context, deadline_s=120)


# ------------------------------------------------------------------------------------ pipeline


def check_pipeline() -> None:
    rank, p = dist.get_rank(), dist.get_world_size()
    schedules = [gpipe(p, 4), one_f_one_b(p, 4), zb_h1(p, 4)]
    for schedule in schedules + ([] if 4 % p else [interleaved(p, 4, 2)]):
        for kind in KINDS:
            stages: Any = split_model(make_model(6), schedule.num_stages)[rank::p]
            for stage in stages:
                apply(kind, stage.blocks.values())
            masks: list[Any] = [record_masks(stage) for stage in stages]
            torch.manual_seed(5 + rank)
            pipeline = PipelineExecutor(stages, schedule, lm_loss)
            pipeline.step(*batch())  # finds the shapes, which draws masks, too
            for stage, drawn in zip(stages, masks, strict=True):
                stage.zero_grad()
                drawn.clear()
            result = pipeline.step(*batch())
            own = {n: torch.cat(each) for drawn in masks for n, each in drawn.items()}
            every: list[Any] = [None] * p
            dist.all_gather_object(every, own)
            whole = {n: mask for part in every for n, mask in part.items()}
            assert len(whole) == 12
            expected, gradients = oracle(whole, 6)
            if result.loss is not None:
                assert_close(result.loss, expected)
            for stage in stages:
                for name, w in stage.named_parameters():
                    assert_close(w.grad, gradients[name], msg=f"{schedule.name}, {kind}, {name}")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_pipeline(world_size):
    run(world, world_size, check_pipeline, deadline_s=120)


def check_pipedream() -> None:
    rank, p = dist.get_rank(), dist.get_world_size()
    trained = []
    for kind in KINDS:
        stage: Any = split_model(make_model(4), p)[rank]
        apply(kind, stage.blocks.values())
        torch.manual_seed(5 + rank)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        PipeDreamExecutor(stage, pipedream(p, 4), lm_loss, optimizer).step(*batch())
        trained.append([w.detach() for w in stage.parameters()])
    for kind, weights in zip(KINDS, trained, strict=True):
        assert_close(weights, trained[0], msg=lambda m: f"{kind}: {m}")  # noqa: B023


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_pipedream_computes_again_with_the_weights_of_the_forward(world_size):
    run(world, world_size, check_pipedream, deadline_s=120)


def test_recompute_keeps_names_and_evaluation():
    model = make_model()
    plain = copy.deepcopy(model)
    apply("ours", model.blocks)
    assert list(model.state_dict()) == list(plain.state_dict())
    calls = []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.eval()
    assert_close(model(batch()[0]), plain.eval()(batch()[0]))
    assert len(calls) == 2
    model.train()
    lm_loss(model(batch()[0]), batch()[1]).backward()
    assert len(calls) == 2 + 4


def check_running_statistics() -> None:
    rank = dist.get_rank()
    for convert in (lambda net: net, convert_sync_batch_norm):
        nets = []
        for again in (False, True):
            torch.manual_seed(0)
            block = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(P), nn.Tanh())
            net = convert(nn.Sequential(block, nn.Linear(4, 1))).double()
            if again:
                recompute(net[0])
            for step in range(3):
                torch.manual_seed(10 * step + rank)
                net(torch.randn(6, 3, dtype=torch.double)).square().sum().backward()
            nets.append(net)
        plain, recomputed = nets
        assert_close(recomputed.state_dict(), plain.state_dict(), rtol=0.0, atol=0.0)
        for p, q in zip(plain.parameters(), recomputed.parameters(), strict=True):
            assert_close(q.grad, p.grad)


def test_running_statistics_are_updated_once():
    run(world, 2, check_running_statistics)
