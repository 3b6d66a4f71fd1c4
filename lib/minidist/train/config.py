"""All settings of a run in one frozen object; the command-line parser is made from this object.

>>> config = parse_args(["--tp", "2", "--steps", "10", "--precision", "bf16"])
>>> config.tp, config.steps, config.precision, config.global_batch
(2, 10, 'bf16', 16)
>>> print(config.layout(world_size=4))
dp 2 x pp 1 x cp 1 x tp 2
>>> config.layout(world_size=5)
Traceback (most recent call last):
    ...
ValueError: pp 1 x cp 1 x tp 2 = 2 ranks hold the model once; 5 ranks = 2 x 2 + 1: 1 is left over

Each field of `TrainConfig` is one command-line option and defines its default, type and help text.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import torch

from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.transformer import Transformer
from minidist.model import GPTConfig
from minidist.parallel.expert import MoEConfig
from minidist.parallel.hybrid.experts import refuse, sizes_with_experts

# dtype of parameters, dtype of matrix products (None: the same), and whether the loss is scaled.
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None, bool]] = {
    "fp64": (torch.float64, None, False),
    "fp32": (torch.float32, None, False),
    "bf16": (torch.float32, torch.bfloat16, False),
    "fp16": (torch.float32, torch.float16, True),
}
_ZERO = "1 optimiser states, 2 and gradients, 3 and parameters"
_OF_EXPERTS = (
    *("top_k", "expert_width", "shared_experts", "capacity_factor"),
    *("balance_loss", "bias_speed"),
)


def _option(default: Any, section: str, help: str, choices: Sequence[Any] | None = None) -> Any:
    return dataclasses.field(
        default=default, metadata={"section": section, "help": help, "choices": choices}
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a run of `minidist.train`. `check` raises if they do not fit together."""

    dp: int | None = _option(None, "ranks", "data parallel; by default all ranks that are left")
    pp: int = _option(1, "ranks", "pipeline stages")
    cp: int = _option(1, "ranks", "context parallel: ranks per sequence")
    tp: int = _option(1, "ranks", "tensor parallel: ranks per layer")
    ep: int = _option(1, "ranks", "expert parallel: of the dp ranks, so many share the experts")
    zero: int = _option(0, "ranks", f"sharded over dp and cp: {_ZERO}", (0, 1, 2, 3))
    virtual_stages: int = _option(1, "ranks", "chunks per pipeline rank (interleaved schedule)")
    sequence_parallel: bool = _option(False, "ranks", "tp splits the rest by tokens")

    vocab_size: int = _option(64, "model", "tokens in the vocabulary")
    context: int = _option(32, "model", "tokens of a sequence")
    width: int = _option(64, "model", "features of the residual stream")
    num_layers: int = _option(4, "model", "blocks")
    num_heads: int = _option(4, "model", "attention heads")
    dropout: float = _option(0.0, "model", "share of activations that are dropped")
    tied: bool = _option(False, "model", "the output layer uses the embedding's weight")

    num_experts: int = _option(0, "experts", "experts of a block, in place of its MLP; 0: the MLP")
    top_k: int = _option(2, "experts", "experts that a token visits")
    expert_width: int | None = _option(None, "experts", "by default a token costs as with the MLP")
    shared_experts: int = _option(0, "experts", "more experts, which every token visits")
    capacity_factor: float | None = _option(None, "experts", "room / even share; default: for all")
    balance_loss: float = _option(0.0, "experts", "factor of the auxiliary loss")
    bias_speed: float = _option(1e-3, "experts", "step of the bias that balances; 0: no bias")

    steps: int = _option(100, "training", "optimiser steps in all, earlier runs included")
    global_batch: int = _option(16, "training", "sequences per step, of all ranks together")
    micro_batch: int = _option(2, "training", "sequences that pass through the model at once")
    lr: float = _option(3e-3, "training", "highest learning rate")
    final_lr: float = _option(0.0, "training", "learning rate at the end of the cosine")
    warmup: int | None = _option(None, "training", "steps until lr is reached; by default a tenth")
    weight_decay: float = _option(0.1, "training", "of AdamW")
    max_norm: float = _option(1.0, "training", "clip gradients to this norm")
    recompute: bool = _option(False, "training", "compute blocks again in backward: less memory")
    precision: str = _option("fp32", "training", "of matrix products", tuple(PRECISIONS))
    seed: int = _option(0, "training", "of weights, order of samples, dropout")

    num_sequences: int = _option(2048, "data", "synthetic sequences to train on")
    num_eval_sequences: int = _option(250, "data", "sequences to evaluate on; any number")
    eval_every: int = _option(50, "data", "steps between evaluations; 0: never")

    out: str | None = _option(None, "output", "folder of metrics and checkpoints (default: none)")
    save_every: int = _option(50, "output", "steps between checkpoints")
    keep: int = _option(2, "output", "checkpoints to keep")
    resume: bool = _option(True, "output", "go on from the newest whole checkpoint in the folder")
    log_every: int = _option(10, "output", "steps between lines where stdout is no terminal")
    quiet: bool = _option(False, "output", "print nothing")

    @property
    def model(self) -> GPTConfig:
        names = ("vocab_size", "context", "width", "num_layers", "num_heads", "dropout", "tied")
        return GPTConfig(**{name: getattr(self, name) for name in names})

    @property
    def experts(self) -> MoEConfig | None:
        """Sizes of the experts of a block; None for a dense model.

        A token visits top_k + shared_experts of them. By default they are so narrow that a token
        costs as much as in the dense model's MLP. They have no dropout.
        """
        if not self.num_experts:
            return None
        width = self.expert_width
        if width is None:
            visited = max(1, self.top_k + self.shared_experts)
            width = math.ceil(self.model.mlp_ratio * self.width / visited)
        return MoEConfig(
            width=self.width,
            expert_width=width,
            num_experts=self.num_experts,
            top_k=self.top_k,
            shared_experts=self.shared_experts,
            capacity_factor=self.capacity_factor,
        )

    @property
    def sizes(self) -> Transformer:
        """The model's sizes, for `minidist.cost`."""
        if self.experts is None:
            return Transformer.from_config(self.model)
        return sizes_with_experts(self.model, self.experts)

    @property
    def warmup_steps(self) -> int:
        return self.steps // 10 if self.warmup is None else self.warmup

    def layout(self, world_size: int) -> ParallelismConfig:
        """The degrees of parallelism; if dp is None, it is computed from the number of ranks.

        Raises:
            ValueError: the product of the degrees is not the number of ranks.
        """
        model_ranks = self.pp * self.cp * self.tp
        dp, left = divmod(world_size, model_ranks) if model_ranks > 0 else (1, 0)
        if self.dp is None and (left or not dp):
            raise ValueError(
                f"pp {self.pp} x cp {self.cp} x tp {self.tp} = {model_ranks} ranks hold the model "
                f"once; {world_size} ranks = {dp} x {model_ranks} + {left}: "
                f"{left} {'is' if left == 1 else 'are'} left over"
            )
        layout = ParallelismConfig(
            dp=dp if self.dp is None else self.dp,
            pp=self.pp,
            cp=self.cp,
            tp=self.tp,
            zero_stage=self.zero,
            sequence_parallel=self.sequence_parallel,
            virtual_stages=self.virtual_stages,
            ep=self.ep,
        )
        layout.check_world_size(world_size)
        return layout

    def check(self, world_size: int) -> ParallelismConfig:
        """The layout of the ranks. No communication: every rank gets the same result or error.

        Raises:
            ValueError: the settings do not fit together; the message shows the arithmetic.
        """
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is one of {list(PRECISIONS)}, got {self.precision!r}")
        for name in ("steps", "log_every", "save_every", "keep", "lr", "max_norm", "num_sequences"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        not_negative = ("final_lr", "weight_decay", "num_eval_sequences", "eval_every")
        for name in (*not_negative, "num_experts", "balance_loss", "bias_speed"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in 0 ... 1, got {self.dropout}")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(
                f"warmup must be at least 0 and below the {self.steps} steps, got {self.warmup}"
            )
        if self.global_batch > self.num_sequences:
            raise ValueError(
                f"a global batch of {self.global_batch} needs as many sequences, but there are "
                f"{self.num_sequences}"
            )
        layout = self.layout(world_size)
        if self.num_experts:
            refuse(layout)
        else:
            self._check_dense()
        return layout.validate(
            world_size=world_size,
            model=self.sizes,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
        )

    def _check_dense(self) -> None:
        """Raise ValueError if a model without experts has settings of experts."""
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        for name in _OF_EXPERTS:
            if getattr(self, name) != fields[name]:
                raise ValueError(
                    f"{name} {getattr(self, name)} needs experts: set num_experts, got 0"
                )


def parse_args(arguments: Sequence[str] | None = None) -> TrainConfig:
    """A configuration from the command line; None means sys.argv."""
    parser = argparse.ArgumentParser(
        prog="python -m minidist.train",
        usage="%(prog)s [options]",
        description="A small GPT with data, pipeline, context, tensor and expert parallelism.",
        epilog="Four ranks: torchrun --nproc-per-node 4 -m minidist.train --dp 2 --tp 2 --zero 1",
    )
    sections: dict[str, Any] = {}
    hints = get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        section = field.metadata["section"]
        if section not in sections:
            sections[section] = parser.add_argument_group(section)
        help = field.metadata["help"]
        if field.default is not None:
            help += f" (default: {field.default})" if hints[field.name] is not bool else ""
        options: dict[str, Any] = {"default": field.default, "help": help}
        if hints[field.name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            kinds = [kind for kind in get_args(hints[field.name]) if kind is not type(None)]
            options["type"] = kinds[0] if kinds else hints[field.name]
            options["choices"] = field.metadata["choices"]
            options["metavar"] = None if options["choices"] else options["type"].__name__.upper()
        sections[section].add_argument("--" + field.name.replace("_", "-"), **options)
    return TrainConfig(**vars(parser.parse_args(arguments)))
