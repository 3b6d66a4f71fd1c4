"""Models that a plan can name, by their sizes.

The parameters of each model agree with the published number, and so do its FLOPs per token where a
table prints them.

>>> round(MODELS["qwen3-235b-a22b"].num_parameters / 1e9)
235
>>> round(MODELS["nemotron-340b"].num_parameters / 1e9)
341
"""

from __future__ import annotations

from dataclasses import replace

from minidist import cost
from minidist.cost.transformer import Transformer, megatron_gpt

# Squared ReLU instead of a gate, a vocabulary of 256,000 (arXiv 2402.16819).
_NEMOTRON_8B = replace(
    cost.LLAMA2_7B,
    vocab_size=256000,
    mlp_ratio=4,
    gated_mlp=False,
)
# 128 experts, 8 per token, heads of 128 (arXiv 2505.09388).
_QWEN3_235B = replace(
    cost.MIXTRAL_8X7B,
    vocab_size=151936,
    num_layers=94,
    num_heads=64,
    num_kv_heads=4,
    attention_width=64 * 128,
    mlp_ratio=3,
    num_experts=128,
    experts_per_token=8,
    expert_width=1536,
)
MODELS: dict[str, Transformer] = {
    "gpt3-5b": megatron_gpt(width=4096, num_layers=24, num_heads=32),
    "gpt3-20b": megatron_gpt(width=6144, num_layers=44, num_heads=48),
    "gpt3-175b": cost.GPT3_175B,
    "llama2-7b": cost.LLAMA2_7B,
    "llama2-13b": cost.LLAMA2_13B,
    "llama2-70b": cost.LLAMA2_70B,
    "llama3-8b": cost.LLAMA3_8B,
    "llama3-70b": cost.LLAMA3_70B,
    "llama3-405b": cost.LLAMA3_405B,
    "nemotron-8b": _NEMOTRON_8B,
    "nemotron-22b": replace(_NEMOTRON_8B, width=6144, num_layers=40, num_heads=48),
    "nemotron-340b": replace(
        _NEMOTRON_8B, width=18432, num_layers=96, num_heads=96, num_kv_heads=8
    ),
    "mixtral-8x7b": cost.MIXTRAL_8X7B,
    "mixtral-8x22b": replace(
        cost.MIXTRAL_8X7B,
        vocab_size=32768,
        context=65536,
        width=6144,
        num_layers=56,
        num_heads=48,
        mlp_ratio=16384 / 6144,
        expert_width=16384,
    ),
    "qwen3-30b-a3b": replace(
        _QWEN3_235B,
        width=2048,
        num_layers=48,
        num_heads=32,
        attention_width=32 * 128,
        expert_width=768,
    ),
    "qwen3-235b-a22b": _QWEN3_235B,
    "deepseek-v3": cost.DEEPSEEK_V3,
}
