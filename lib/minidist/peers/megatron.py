"""A run of `minidist.train` in Megatron: arguments for its script and for Megatron-Core's classes.

Example, from a checkout of Megatron-LM::

    torchrun --nproc-per-node 8 pretrain_gpt.py $(python -m minidist.peers.megatron --tp 2 --pp 2)

The second command needs WORLD_SIZE=8 in its environment, or `--dp 2`.

>>> from minidist.train import TrainConfig
>>> words = megatron_arguments(TrainConfig(tp=2, sequence_parallel=True, zero=1), world_size=4)
>>> words[words.index("--tensor-model-parallel-size") + 1], "--use-distributed-optimizer" in words
('2', True)
>>> megatron_arguments(TrainConfig(zero=2), world_size=4)
Traceback (most recent call last):
    ...
ValueError: Megatron recipe: zero 2: its distributed optimizer is ZeRO-1; use 0 or 1

Differences: Megatron trains on its own mock data; its axes of ranks from innermost to outermost are
tp, cp, dp, pp, and ours are tp, cp, pp, dp; in Megatron query, key and value are one layer; with
bf16 Megatron casts the parameters and keeps an fp32 copy in the optimiser.

Papers: Megatron-LM (arXiv 1909.08053, 2104.04473, 2205.05198).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from minidist.train import TrainConfig, parse_args


def megatron_arguments(config: TrainConfig, world_size: int) -> list[str]:
    """The arguments of Megatron-LM's `pretrain_gpt.py`. Needs no Megatron.

    Raises:
        ValueError: the configuration does not fit the ranks (`TrainConfig.check`), or has a setting
            that this recipe cannot translate.
    """
    _check(config, world_size)
    pairs: dict[str, Any] = {
        "tensor-model-parallel-size": config.tp,
        "pipeline-model-parallel-size": config.pp,
        "context-parallel-size": config.cp,
        "num-layers": config.num_layers,
        "hidden-size": config.width,
        "ffn-hidden-size": config.model.mlp_ratio * config.width,
        "num-attention-heads": config.num_heads,
        "seq-length": config.context,
        "max-position-embeddings": config.context,
        "position-embedding-type": "learned_absolute",
        "attention-dropout": config.dropout,
        "hidden-dropout": config.dropout,
        "micro-batch-size": config.micro_batch,
        "global-batch-size": config.global_batch,
        "train-iters": config.steps,
        "lr": config.lr,
        "min-lr": config.final_lr,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": config.warmup_steps,
        "weight-decay": config.weight_decay,
        "adam-beta2": 0.999,  # torch's default; Megatron's default is the same
        "clip-grad": config.max_norm,
        "seed": config.seed or 1,  # Megatron needs a positive seed
        "tokenizer-type": "NullTokenizer",
        "vocab-size": config.vocab_size,
    }
    flags = ["mock-data"]
    if config.virtual_stages > 1:
        pairs["num-layers-per-virtual-pipeline-stage"] = config.num_layers // (
            config.pp * config.virtual_stages
        )
    flags += ["sequence-parallel"] if config.sequence_parallel else []
    flags += ["use-distributed-optimizer"] if config.zero else []
    flags += [] if config.tied else ["untie-embeddings-and-output-weights"]
    flags += [config.precision] if config.precision != "fp32" else []
    words = [word for name, value in pairs.items() for word in (f"--{name}", str(value))]
    return words + [f"--{flag}" for flag in flags]


def megatron_settings(config: TrainConfig, world_size: int) -> dict[str, dict[str, Any]]:
    """Keyword arguments of Megatron-Core's functions and classes. Needs no Megatron.

    The keys are the names of the function and the classes: "initialize_model_parallel",
    "TransformerConfig", "GPTModel" and "DistributedDataParallelConfig".

    Raises:
        ValueError: as `megatron_arguments`.
    """
    _check(config, world_size)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return {
        "initialize_model_parallel": {
            "tensor_model_parallel_size": config.tp,
            "pipeline_model_parallel_size": config.pp,
            "virtual_pipeline_model_parallel_size": (
                config.virtual_stages if config.virtual_stages > 1 else None
            ),
            "context_parallel_size": config.cp,
        },
        "TransformerConfig": {
            "num_layers": config.num_layers,
            "hidden_size": config.width,
            "ffn_hidden_size": config.model.mlp_ratio * config.width,
            "num_attention_heads": config.num_heads,
            "hidden_dropout": config.dropout,
            "attention_dropout": config.dropout,
            "tensor_model_parallel_size": config.tp,
            "pipeline_model_parallel_size": config.pp,
            "context_parallel_size": config.cp,
            "sequence_parallel": config.sequence_parallel,
            "pipeline_dtype": dtypes[config.precision],
            "params_dtype": dtypes[config.precision],
            "bf16": config.precision == "bf16",
            "fp16": config.precision == "fp16",
        },
        "GPTModel": {
            "vocab_size": config.vocab_size,
            "max_sequence_length": config.context,
            "share_embeddings_and_output_weights": config.tied,
            "position_embedding_type": "learned_absolute",
        },
        "DistributedDataParallelConfig": {
            "use_distributed_optimizer": config.zero == 1,
            "overlap_grad_reduce": True,
        },
    }


def build_megatron(config: TrainConfig, world_size: int) -> nn.Module:
    """This rank's part of the model, built from Megatron-Core's own layers (no Transformer Engine).

    Collective: call it on all ranks of the default process group. The model can be built and
    inspected on a CPU; its forward pass needs a GPU.

    Raises:
        ValueError: as `megatron_arguments`; or several virtual stages, which would need several
            models per rank.
        ModuleNotFoundError: Megatron-Core is not installed.
    """
    settings = megatron_settings(config, world_size)
    if config.virtual_stages > 1:
        raise ValueError("build_megatron: virtual stages are several models per rank, want one")
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    from megatron.core.models.gpt.gpt_layer_specs import (  # pyright: ignore[reportMissingImports]
        get_gpt_layer_local_spec,
    )
    from megatron.core.models.gpt.gpt_model import (  # pyright: ignore[reportMissingImports]
        GPTModel,
    )
    from megatron.core.transformer.transformer_config import (  # pyright: ignore[reportMissingImports]
        TransformerConfig,
    )

    parallel_state.initialize_model_parallel(**settings["initialize_model_parallel"])
    plain = {"persist_layer_norm": False, "use_cpu_initialization": not torch.cuda.is_available()}
    return GPTModel(
        config=TransformerConfig(**settings["TransformerConfig"], **plain),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **settings["GPTModel"],
    )


def _check(config: TrainConfig, world_size: int) -> None:
    config.check(world_size)
    if config.zero > 1:
        raise ValueError(
            f"Megatron recipe: zero {config.zero}: its distributed optimizer is ZeRO-1; use 0 or 1"
        )
    if config.num_experts:
        raise ValueError(f"Megatron recipe: num_experts {config.num_experts}: its layers are dense")
    if config.precision == "fp64":
        raise ValueError("Megatron recipe: precision fp64: it has fp32, bf16 and fp16")


def main() -> None:
    config = parse_args()
    ranks = config.pp * config.cp * config.tp * (config.dp or 1)
    print(*megatron_arguments(config, int(os.environ.get("WORLD_SIZE", ranks))))


if __name__ == "__main__":
    main()
