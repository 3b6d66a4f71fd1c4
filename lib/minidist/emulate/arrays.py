"""Reductions on raw bytes with numpy: the broker's process needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# torch's name of a dtype -> numpy's name; None: values are only moved, never reduced.
NUMPY_DTYPES: dict[str, str | None] = {
    "float64": "float64",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",  # numpy has no bfloat16: see `values`
    "int64": "int64",
    "int32": "int32",
    "int16": "int16",
    "int8": "int8",
    "uint8": "uint8",
    "bool": "bool",
    "complex64": "complex64",
    "complex128": "complex128",
    "float8_e4m3fn": None,
    "float8_e5m2": None,
    "float8_e4m3fnuz": None,
    "float8_e5m2fnuz": None,
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
}
REDUCE_OPS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")
_FUNCTIONS = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def itemsize(dtype: str) -> int:
    name = NUMPY_DTYPES[dtype]
    return 1 if name is None else np.dtype(name).itemsize


def can_reduce(op: str, dtype: str) -> str | None:
    """Why this reduction is not possible, or None."""
    name = NUMPY_DTYPES[dtype]
    if name is None:
        return f"{dtype} cannot be reduced"
    floating = dtype.startswith(("float", "bfloat", "complex"))
    if op == "avg" and not floating:
        return f"avg needs a floating-point dtype, got {dtype}"
    if op in ("band", "bor", "bxor") and floating:
        return f"{op} needs an integer dtype, got {dtype}"
    return None


def values(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Raw bytes as an array that can be computed with; bfloat16 becomes float32."""
    name = NUMPY_DTYPES[dtype]
    if name is None:
        return raw
    array = raw.view(name)
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def reduce(raws: Sequence[np.ndarray], op: str, dtype: str) -> np.ndarray:
    """Reduce in the order given, 16-bit floats in float32 and rounded once; returns raw bytes."""
    function = _FUNCTIONS[op]
    first = values(raws[0], dtype)
    if dtype == "bool":  # as torch: sum is or, product is and
        function = {"sum": np.logical_or, "product": np.logical_and}.get(op, function)
        total = first.astype(np.bool_)
    else:
        total = first.astype(np.float32) if dtype == "float16" else first.copy()
    with np.errstate(all="ignore"):  # overflow and nan are allowed
        for raw in raws[1:]:
            function(total, values(raw, dtype), out=total)
        if op == "avg":
            total /= len(raws)
    return _to_raw(total, dtype)


def _to_raw(total: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        bits = total.view(np.uint32)
        # Round to nearest, ties to even; nan keeps a mantissa bit.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = np.where(np.isnan(total), (bits >> 16) | 0x40, rounded).astype(np.uint16)
        return half.view(np.uint8)
    if dtype == "float16":
        with np.errstate(all="ignore"):
            return total.astype(np.float16).view(np.uint8)
    return total.view(np.uint8)
