"""Tensors to bytes and back, and the checks that a rank can make alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from minidist.device import as_bytes
from minidist.emulate import arrays
from minidist.processes.frames import view_of

Tensors = Sequence[torch.Tensor]
_OPS = (
    ("sum", dist.ReduceOp.SUM),
    ("avg", dist.ReduceOp.AVG),
    ("max", dist.ReduceOp.MAX),
    ("min", dist.ReduceOp.MIN),
    ("product", dist.ReduceOp.PRODUCT),
    ("band", dist.ReduceOp.BAND),
    ("bor", dist.ReduceOp.BOR),
    ("bxor", dist.ReduceOp.BXOR),
)


def as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def reduce_op(opts: Any) -> str:
    op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    for name, known in _OPS:
        if op == known:
            return name
    raise ValueError(f"the emulated cluster cannot reduce with {op}")


def describe(kind: str, tensor: torch.Tensor, op: str) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"{kind}: the emulated cluster carries dense CPU tensors, got "
            f"{tensor.device.type}, {tensor.layout}"
        )
    if dtype not in arrays.NUMPY_DTYPES:
        raise ValueError(f"{kind}: the emulated cluster does not carry {dtype}")
    if op and (reason := arrays.can_reduce(op, dtype)):
        raise ValueError(f"{kind}: {reason}")
    header: dict[str, Any] = {"kind": kind, "dtype": dtype, "shape": list(tensor.shape)}
    return header | ({"op": op} if op else {})


def to_bytes(tensors: Tensors, dtype: torch.dtype) -> memoryview | None:
    """The tensors' values one after the other; a single contiguous tensor is not copied."""
    flat = [t.detach().resolve_neg().resolve_conj().reshape(-1) for t in tensors if t.numel()]
    if not flat:
        return None
    if any(t.dtype != dtype for t in flat):
        raise ValueError(f"tensors of one collective must have one dtype, got {dtype} and others")
    joined = flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)
    return view_of(as_bytes(joined).numpy())


def write(output: torch.Tensor, raw: np.ndarray) -> None:
    if output.numel() == 0:
        return
    values = torch.from_numpy(raw).view(output.dtype)
    # .data: the version counter does not change, as in a collective of any other backend.
    output.data.copy_(values.view(output.shape))


def write_parts(outputs: Tensors, raw: np.ndarray) -> None:
    start = 0
    for output in outputs:
        end = start + output.numel() * output.element_size()
        # A copy, because a part need not start at a multiple of the element's size.
        write(output, raw[start:end].copy())
        start = end


def check_numel(kind: str, tensor: torch.Tensor, expected: int) -> None:
    if tensor.numel() != expected:
        raise ValueError(f"{kind}: expected a tensor of {expected} elements, got {tensor.numel()}")


def check_parts(kind: str, parts: Tensors, count: int, like: torch.Tensor) -> None:
    if len(parts) != count:
        raise ValueError(f"{kind}: expected a list of {count} tensors, got {len(parts)}")
    for index, part in enumerate(parts):
        if part.numel() != like.numel() or part.dtype != like.dtype:
            raise ValueError(
                f"{kind}: tensor {index} of the list is {part.dtype}{list(part.shape)}, "
                f"the other side is {like.dtype}{list(like.shape)}"
            )


def split_sizes(what: str, tensor: torch.Tensor, splits: Any, count: int) -> list[int]:
    """Number of elements for each rank; `splits` counts rows, and no splits mean equal parts."""
    rows = tensor.shape[0] if tensor.dim() else 0
    per_row = math.prod(tensor.shape[1:])
    if not splits:
        if rows % count:
            raise ValueError(
                f"all_to_all_single: {rows} rows of the {what} do not divide by {count}"
            )
        splits = [rows // count] * count
    if len(splits) != count or sum(splits) != rows:
        raise ValueError(
            f"all_to_all_single: {what} splits {list(splits)} must be {count} numbers "
            f"that add up to {rows} rows"
        )
    return [size * per_row for size in splits]
