"""The number of parameters of a GPT and its FLOPs per token, from the sizes of the model.

Symbols, as in Narayanan et al. 2021 (arXiv 2104.04473): l layers, h width, s context, V vocabulary,
b sequences, a heads. One block has 12 h^2 weights: 3 h^2 for queries, keys and values, h^2 for the
output, 8 h^2 for the MLP. A matrix product with n weights costs 2n FLOPs per token forward and 4n
backward (once for the inputs, once for the weights), hence the "6N" of Kaplan et al. (2001.08361).

Example: GPT-3 has 175 billion parameters. Training takes 6N = 1.05 TFLOP per token, and attention
scores add 3 percent.

>>> gpt3 = GPT3_175B
>>> round(gpt3.num_parameters / 1e9, 1)
174.6
>>> round(gpt3.flops_per_token() / (6 * gpt3.num_parameters), 2)
1.03
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Sizes of a decoder-only transformer. Field names are those of `minidist.model.GPTConfig`.

    Attributes:
        mlp_ratio: inner width of the MLP / h. A float, because some models choose an inner width
            that suits GPUs and is no multiple of h.
        gated_mlp: SwiGLU, with three matrices instead of two.
        num_kv_heads: fewer than num_heads for grouped-query attention; None means num_heads.
        learned_positions: True for a table of context x width (GPT), False without one (rotary).
        bias, norm_bias: whether the linear layers and the norms have a bias (LayerNorm has a bias,
            RMSNorm has none).
        num_experts, experts_per_token, expert_width, shared_experts: routed experts of one block,
            how many of them a token visits, their inner width, and experts that every token visits.
            0 experts is a dense model.
        nodes_per_token: a limit to the nodes whose experts a token visits; None if there is none.
        dense_layers: blocks of such a model that have the dense MLP instead.
        attention_width: heads times the width of a head, where that is not h.
        attention_entries: entries of a block's attention matrices, where they are not 2h^2 and
            2h times the width of the keys (multi-head latent attention).
    """

    vocab_size: int
    context: int
    width: int
    num_layers: int
    num_heads: int
    mlp_ratio: float = 4
    gated_mlp: bool = False
    num_kv_heads: int | None = None
    tied: bool = True
    bias: bool = True
    norm_bias: bool = True
    learned_positions: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    nodes_per_token: int | None = None
    attention_width: int | None = None
    attention_entries: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "width", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"Transformer: {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.attention_width is None and self.width % self.num_heads:
            raise ValueError(
                f"Transformer: width {self.width} is not divisible by {self.num_heads} heads "
                f"(remainder {self.width % self.num_heads})"
            )
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"Transformer: a token visits 1 to {self.num_experts} experts, got "
                f"{self.experts_per_token}"
            )
        if self.num_experts and self.expert_width < 1:
            raise ValueError(f"Transformer: expert_width must be >= 1, got {self.expert_width}")

    @classmethod
    def from_config(cls, config: Any) -> Transformer:
        """From an object with the same field names, such as `minidist.model.GPTConfig`."""
        names = ("vocab_size", "context", "width", "num_layers", "num_heads", "mlp_ratio")
        return cls(
            **{name: getattr(config, name) for name in names}, tied=config.tied, bias=config.bias
        )

    @property
    def mlp_width(self) -> int:
        return round(self.mlp_ratio * self.width)

    @property
    def query_width(self) -> int:
        """Heads times the width of a head: h in most models."""
        return self.attention_width or self.width

    @property
    def kv_width(self) -> float:
        """Width of the keys, and of the values: h, or less with grouped-query attention."""
        return self.query_width * (self.num_kv_heads or self.num_heads) / self.num_heads

    @property
    def head_width(self) -> float:
        """Width of one head, h / a."""
        return self.query_width / self.num_heads

    @functools.cached_property
    def attention_weights(self) -> int:
        """Entries of one block's attention matrices: 4 h^2 for a GPT."""
        if self.attention_entries is not None:
            return self.attention_entries
        return round(2 * self.width * self.query_width + 2 * self.width * self.kv_width)

    def _mlp_weights(self, width: float) -> float:
        return (3 if self.gated_mlp else 2) * self.width * width

    @functools.cached_property
    def routed_weights(self) -> float:
        """Entries of one block's routed experts, averaged over all blocks; 0 in a dense model."""
        share = 1 - self.dense_layers / self.num_layers
        return share * self.num_experts * self._mlp_weights(self.expert_width)

    @functools.cached_property
    def block_weights(self) -> int:
        """Entries of a block's weight matrices that a token meets: 12 h^2 for a GPT. With experts,
        the mean over the blocks: shared experts, the chosen experts and the router."""
        if not self.num_experts:
            return round(self.attention_weights + self._mlp_weights(self.mlp_width))
        dense = self.dense_layers / self.num_layers
        visited = self.experts_per_token + self.shared_experts
        expert = visited * self._mlp_weights(self.expert_width) + self.width * self.num_experts
        mlp = dense * self._mlp_weights(self.mlp_width) + (1 - dense) * expert
        return round(self.attention_weights + mlp)

    @functools.cached_property
    def block_parameters(self) -> int:
        """Weights, biases and the two norms of one block: 12 h^2 + 13 h for a GPT. With experts,
        the mean over the blocks."""
        h = self.width
        norms = 2 * h * (2 if self.norm_bias else 1)
        weights = self.block_weights + self.routed_weights
        if self.num_experts:  # block_weights has the visited experts, routed_weights has them all
            visited = self.experts_per_token * self._mlp_weights(self.expert_width)
            weights -= visited * (1 - self.dense_layers / self.num_layers)
        if not self.bias:
            return round(weights + norms)
        mlp_biases = self.mlp_width * (2 if self.gated_mlp else 1) + h
        return round(weights + norms + 2 * h + 2 * self.kv_width + mlp_biases)

    @property
    def embedding_parameters(self) -> int:
        """Token table, position table and, unless tied, the head."""
        tables = self.vocab_size * (1 if self.tied else 2)
        return self.width * (tables + (self.context if self.learned_positions else 0))

    @functools.cached_property
    def num_parameters(self) -> int:
        """All parameters. 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)) + 2h for a tied GPT
        (arXiv 2104.04473, equation 2, which leaves out the 2h of the last norm)."""
        final_norm = self.width * (2 if self.norm_bias else 1)
        return self.num_layers * self.block_parameters + self.embedding_parameters + final_norm

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets; all of them in a dense model."""
        unvisited = self.num_experts - self.experts_per_token
        share = 1 - self.dense_layers / self.num_layers
        idle = self.num_layers * share * unvisited * self._mlp_weights(self.expert_width)
        return round(self.num_parameters - idle)

    # ------------------------------------------------------------------------------------ FLOPs

    def attention_flops_per_token(self, *, causal: bool = False) -> float:
        """Forward FLOPs of the scores and of their product with the values, all layers: 4 l s h.

        It is usual to count the full square of scores, although a causal kernel computes only half
        of the square. `causal=True` counts this half.
        """
        return 4 * self.num_layers * self.context * self.query_width * (0.5 if causal else 1.0)

    def forward_flops_per_token(self, *, causal: bool = False, head: bool = True) -> float:
        """2 FLOPs per weight of a matrix product, plus attention. Table look-ups cost no FLOPs. The
        head is a matrix product, also if it is tied."""
        weights = self.num_layers * self.block_weights
        weights += self.vocab_size * self.width if head else 0
        return 2 * weights + self.attention_flops_per_token(causal=causal)

    def flops_per_token(self, *, causal: bool = False, recompute: str = "none") -> float:
        """Forward and backward, which is three times the forward pass, plus recomputation.

        Args:
            recompute: "none"; "full": repeats every block's forward pass, but not the head;
                "selective": repeats only the attention scores (arXiv 2205.05198).
        """
        total = 3 * self.forward_flops_per_token(causal=causal)
        if recompute == "full":
            return total + self.forward_flops_per_token(causal=causal, head=False)
        if recompute == "selective":
            return total + self.attention_flops_per_token(causal=causal)
        if recompute != "none":
            raise ValueError(f"recompute is none, selective or full, got {recompute!r}")
        return total


def megatron_iteration_flops(
    *, model: Transformer, global_batch: int, with_recompute: bool = True
) -> float:
    """FLOPs of one step: F = 96 B s l h^2 (1 + s/(6h) + V/(16 l h)) (arXiv 2104.04473, eq. 3).

    The factor 96 includes the recomputed forward pass, so a utilisation from these FLOPs is the
    *hardware* figure (HFU). Without recomputation the factor is 72, the head's term is V/(12 l h),
    and the utilisation is MFU.

    >>> model = GPT3_175B
    >>> full = megatron_iteration_flops(model=model, global_batch=1)
    >>> mine = model.context * model.flops_per_token(recompute="full")
    >>> abs(full / mine - 1) < 1e-12
    True
    """
    b, s, layers = global_batch, model.context, model.num_layers
    h, vocab = model.width, model.vocab_size
    if with_recompute:
        return 96 * b * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    return 72 * b * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))


def megatron_gpt(*, width: int, num_layers: int, num_heads: int) -> Transformer:
    """The GPTs of arXiv 2104.04473: context 2048, vocabulary 51,200."""
    return Transformer(
        vocab_size=51200, context=2048, width=width, num_layers=num_layers, num_heads=num_heads
    )


GPT3_175B = megatron_gpt(width=12288, num_layers=96, num_heads=96)
LLAMA2_7B = Transformer(
    vocab_size=32000,
    context=4096,
    width=4096,
    num_layers=32,
    num_heads=32,
    mlp_ratio=11008 / 4096,
    gated_mlp=True,
    tied=False,
    bias=False,
    norm_bias=False,
    learned_positions=False,
)
LLAMA2_13B = replace(
    LLAMA2_7B,
    vocab_size=32000,
    context=4096,
    width=5120,
    num_layers=40,
    num_heads=40,
    mlp_ratio=13824 / 5120,
)
LLAMA2_70B = replace(
    LLAMA2_7B,
    vocab_size=32000,
    context=4096,
    width=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    mlp_ratio=28672 / 8192,
)
LLAMA3_8B = replace(
    LLAMA2_7B,
    vocab_size=128256,
    context=8192,
    width=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    mlp_ratio=14336 / 4096,
)
LLAMA3_405B = replace(
    LLAMA2_7B,
    vocab_size=128256,
    context=8192,
    width=16384,
    num_layers=126,
    num_heads=128,
    num_kv_heads=8,
    mlp_ratio=53248 / 16384,
)
# 8 experts, 2 per token (arXiv 2401.04088).
MIXTRAL_8X7B = Transformer(
    vocab_size=32000,
    context=4096,
    width=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    mlp_ratio=14336 / 4096,
    gated_mlp=True,
    tied=False,
    bias=False,
    norm_bias=False,
    learned_positions=False,
    num_experts=8,
    experts_per_token=2,
    expert_width=14336,
)
# 256 routed experts and a shared one, 8 per token in at most 4 nodes, three dense blocks; latent
# attention with ranks 1,536 and 512, heads of 128 + 64 and 128 (arXiv 2412.19437).
DEEPSEEK_V3 = Transformer(
    vocab_size=129280,
    context=4096,
    width=7168,
    num_layers=61,
    num_heads=128,
    mlp_ratio=18432 / 7168,
    gated_mlp=True,
    tied=False,
    bias=False,
    norm_bias=False,
    learned_positions=False,
    num_experts=256,
    experts_per_token=8,
    expert_width=2048,
    shared_experts=1,
    dense_layers=3,
    nodes_per_token=4,
    attention_width=128 * (192 + 128) // 2,
    attention_entries=7168 * 1536
    + 1536 * 128 * 192
    + 7168 * (512 + 64)
    + 512 * 128 * (128 + 128)
    + 128 * 128 * 7168,
)
LLAMA3_70B = replace(
    LLAMA2_7B,
    vocab_size=128256,
    context=8192,
    width=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    mlp_ratio=28672 / 8192,
)
