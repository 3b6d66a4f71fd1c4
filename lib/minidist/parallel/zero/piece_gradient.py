"""The gradient of a Zero3 piece: a tensor whose norm cannot be taken by mistake.

`torch.nn.utils.clip_grad_norm_` on pieces would clip each rank by the norm of its own elements: the
ranks would scale their pieces differently, and nobody would notice. All else works as on any
tensor, and results are ordinary tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from minidist.errors import named_rank
from minidist.unsupported import Unsupported

NORM = Unsupported(
    "torch.nn.utils.clip_grad_norm_, torch.linalg.norm, Tensor.norm",
    "gradients of Zero3 pieces, of which each rank holds different elements",
    instead="call zero.clip_grad_norm_(max_norm), which returns the norm over all ranks; "
    "grad.as_subclass(torch.Tensor).norm() is that of this rank's elements",
)
_NORMS = {
    torch._foreach_norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
    torch.norm,
    torch.nuclear_norm,
    Tensor.norm,
}


class PieceGradient(Tensor):
    """This rank's elements of a parameter's gradient.

    Raises:
        ValueError: a norm is taken; the message says what to call.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NORMS:
            name = getattr(func, "__name__", str(func))
            raise NORM.error(f"a norm on {named_rank()}", where=name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)
