"""Reads a collective from a dispatcher call: which collective, which group, which tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Operation of torch's dispatcher -> (our name for it, index of the argument that is the message).
_C10D = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


def read_call(func: Any, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """(kind, op, group, tensors) of a call, or None if the call is not a collective."""
    namespace, name = func.namespace, func._schema.name.split("::")[1]
    if namespace == "c10d" and name in _C10D:
        kind, position = _C10D[name]
        tensors = [] if position is None else list(_flatten(args[position]))
        objects: list[Any] = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        group = next(o for o in objects if o._type().qualified_name().endswith(".ProcessGroup"))
        ops = [o.op() for o in objects if o._type().qualified_name().endswith(".ReduceOp")]
        return kind, _op_name(*ops), dist.ProcessGroup.unbox(group), tensors
    if namespace == "_c10d_functional":
        plain = name.rstrip("_").removesuffix("_out").removesuffix("_coalesced")
        if plain in _FUNCTIONAL:
            words: list[Any] = [arg for arg in args if isinstance(arg, str)]
            group = torch.distributed.distributed_c10d._resolve_process_group(words[-1])
            op = words[0] if len(words) > 1 else ""
            return _FUNCTIONAL[plain], op, group, list(_flatten(args[0]))
    return None


def _op_name(number: int | None = None) -> str:
    """The name of a ReduceOp, from the number that torch's dispatcher carries."""
    if number is None:
        return ""
    return dist.ReduceOp.RedOpType(number).name.lower().replace("product", "prod")


def _flatten(arg: Any) -> Iterator[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        yield arg
    else:
        for each in arg:
            yield from _flatten(each)
