"""Which ranks take part in tensor parallelism, and how: the options that every layer gets.

>>> split_evenly("ParallelAttention: heads", 6, 3)
2
>>> split_evenly("ParallelAttention: heads", 6, 4)
Traceback (most recent call last):
    ...
ValueError: ParallelAttention: heads: 6 cannot be split over 4 ranks (6 = 4 x 1 + 2): use 1, 2...
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.mesh import Mesh
from minidist.seeding import derive_seed


def split_evenly(what: str, total: int, parts: int, rank: int | None = None) -> int:
    """`total / parts`, or a ValueError that shows the arithmetic.

    Args:
        what: opens the message, e.g. "ParallelAttention: heads".
        rank: the rank to name in the message, if given.
    """
    if total % parts == 0:
        return total // parts
    fits = [str(n) for n in range(1, total + 1) if total % n == 0]
    choice = " or ".join([", ".join(fits[:-1]), fits[-1]]) if len(fits) > 1 else "1"
    where = "" if rank is None else f"[rank {rank}] "
    raise ValueError(
        f"{where}{what}: {total} cannot be split over {parts} ranks "
        f"({total} = {parts} x {total // parts} + {total % parts}): use {choice} ranks"
    )


class RngTracker:
    """A second random stream that differs between the ranks of a group.

    Ranks that hold the same activations must draw the same dropout mask, so they use the default
    stream with the same seed. Ranks that hold different parts must draw different masks: inside
    `fork`, a stream of the rank's own replaces the default stream. The default stream moves on by
    one number per `fork`, on all ranks alike.

    The own stream begins anew in every `fork`, at a seed that depends on the state of the default
    stream. So activation checkpointing, which restores the default stream before it computes a
    layer again, gets the same masks again; and a checkpoint needs the default stream only.

    Example::

        torch.manual_seed(0)                       # the same on all ranks
        rng = RngTracker(seed=0, group=mesh.group("tp"))
        x = F.dropout(x, 0.1)                      # same mask everywhere
        with rng.fork():
            x_part = F.dropout(x_part, 0.1)        # a mask of this rank's own

    The two streams are those of appendix B.2 of Megatron-LM (arXiv 1909.08053).
    """

    def __init__(
        self,
        seed: int,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self._seed, self._rank = seed, _group_rank(group)
        on_cpu = self._device.type == "cpu"
        self._random: Any = torch if on_cpu else torch.get_device_module(self._device)

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """Draw from this rank's own stream inside the block."""
        common = self._random.get_rng_state()
        at = hashlib.sha256(common.numpy().tobytes()).hexdigest()
        own = torch.Generator(self._device).manual_seed(derive_seed(self._seed, self._rank, at))
        self._random.set_rng_state(own.get_state())
        try:
            yield
        finally:
            self._random.set_rng_state(common)
            torch.rand((), device=self._device)  # the next fork begins elsewhere


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """How layers are split.

    Args:
        group: the ranks that share every layer; None is the default group.
        sequence_parallel: between the split layers, keep activations split along the sequence
            (arXiv 2205.05198).
        overlap: in the backward pass of a column-parallel layer, compute the gradient of the
            weight while the gradient of the input is being reduced.
        rng: the random stream for dropout on split activations; needed for sequence_parallel with
            dropout.

    Raises:
        ValueError: there is no process group yet, or this rank is not a member of `group`.
    """

    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    overlap: bool = False
    rng: RngTracker | None = None

    def __post_init__(self) -> None:
        _group_rank(self.group)

    @staticmethod
    def of(mesh_or_group: Mesh | dist.ProcessGroup | None, **options: Any) -> TensorParallel:
        """From a mesh (its axis "tp") or a group."""
        group = mesh_or_group.group("tp") if isinstance(mesh_or_group, Mesh) else mesh_or_group
        return TensorParallel(group=group, **options)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank's rank in the group."""
        return dist.get_rank(self.group)

    def split(self, what: str, total: int) -> int:
        """`total` per rank; see `split_evenly`."""
        return split_evenly(what, total, self.size, dist.get_rank())

    def part(self, full: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor whose dimension `dim` divides evenly, as a copy."""
        return full.detach().chunk(self.size, dim)[self.rank].clone()

    def __deepcopy__(self, memo: Any) -> TensorParallel:
        return self  # a copied model uses the same ranks, and process groups cannot be copied


def _group_rank(group: dist.ProcessGroup | None) -> int:
    if not dist.is_initialized():
        raise ValueError("TensorParallel: call torch.distributed.init_process_group first")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"[rank {dist.get_rank()}] TensorParallel: not a member of the group")
    return rank
