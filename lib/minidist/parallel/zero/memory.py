"""The bytes that a rank holds, the bytes that it should hold, and an enforced memory limit.

>>> formula_bytes(7.5e9, world_size=64, stage=3).total / 1e9  # the paper's Table 1, in GB
1.875
>>> formula_bytes(7.5e9, world_size=64, stage=0).total / 1e9
120.0
>>> layer = torch.nn.Linear(10, 10, bias=False)
>>> count_bytes(layer).parameters
400

ZeRO: arXiv 1910.02054, Table 1 (GB are 1e9 bytes).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from minidist.cost.memory import StateBytes


@dataclass(frozen=True)
class Bytes:
    """Bytes of a rank's model states, without activations and buffers of collectives."""

    parameters: float
    gradients: float
    optimizer: float  # state such as momenta, and master copies

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def formula_bytes(
    num_params: float,
    world_size: int,
    stage: int,
    *,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    state_bytes: float = 12,
) -> Bytes:
    """Bytes per rank of ZeRO's Table 1.

    Args:
        stage: 0 (data parallel), 1, 2 or 3.
        param_bytes, grad_bytes, state_bytes: bytes per parameter. The defaults are those of
            mixed-precision Adam: bf16 parameters and gradients; an fp32 master copy and two fp32
            momenta. With everything in fp32 they are 4, 4, 8.
    """
    whole = StateBytes(
        parameter=num_params * param_bytes,
        gradient=num_params * grad_bytes,
        optimizer=num_params * state_bytes,
    )
    own = whole.per_rank(zero_stage=stage, num_ranks=world_size)
    return Bytes(own.parameter, own.gradient, own.optimizer)


def count_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Bytes:
    """Bytes of the memory that parameters, gradients and optimiser state take on this rank.

    Each storage counts once: views and tied parameters add nothing, padding counts, and a freed
    storage does not count.

    Args:
        optimizer: any torch optimiser, or one of this package; for the latter, master copies and
            sharded gradients count too.
    """
    seen: set[int] = set()
    params = list(model.parameters())
    inner = getattr(optimizer, "inner", optimizer)
    updated = [] if inner is None else [p for g in inner.param_groups for p in g["params"]]
    pieces = [p for bucket in getattr(optimizer, "buckets", []) for p in bucket.pieces]
    parameters = _storage_bytes(params, seen)
    gradients = _storage_bytes(
        (p.grad for p in (*params, *pieces, *updated) if p.grad is not None), seen
    )
    states = [] if inner is None else [v for s in inner.state.values() for v in s.values()]
    state = _storage_bytes((*updated, *(v for v in states if isinstance(v, Tensor))), seen)
    return Bytes(parameters, gradients, state)


def _storage_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        # A DTensor's memory is that of its local shard.
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]
        storage = local.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


@contextlib.contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Let this process allocate at most `num_bytes` more than now; beyond that, torch raises.

    For CPU tensors, on Linux: it limits the process's private writable memory (RLIMIT_DATA). This
    counts allocated memory, even if it is not used yet. Each thread that starts inside the block
    costs one stack (usually 8 MiB), so start process groups and run a first backward before. On a
    GPU use `torch.cuda.set_per_process_memory_fraction`.

    Raises:
        OSError: the system is not Linux.
    """
    import resource  # not on every system

    try:
        text = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        raise OSError("memory_limit works on Linux only: it reads /proc/self/status") from None
    fields = dict(line.split(":", 1) for line in text.splitlines() if line)
    now = int(fields["VmData"].split()[0]) * 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
