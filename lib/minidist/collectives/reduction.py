"""The operations of a reduction: sum, avg, max, min, prod, and the bitwise ones for integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

# Each function works in place: the first tensor becomes the reduction of both.
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": lambda own, other: own.add_(other),
    "avg": lambda own, other: own.add_(other),
    "prod": lambda own, other: own.mul_(other),
    "max": lambda own, other: torch.maximum(own, other, out=own),
    "min": lambda own, other: torch.minimum(own, other, out=own),
    "band": lambda own, other: own.bitwise_and_(other),
    "bor": lambda own, other: own.bitwise_or_(other),
    "bxor": lambda own, other: own.bitwise_xor_(other),
}
_TORCH = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Reduction:
    """One reduction on one dtype."""

    name: str
    dtype: torch.dtype

    @staticmethod
    def of(op: Any, dtype: torch.dtype) -> Reduction:
        """From a name ("sum") or a `dist.ReduceOp`.

        Raises:
            ValueError: the operation does not exist, or does not exist for this dtype.
        """
        name = op if isinstance(op, str) else _name_of(op)
        if name not in _COMBINE:
            raise ValueError(f"op must be one of {', '.join(_COMBINE)} or a ReduceOp, got {op!r}")
        if reason := _refusal(name, dtype):
            raise ValueError(f"{name} of {dtype}: {reason}")
        return Reduction(name, dtype)

    def combine(self, own: torch.Tensor, arrivals: list[Callable[[], torch.Tensor]]) -> None:
        """Reduce what arrives into `own`. Each function in `arrivals` waits for a tensor.

        If two or more half-precision tensors arrive, they are added in float32 and rounded once.
        """
        wide = own
        if len(arrivals) > 1 and own.dtype in _LOW_PRECISION:
            wide = own.float()
        for arrival in arrivals:
            _COMBINE[self.name](wide, arrival())
        if wide is not own:
            own.copy_(wide)

    def finish(self, total: torch.Tensor, world_size: int) -> None:
        """The last step after all tensors have been combined: divide, if this is an average."""
        if self.name != "avg":
            return
        if total.dtype.is_floating_point or total.dtype.is_complex:
            total.div_(world_size)
        else:
            total.div_(world_size, rounding_mode="trunc")  # as NCCL averages integers


def _name_of(op: Any) -> str:
    # The order of the comparison matters: a ReduceOp object equals the constant that it was made
    # from, but the constant does not equal the object.
    return next((name for name, known in _TORCH.items() if op == known), repr(op))


@cache
def _refusal(name: str, dtype: torch.dtype) -> str:
    """Why torch cannot reduce this dtype, tested on one element; "" if torch can."""
    if name == "avg" and dtype == torch.bool:
        return "truth values have no average"
    try:
        _COMBINE[name](torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype))
    except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
        return str(error).splitlines()[0]
    return ""
