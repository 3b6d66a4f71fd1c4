"""What a user names: a model, a cluster, amounts such as 4M or 15T, constraints, layouts.

>>> amount("4M", "--batch-tokens"), amount("15T", "--tokens")
(4000000.0, 15000000000000.0)
>>> layout_of("dp=8 tp=4 zero=1 micro=2").parallelism.world_size
32
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist import cost
from minidist.cost.hardware import GB, Link, Node, network
from minidist.cost.memory import RECOMPUTE
from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.step import STEP_SCHEDULES
from minidist.cost.transformer import Transformer
from minidist.plan.models import MODELS

CLUSTERS = {
    "a100": cost.DGX_A100,
    "a100-40gb": dataclasses.replace(cost.DGX_A100, name="DGX A100 40 GB", gpu=cost.A100_40GB),
    "h100": cost.DGX_H100,
    "h200": cost.DGX_H200,
    "b200": cost.DGX_B200,
    "mi300x": cost.MI300X_NODE,
}


class InputError(ValueError):
    """Something that the user named is wrong; the message says what, where and what is right."""


def amount(text: str, what: str) -> float:
    """A number with k, M, B (or G), T behind it.

    Raises:
        InputError: it is not such a number, or not above 0.
    """
    match = re.fullmatch(r"([0-9][0-9_]*\.?[0-9]*(?:e[0-9]+)?)([kKMBGT]?)", text.strip())
    factor = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
    value = float(match[1].replace("_", "")) * factor[match[2]] if match else 0.0
    if not 0 < value < math.inf:
        raise InputError(
            f"{what}: expected a number above 0 such as 4194304, 4M or 15T, got {text!r}"
        )
    return value


# ------------------------------------------------------------------------------------------ models


def model_of(name: str) -> Transformer:
    """A model by its name, or from a Hugging Face config.json.

    Raises:
        InputError: an unknown name, a file that cannot be read, or one that lacks a size.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json" and not path.is_file():
        raise InputError(f"--model: {name!r} is neither a file nor one of {', '.join(MODELS)}")
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"--model: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"--model: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"--model: {path} holds no object with sizes: {type(config).__name__}")
    return from_hugging_face(config.get("text_config", config), where=str(path))


def from_hugging_face(config: dict[str, Any], *, where: str = "config.json") -> Transformer:
    """A decoder-only transformer from the sizes of a Hugging Face configuration.

    Raises:
        InputError: a size is missing or wrong.
    """
    get = _Reader(config, where)
    width, heads = get.size("hidden_size", "n_embd"), get.size("num_attention_heads", "n_head")
    gpt2 = "n_embd" in config
    inner = get.size("intermediate_size", "n_inner", default=4 * width)
    experts = get.size("num_local_experts", "n_routed_experts", "num_experts", default=0)
    shape: dict[str, Any] = {
        "vocab_size": get.size("vocab_size"),
        "context": get.size("max_position_embeddings", "n_positions"),
        "width": width,
        "num_layers": get.size("num_hidden_layers", "n_layer"),
        "num_heads": heads,
        "mlp_ratio": inner / width,
        "gated_mlp": not gpt2,
        "num_kv_heads": get.size("num_key_value_heads", default=heads),
        "tied": bool(config.get("tie_word_embeddings", gpt2)),
        "bias": gpt2,
        "norm_bias": gpt2,
        "learned_positions": gpt2,
    }
    if experts:
        expert_width = get.size("moe_intermediate_size", default=inner)
        shape |= {
            "num_experts": experts,
            "experts_per_token": get.size("num_experts_per_tok"),
            "expert_width": expert_width,
            "shared_experts": _shared(get, config, expert_width),
            "dense_layers": get.size("first_k_dense_replace", default=0),
        }
    if "kv_lora_rank" in config:
        shape |= _latent_attention(get, width, heads)
    elif config.get("head_dim") and config["head_dim"] * heads != width:
        shape["attention_width"] = config["head_dim"] * heads
    try:
        return Transformer(**shape)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def _shared(get: _Reader, config: dict[str, Any], expert_width: int) -> int:
    if config.get("shared_expert_intermediate_size"):  # Qwen names the width of one
        return max(1, config["shared_expert_intermediate_size"] // expert_width)
    return get.size("n_shared_experts", default=0)


def _latent_attention(get: _Reader, width: int, heads: int) -> dict[str, int]:
    """Multi-head latent attention: queries, keys and values through narrow matrices."""
    latent, rotary = get.size("kv_lora_rank"), get.size("qk_rope_head_dim")
    plain, value = get.size("qk_nope_head_dim"), get.size("v_head_dim")
    narrow = get.size("q_lora_rank", default=0)
    query = heads * (plain + rotary)
    entries = width * narrow + narrow * query if narrow else width * query
    entries += width * (latent + rotary) + latent * heads * (plain + value) + heads * value * width
    return {
        "attention_width": heads * (plain + rotary + value) // 2,
        "attention_entries": entries,
    }


@dataclass(frozen=True)
class _Reader:
    config: dict[str, Any]
    where: str

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of some names that the configuration has."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"{self.where}: {name} must be a whole number, got {value!r}")
            return value
        if default is None:
            raise InputError(f"{self.where}: no {' or '.join(names)}, which the plan needs")
        return default


def batch_of(text: str, context: int) -> int:
    """Sequences per step from tokens per step. 4M is 4 x 2^20 where that, and not 4,000,000, is a
    whole number of sequences.

    >>> batch_of("4M", 8192), batch_of("1000000", 1000)
    (512, 1000)
    """
    tokens = amount(text, "--batch-tokens")
    suffix = text.strip()[-1]
    binary = tokens / 1000**2 * 1024**2 if suffix == "M" else tokens / 1000 * 1024
    if tokens % context and suffix in "Mk" and binary % context == 0:
        tokens = binary
    if tokens < context:
        raise InputError(
            f"--batch-tokens: {tokens:,.0f} tokens are less than one sequence of {context:,}"
        )
    return round(tokens / context)


# ---------------------------------------------------------------------------------------- clusters


def cluster_of(gpu: str | None, file: str | None) -> tuple[Node, float | None]:
    """A node by the name of its GPU, or from a cluster.toml, and the price per GPU hour if it is
    there. See `minidist plan --help` for the file.

    Raises:
        InputError: an unknown name, a file that cannot be read, an unknown or a wrong entry.
    """
    if file is None:
        return _known(gpu or "h100", "--gpu"), None
    try:
        table = tomllib.loads(Path(file).read_text("utf-8"))
    except OSError as error:
        raise InputError(f"--cluster: {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"--cluster: {file} is not TOML: {error}") from None
    table = table.get("cluster", table)
    numbers = ("gpus_per_node", "memory_gb", "power_w", "intra_node_gb_per_s")
    numbers += ("network_gbit_per_s", "price")
    for key, value in table.items():
        if key in ("gpu", "name"):
            continue
        if key not in numbers:
            raise InputError(
                f"{file}: unknown entry {key}; known are gpu, name, {', '.join(numbers)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"{file}: {key} must be a number above 0, got {value!r}")
    node = _known(str(table.get("gpu", gpu or "h100")), f"{file}, gpu")
    changes: dict[str, Any] = {"name": str(table.get("name", Path(file).stem))}
    if "gpus_per_node" in table:
        changes["num_gpus"] = int(table["gpus_per_node"])
    try:
        changes["gpu"] = node.gpu.at_power(table.get("power_w", node.gpu.power_w))
    except ValueError as error:
        raise InputError(f"{file}, power_w: {error}") from None
    if "memory_gb" in table:
        memory_bytes = table["memory_gb"] * GB
        changes["gpu"] = dataclasses.replace(changes["gpu"], memory_bytes=memory_bytes)
    if "intra_node_gb_per_s" in table:
        changes["intra_node"] = _link(node.intra_node, table["intra_node_gb_per_s"] * GB)
    if "network_gbit_per_s" in table:
        changes["network"] = network(gigabits_per_s=table["network_gbit_per_s"], name="network")
    price = table.get("price")
    return dataclasses.replace(node, **changes), None if price is None else float(price)


def _known(name: str, where: str) -> Node:
    if name.lower() not in CLUSTERS:
        raise InputError(f"{where}: {name!r} is not one of {', '.join(CLUSTERS)}")
    return CLUSTERS[name.lower()]


def _link(link: Link, bytes_per_s: float) -> Link:
    return dataclasses.replace(link, bandwidth_bytes_per_s=bytes_per_s)


# ------------------------------------------------------------------------ constraints and layouts

_AXES = {
    "dp": "dp",
    "pp": "pp",
    "cp": "cp",
    "tp": "tp",
    "ep": "ep",
    "zero": "zero_stage",
    "replicas": "replicas",
    "chunks": "virtual_stages",
}


def constraint_of(text: str) -> Callable[[ParallelismConfig], bool]:
    """A condition on a layout: tp<=8, pp=4, zero>=1; several are joined by commas.

    Raises:
        InputError: it is not such a condition.
    """
    tests = []
    compare: dict[str, Callable[[int, int], bool]] = {
        "<=": lambda a, b: a <= b,
        ">=": lambda a, b: a >= b,
        "=": lambda a, b: a == b,
        "==": lambda a, b: a == b,
        "<": lambda a, b: a < b,
        ">": lambda a, b: a > b,
    }
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z]+)\s*(<=|>=|==|=|<|>)\s*(\d+)\s*", part)
        if not match or match[1] not in _AXES:
            raise InputError(
                f"--constraint: expected such as tp<=8 with one of {', '.join(_AXES)}, got {part!r}"
            )
        tests.append((_AXES[match[1]], compare[match[2]], int(match[3])))
    return lambda p: all(test(getattr(p, name), value) for name, test, value in tests)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layout that a user named."""

    parallelism: ParallelismConfig
    micro_batch: int
    recompute: str
    text: str
    schedule: str | None = None


def layout_of(text: str) -> Layout:
    """A layout from "dp=32 pp=8 tp=4 zero=1 chunks=4 micro=1 recompute=full".

    Raises:
        InputError: an unknown word, or degrees that make no layout.
    """
    degrees: dict[str, int] = {}
    micro_batch, recompute, schedule = 1, "none", None
    for word in text.replace(",", " ").split():
        name, found, value = word.partition("=")
        if found and name == "recompute" and value in RECOMPUTE:
            recompute = value
        elif found and name == "schedule" and value in STEP_SCHEDULES:
            schedule = value
        elif found and value.isdecimal() and (name in _AXES or name == "micro"):
            if name == "micro":
                micro_batch = max(1, int(value))
            else:
                degrees[_AXES[name]] = int(value)
        else:
            raise InputError(
                f"--layout: expected words such as dp=8, with {', '.join(_AXES)}, micro, "
                f"recompute=none|selective|full, schedule={'|'.join(STEP_SCHEDULES)}, got {word!r}"
            )
    try:
        p = ParallelismConfig(**degrees, sequence_parallel=degrees.get("tp", 1) > 1)
    except ValueError as error:
        raise InputError(f"--layout {text!r}: {error}") from None
    if schedule not in (None, "1f1b") and p.virtual_stages > 1:
        raise InputError(f"--layout {text!r}: {schedule} has one chunk per stage")
    return Layout(
        parallelism=p, micro_batch=micro_batch, recompute=recompute, text=text, schedule=schedule
    )
