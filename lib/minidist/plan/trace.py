"""One real step of rank 0 of a large job, on this machine: `minidist trace`.

torch's fake process group has any size, and its collectives return at once; fake tensors have shape
and dtype and no memory. Together they run the real program of one rank, minidist's GPT with tensor
parallelism and FSDP2, without computing anything. What comes out is what the program did: every
collective with its bytes, and the most bytes that were alive at once. No times, no values.

`expected` has the same counts and bytes from the sizes alone; the two agree exactly.

    dp all-gathers       2 L + 1: every block before forward and before backward, the rest once
    dp reduce-scatters   L + 1
    tp all-reduces       4 L + 5: two per block and direction; embedding, head and loss
"""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minidist.cost.transformer import Transformer
from minidist.model import GPT, GPTConfig, lm_loss
from minidist.parallel.tensor.native import loss_parallel, parallelize_gpt_native

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_BYTES = 4  # the model is traced in fp32


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What rank 0 did in one forward and backward pass.

    Attributes:
        parameters, here: of the model, and of its part on this rank.
        calls, num_bytes: of each kind of collective; the bytes of its whole buffer (what an
            all-gather writes, what a reduce-scatter reads).
        peak_bytes: most bytes of tensors that were alive at once.
        seconds: what the trace itself took.
    """

    parameters: int
    here: int
    calls: dict[str, int]
    num_bytes: dict[str, int]
    peak_bytes: int
    seconds: float


class _Log(TorchDispatchMode):
    """Counts collectives, and the bytes of storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.peak = self._alive = 0
        self._sizes: dict[int, int] = {}  # of every storage that is alive
        self._storages: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def keep(self, tensor: torch.Tensor) -> None:
        """Follow the storage of a tensor until it dies."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._storages[key] = storage
            weakref.finalize(storage, self._forget, key)
        self._alive += storage.nbytes() - self._sizes[key]
        self._sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self._alive)

    def _forget(self, key: int) -> None:
        self._alive -= self._sizes.pop(key, 0)

    def refresh(self) -> None:
        """Read all sizes again, because FSDP empties storages without an operation."""
        for key, storage in list(self._storages.items()):
            self._alive += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # then the operations inside DTensor come here
        result = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1].replace("allgather", "all_gather").strip("_")
        name = name.replace("allreduce", "all_reduce")
        kind = next((kind for kind in _KINDS if name.startswith(kind)), None)
        if kind and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            tensors += [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            self.refresh()
            self.calls[kind] += 1
            self.num_bytes[kind] += max(t.numel() * t.element_size() for t in tensors)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.keep(tensor)
        return result


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Counts and bytes of `Trace`, from the sizes alone."""

    calls: dict[str, int]
    num_bytes: dict[str, int]


def expected(model: Transformer, *, dp: int, tp: int, micro_batch: int = 1) -> Expected:
    """What one step must send, by arithmetic.

    FSDP cuts the first dimension of every parameter into dp parts of equal size, so the last part
    is padded. Tensor parallelism sums whole activations, and per token three numbers of the loss:
    the largest logit, the sum of exponentials, the logit of the target.
    """
    h, inner, layers = model.width, model.mlp_width, model.num_layers
    bias = model.bias

    def padded(rows: int, rest: int = 1) -> int:
        return math.ceil(rows / dp) * dp * rest

    columns = [(h // tp, h)] * 3 + [(inner // tp, h)]  # queries, keys, values, first of the MLP
    split_rows = [(h, h // tp), (h, inner // tp)]  # output, second of the MLP
    block = sum(padded(*shape) for shape in columns + split_rows)
    block += 2 * padded(h) * (2 if bias else 1)  # norms
    if bias:
        block += sum(padded(rows) for rows, _ in columns + split_rows)
    tables = 1 if model.tied else 2
    root = tables * padded(model.vocab_size // tp, h) + padded(model.context, h)
    root += padded(h) * (2 if bias else 1)
    tokens = micro_batch * model.context
    reduces = {
        "all_reduce": (4 * layers + 5, (4 * layers + 2) * tokens * h + 3 * tokens),
    }
    shards = {
        "all_gather": (2 * layers + 1, 2 * layers * block + root),
        "reduce_scatter": (layers + 1, layers * block + root),
    }
    both = (shards if dp > 1 else {}) | (reduces if tp > 1 else {})
    return Expected(
        calls={kind: both.get(kind, (0, 0))[0] for kind in _KINDS},
        num_bytes={kind: both.get(kind, (0, 0))[1] * _BYTES for kind in _KINDS},
    )


def _config(model: Transformer) -> GPTConfig:
    if model.gated_mlp or model.num_experts or not model.learned_positions:
        raise ValueError(
            "minidist trace runs minidist's GPT: learned positions, a plain MLP, no experts"
        )
    return GPTConfig(
        vocab_size=model.vocab_size,
        context=model.context,
        width=model.width,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        mlp_ratio=round(model.mlp_ratio),
        tied=model.tied,
        bias=model.bias,
    )


def trace(model: Transformer, *, dp: int, tp: int, micro_batch: int = 1) -> Trace:
    """Rank 0 of dp x tp ranks through one forward and backward pass.

    Raises:
        ValueError: sizes that do not divide, or a model that is not a GPT.
        RuntimeError: this process already has a process group.
    """
    if model.num_heads % tp or model.vocab_size % tp:
        raise ValueError(
            f"heads {model.num_heads} and vocabulary {model.vocab_size} must divide by tp {tp}"
        )
    if dist.is_initialized():
        raise RuntimeError("minidist trace needs a process without a process group")
    config, start = _config(model), time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dp * tp)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _step(config, dp, tp, micro_batch, start)
    finally:
        dist.destroy_process_group()


def _step(config: GPTConfig, dp: int, tp: int, micro_batch: int, start: float) -> Trace:
    mesh = dist.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    fake, log = FakeTensorMode(allow_non_fake_inputs=True), _Log()
    # On the meta device cutting a parameter into dp parts is cheap; fake tensors come after it.
    with torch.device("meta"):
        model = GPT(config)
    total = sum(p.numel() for p in model.parameters())
    parallelize_gpt_native(model, mesh["tp"])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    with fake:
        model.to_empty(device="cpu")
    parameters: list[Any] = list(model.parameters())  # DTensors by now
    held = [p.to_local() for p in parameters]
    with fake, log, loss_parallel():
        for tensor in held:
            log.keep(tensor)
        tokens = torch.zeros(micro_batch, config.context, dtype=torch.long)
        lm_loss(model(tokens), tokens).backward()
    return Trace(
        parameters=total,
        here=sum(tensor.numel() for tensor in held),
        calls={kind: log.calls[kind] for kind in _KINDS},
        num_bytes={kind: log.num_bytes[kind] for kind in _KINDS},
        peak_bytes=log.peak,
        seconds=time.perf_counter() - start,
    )
