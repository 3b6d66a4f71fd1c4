"""The two small models of the course, a GPT and a ResNet: every technique is shown on them.

They consist of the same parts as large models, and their code knows nothing about ranks. The
parallel versions take these modules and split, shard or wrap them.

>>> model = GPT(GPTConfig(vocab_size=50, context=8, width=16, num_layers=2, num_heads=4))
>>> tokens_BT = torch.zeros(3, 8, dtype=torch.int64)
>>> model(tokens_BT).shape
torch.Size([3, 8, 50])
>>> ResNet(num_classes=10)(torch.zeros(2, 3, 16, 16)).shape
torch.Size([2, 10])

Letters of shapes: B batch, T tokens, D width, H heads, K width of a head, V vocabulary; C channels.
Papers: GPT-2 (Radford et al. 2019), ResNet (arXiv 1512.03385).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.packing import document_mask, document_positions


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of a GPT."""

    vocab_size: int = 64
    context: int = 32  # largest number of tokens in a sequence
    width: int = 32
    num_layers: int = 2
    num_heads: int = 4
    mlp_ratio: int = 4  # width of the MLP divided by the width of the model
    dropout: float = 0.0
    tied: bool = False  # the output layer uses the token embedding's weight
    bias: bool = True

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(
                f"GPTConfig: width {self.width} cannot be split into {self.num_heads} equal heads"
            )


class GPT(nn.Module):
    """A causal language model: embeddings, blocks, a norm, an output layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation.

        The more layers the model has, the smaller the weights of the layers that add to the
        residual stream.
        """
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                adds = name.endswith(("attention.out", "mlp.down"))
                nn.init.normal_(module.weight, std=residual_std if adds else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def embed(self, tokens_BT: Tensor, positions_T: Tensor | None = None) -> Tensor:
        """Token plus position embedding, (B, T, D). Positions count from 0 unless given.

        Args:
            positions_T: (T,), or (B, T) if they differ between rows.
        """
        num_tokens = tokens_BT.shape[1]
        if positions_T is None:
            if num_tokens > self.config.context:
                raise ValueError(
                    f"GPT: sequences of {num_tokens} tokens, but its context is "
                    f"{self.config.context}"
                )
            positions_T = torch.arange(num_tokens, device=tokens_BT.device)
        return self.token_embedding(tokens_BT) + self.position_embedding(positions_T)

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Logits of the next token at every position, (B, T, V).

        Args:
            documents_BT: the document of each token, if rows hold several (`minidist.packing`):
                each gets the logits that it would get alone.
        """
        if documents_BT is None:
            x_BTD, mask = self.embed(tokens_BT), {}
        else:
            x_BTD = self.embed(tokens_BT, document_positions(documents_BT))
            mask = {"mask_B1TT": document_mask(documents_BT)}
        for block in self.blocks:
            x_BTD = block(x_BTD, **mask)
        return self.head(self.norm(x_BTD))


class Block(nn.Module):
    """Attention, then an MLP. Each works on normalised input and is added to it (pre-norm)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
        mask = {} if mask_B1TT is None else {"mask_B1TT": mask_B1TT}
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), **mask)
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Attention(nn.Module):
    """Causal self-attention. Each head reads K = D / H consecutive columns."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = nn.Linear(config.width, config.width, bias=config.bias)
        self.key = nn.Linear(config.width, config.width, bias=config.bias)
        self.value = nn.Linear(config.width, config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
        query_BHTK, key_BHTK, value_BHTK = (
            layer(x_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y_BHTK = F.scaled_dot_product_attention(
            query_BHTK, key_BHTK, value_BHTK, attn_mask=mask_B1TT, is_causal=mask_B1TT is None
        )
        return self.dropout(self.out(y_BHTK.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_ratio * config.width, bias=config.bias)
        self.down = nn.Linear(config.mlp_ratio * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x_BTD))))


def lm_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy per token, a scalar. Targets of -100 are left out."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class ResNet(nn.Module):
    """A ResNet of three stages. The second and third halve the image and double the channels.

    Args:
        width: channels of the first stage.
        blocks_per_stage: residual blocks in each stage.
    """

    def __init__(self, num_classes: int = 10, width: int = 16, blocks_per_stage: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        channels = (width, width, 2 * width, 4 * width)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    ResidualBlock(channels[i], channels[i + 1], stride=1 if i == 0 else 2),
                    *(
                        ResidualBlock(channels[i + 1], channels[i + 1])
                        for _ in range(blocks_per_stage - 1)
                    ),
                )
                for i in range(3)
            )
        )
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], num_classes)
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Logits, (B, classes)."""
        return self.head(self.stages(self.stem(x_BCHW)))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, added to their input (after a 1x1 convolution if the shape changes)."""

    def __init__(self, num_in: int, num_out: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        self.shortcut = (
            nn.Identity()
            if num_in == num_out and stride == 1
            else nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride=stride, bias=False), nn.BatchNorm2d(num_out)
            )
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.body(x_BCHW) + self.shortcut(x_BCHW))


def num_parameters(module: nn.Module, *, trainable_only: bool = False) -> int:
    """Number of parameters; a parameter that is used in two places counts once.

    >>> num_parameters(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable_only)
