"""Which backend and device a rank uses, and the names that changed between torch versions."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def choose_backend(local_world_size: int | None = None) -> str:
    """ "nccl" when every rank of this node has a GPU of its own, else "gloo".

    Args:
        local_world_size: ranks on this node; None means torchrun's LOCAL_WORLD_SIZE, else 1.
    """
    if local_world_size is None:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if has_nccl and torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size:
        return "nccl"
    return "gloo"


def choose_device(
    local_rank: int | None = None, local_world_size: int | None = None
) -> torch.device:
    """The device that goes with `choose_backend`: this rank's own GPU, or the CPU.

    Does not make it the current CUDA device; `torch.cuda.set_device` does.

    Args:
        local_rank: rank on this node; None means torchrun's LOCAL_RANK, else 0.
    """
    if choose_backend(local_world_size) == "gloo":
        return torch.device("cpu")
    if local_rank is None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank)


def all_gather_single(
    output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Gather equal tensors of all ranks into one; older torch: all_gather_into_tensor."""
    return _renamed("all_gather_single", "all_gather_into_tensor")(
        output, input, group=group, async_op=async_op
    )


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce one tensor and leave each rank its part; older torch: reduce_scatter_tensor."""
    return _renamed("reduce_scatter_single", "reduce_scatter_tensor")(
        output, input, op=op, group=group, async_op=async_op
    )


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat uint8 tensor, which every backend can move.

    A tensor of one entry may have any stride, for which `view(torch.uint8)` raises.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous tensor, got the strides {tensor.stride()}")
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _renamed(new: str, old: str) -> Any:
    """The function `new` of torch, or `old` in older torch: 2.13 warns about the old names."""
    return getattr(dist, new, None) or getattr(dist, old)


def ignore_renaming_warnings() -> None:
    """Keep torch 2.13 from warning about the names that torch 2.11 needs."""
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*_single.*")


def by_dtype_and_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Sort tensors into lists of one dtype and device each; order is kept inside a list.

    The tensors of one list may be joined into one message, or given to one of torch's `_foreach_`
    operators. These run a few kernels for all tensors, whereas a separate kernel for each tensor
    takes a GPU longer to start than to run.
    """
    lists: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(lists.values())


class NamedGroup(dist.ProcessGroup):
    """A process group in Python: its names, under both of torch's naming conventions.

    It does not own its connection, so `shutdown` and `abort` do nothing.
    """

    def __init__(self, rank: int, size: int, name: str, backend: str) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._backend, self._group_name, self._group_desc = backend, name, backend

    def getBackendName(self) -> str:
        return self._backend

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)  # pyright: ignore[reportIncompatibleMethodOverride]
    group_desc = property(getGroupDesc)  # pyright: ignore[reportIncompatibleMethodOverride]

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass
