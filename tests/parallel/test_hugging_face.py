"""Models of Hugging Face's transformers, built from their configurations, train as in one process.

They return objects, take keywords, share weights, compute losses in float32, and keep buffers that
no state dict has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.launch import run
from minidist.parallel.data import BucketedDDP
from minidist.parallel.recompute import recompute
from minidist.parallel.zero import ShardedOptimizer, Zero2Optimizer, Zero3

VOCABULARY, TOKENS, STEPS = 61, 12, 3
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
# What is called, the optimizer, and the parameters after training.
Parts = tuple[Callable[..., Any], torch.optim.Optimizer, Callable[[], dict[str, Tensor]]]


def gpt2() -> nn.Module:
    """Conv1D layers, and a head that is the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    none |= {"bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=24, n_layer=2, n_head=4, **none
        )
    )


def llama(tied: bool) -> nn.Module:
    """Grouped queries, and positions in buffers that no state dict has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": partial(llama, False), "tied llama": partial(llama, True)}


def blocks_of(model: Any) -> list[nn.Module]:
    """The transformer's blocks."""
    return [*(model.transformer.h if hasattr(model, "transformer") else model.model.layers)]


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def alone(model: nn.Module) -> Parts:
    return model, SGD(model.parameters()), partial(parameters_of, model)


def ddp(model: nn.Module) -> Parts:
    return BucketedDDP(model), SGD(model.parameters()), partial(parameters_of, model)


def ddp_recomputed(model: nn.Module) -> Parts:
    for block in blocks_of(model):
        recompute(block)
    return ddp(model)


def ddp_checkpointed(model: Any) -> Parts:
    model.gradient_checkpointing_enable()  # their own way to compute again
    return ddp(model)


def zero1(model: nn.Module) -> Parts:
    optimizer = ShardedOptimizer(model.parameters(), SGD)
    return BucketedDDP(model), optimizer, partial(parameters_of, model)


def zero2(model: nn.Module) -> Parts:
    return model, Zero2Optimizer(model.parameters(), SGD), partial(parameters_of, model)


def zero3(model: nn.Module) -> Parts:
    sharded = Zero3(model, units=blocks_of(model))
    return model, SGD(model.parameters()), sharded.full_state_dict


FORMS = (ddp, ddp_recomputed, ddp_checkpointed, zero1, zero2, zero3)


def trained(model: nn.Module, form: Callable[[nn.Module], Parts], ids: Tensor) -> dict[str, Tensor]:
    """The parameters after a few steps on the same batch."""
    model.train()
    call, optimizer, parameters = form(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        call(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return parameters()


def check_all() -> list[str]:
    """What differs from one process, of every model under every form."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(
        0, VOCABULARY, (2 * size, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    wrong = []
    for name, build in MODELS.items():
        torch.manual_seed(0)
        start = build().double()
        state = {key: value.clone() for key, value in start.state_dict().items()}
        right = trained(start, alone, ids)
        for form in FORMS:
            model = build().double()
            model.load_state_dict(state)
            got = trained(model, form, ids[2 * rank : 2 * rank + 2])
            gaps = {key: (got[key] - value).abs().max().item() for key, value in right.items()}
            if max(gaps.values()) > 1e-6:  # their loss is rounded to float32
                wrong.append(f"rank {rank}: {name} under {form.__name__}: {gaps}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 3])
def test_models_of_transformers_train_as_in_one_process(world_size):
    assert run(check_all, world_size, deadline_s=200) == [[]] * world_size
