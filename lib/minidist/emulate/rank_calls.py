"""One rank's call of one collective, parsed from an untrusted header, and the calls' results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.emulate import arrays
from minidist.errors import ProtocolError

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_ROOTED = ("reduce", "broadcast", "gather", "scatter")


@dataclass
class RankCall:
    """What one rank asked for in one collective."""

    rank: int
    kind: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    root: int | None
    payload: np.ndarray
    send_splits: tuple[int, ...] = ()
    recv_splits: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of this rank's part; for an all_to_all, the elements that it sends."""
        return sum(self.send_splits) if self.kind == "all_to_all" else numel_of(self.shape)

    def describe(self) -> str:
        if self.kind == "barrier":
            return "barrier()"
        text = f"{self.kind}({self.dtype}{list(self.shape)}"
        text += f", {self.op}" if self.op else ""
        return text + (f", root {self.root})" if self.root is not None else ")")

    def signature(self) -> tuple[Any, ...]:
        # The parts of an all_to_all are compared pair by pair instead.
        shape = () if self.kind == "all_to_all" else self.shape
        return (self.kind, self.op, self.dtype, shape, self.root)


def integer(header: dict[str, Any], name: str, low: int, high: int) -> int:
    value = header.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{name!r} must be an integer from {low} to {high}")
    return value


def request_number(header: dict[str, Any]) -> int:
    return integer(header, "q", 0, 1 << 64)


def amount(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e30:
        raise ProtocolError("flops and bytes must be numbers from 0 to 1e30")
    return float(value)


def _sizes(header: dict[str, Any], name: str, count: int) -> tuple[int, ...]:
    value = header.get(name)
    if (
        not isinstance(value, list)
        or len(value) != count
        or not all(type(n) is int and 0 <= n < 1 << 40 for n in value)
    ):
        raise ProtocolError(f"{name!r} must be a list of {count} sizes")
    return tuple(value)


def numel_of(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def parse_call(
    rank: int, header: dict[str, Any], payload: np.ndarray, members: tuple[int, ...]
) -> RankCall:
    kind, op, dtype = header.get("kind"), header.get("op", ""), header.get("dtype")
    if not isinstance(kind, str) or kind not in (*COLLECTIVES, "send", "recv"):
        raise ProtocolError(f"unknown collective {str(kind)[:40]!r}")
    if not isinstance(dtype, str) or dtype not in arrays.NUMPY_DTYPES:
        raise ProtocolError(f"unknown dtype {str(dtype)[:40]!r}")
    shape = header.get("shape")
    if not isinstance(shape, list) or len(shape) > 64:
        raise ProtocolError("'shape' must be a list of at most 64 sizes")
    sizes = _sizes(header, "shape", len(shape))
    if kind in _REDUCING:
        if op not in arrays.REDUCE_OPS:
            raise ProtocolError(f"unknown reduction {str(op)[:40]!r}")
        if reason := arrays.can_reduce(op, dtype):
            raise ProtocolError(reason)
    elif op != "":
        raise ProtocolError(f"{kind} has no reduction")
    root = None
    if kind in _ROOTED:
        root = integer(header, "root", 0, 1 << 20)
        if root not in members:
            raise ProtocolError(f"root {root} is not in the group {list(members)}")
    numel, parts = numel_of(sizes), len(members)
    call = RankCall(rank, kind, op, dtype, sizes, root, payload)
    if kind == "all_to_all":
        call.send_splits = _sizes(header, "send", parts)
        call.recv_splits = _sizes(header, "recv", parts)
        numel = sum(call.send_splits)
    elif kind == "barrier":
        if numel:
            raise ProtocolError(f"a barrier carries nothing, got the shape {list(sizes)}")
    elif kind == "recv" or (kind == "broadcast" and rank != root):
        numel = 0
    elif kind == "scatter":
        numel = numel * parts if rank == root else 0
    elif kind == "reduce_scatter":
        numel *= parts
    if payload.nbytes != numel * arrays.itemsize(dtype):
        raise ProtocolError(
            f"{call.describe()} needs {numel * arrays.itemsize(dtype)} bytes, got {payload.nbytes}"
        )
    return call


def num_bytes(call: RankCall, num_ranks: int) -> int:
    """Size as `minidist.cost.comm.collective_seconds` counts it; the shape is one rank's part."""
    size = arrays.itemsize(call.dtype)
    whole = call.kind in ("all_gather", "reduce_scatter", "gather", "scatter")
    return call.numel * size * (num_ranks if whole else 1)


def agree(calls: list[RankCall]) -> bool:
    return all(call.signature() == calls[0].signature() for call in calls[1:])


def splits_agree(calls: list[RankCall]) -> bool:
    return all(
        sender.send_splits[j] == receiver.recv_splits[i]
        for i, sender in enumerate(calls)
        for j, receiver in enumerate(calls)
    )


def results(members: tuple[int, ...], calls: list[RankCall]) -> dict[int, np.ndarray | None]:
    """Raw bytes that each rank gets; `calls` are in the order of `members`."""
    first = calls[0]
    raws = [call.payload for call in calls]
    nothing: dict[int, np.ndarray | None] = dict.fromkeys(members)
    match first.kind:
        case "all_reduce":
            return dict.fromkeys(members, arrays.reduce(raws, first.op, first.dtype))
        case "reduce":
            assert first.root is not None
            return nothing | {first.root: arrays.reduce(raws, first.op, first.dtype)}
        case "broadcast":
            sent = next(call.payload for call in calls if call.rank == first.root)
            return {rank: None if rank == first.root else sent for rank in members}
        case "all_gather":
            return dict.fromkeys(members, np.concatenate(raws))
        case "gather":
            assert first.root is not None
            return nothing | {first.root: np.concatenate(raws)}
        case "scatter":
            sent = next(call.payload for call in calls if call.rank == first.root)
            return dict(zip(members, np.split(sent, len(members)), strict=True))
        case "reduce_scatter":
            total = arrays.reduce(raws, first.op, first.dtype)
            return dict(zip(members, np.split(total, len(members)), strict=True))
        case "all_to_all":
            size = arrays.itemsize(first.dtype)
            parts = [
                np.split(call.payload, np.cumsum(np.array(call.send_splits) * size)[:-1])
                for call in calls
            ]
            return {
                rank: np.concatenate([part[i] for part in parts]) for i, rank in enumerate(members)
            }
        case _:
            return nothing
