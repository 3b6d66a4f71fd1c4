"""What a rank says about its call at a collective's first barrier, so that mismatches get named.

Two words of shared memory hold it. The first is packed; the second says where in a shared buffer
the tensor lies (0: in none).

>>> word = pack("all_reduce", numel=10, dtype=torch.float32, op="avg")
>>> describe((word, 0))
'all_reduce(avg) of 10 float32'
>>> describe((pack("broadcast", numel=3, dtype=torch.int64, root=1), 0))
'broadcast from 1 of 3 int64'
"""

from __future__ import annotations

import torch

from minidist.errors import MismatchError

Call = tuple[int, int]

_KINDS = ("barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "buffer")
_OPS = ("sum", "avg", "max", "min", "prod", "band", "bor", "bxor")
REDUCIBLE = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
_KIND_CODE = {kind: code for code, kind in enumerate(_KINDS)}
_OP_CODE = {op: code for code, op in enumerate(_OPS)}
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(REDUCIBLE)}


def pack(kind: str, *, numel: int, dtype: torch.dtype, op: str = "sum", root: int = 0) -> int:
    """One word of 64 bits: 3 for the kind, 3 op, 4 dtype, 12 root, 42 numel."""
    return _KIND_CODE[kind] | _OP_CODE[op] << 3 | _DTYPE_CODE[dtype] << 6 | root << 10 | numel << 22


def describe(call: Call) -> str:
    """The call that was packed, in words."""
    word, place = call
    kind = _KINDS[word & 7]
    if kind == "barrier":
        return kind
    op, dtype = _OPS[word >> 3 & 7], REDUCIBLE[word >> 6 & 15]
    root, numel = word >> 10 & 4095, word >> 22
    text = kind
    if kind in ("all_reduce", "reduce_scatter"):
        text += f"({op})"
    if kind == "broadcast":
        text += f" from {root}"
    text += f" of {numel} {str(dtype).removeprefix('torch.')}"
    if place:
        text += f" in buffer {place >> 40} at byte {place & (1 << 40) - 1}"
    return text


def compare(mine: Call, rank: int, theirs: Call, other: int, num_calls: int) -> None:
    """Raise a `MismatchError` unless both ranks made the same call."""
    same = mine == theirs
    if _KINDS[mine[0] & 7] == "all_gather":
        # Each rank may gather its own part of a buffer, so places differ; they are told the others.
        same = mine[0] == theirs[0] and bool(mine[1]) == bool(theirs[1])
    if not same:
        raise MismatchError(
            f"shared-memory call {num_calls}: this rank called {describe(mine)}, "
            f"rank {other} called {describe(theirs)}",
            rank=rank,
        )


def check_dtype(what: str, tensor: torch.Tensor) -> None:
    """Raise a ValueError for dtypes that cannot be reduced here."""
    if tensor.dtype not in _DTYPE_CODE:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE)
        raise ValueError(f"{what}: dtype {tensor.dtype} is not one of {names}")
