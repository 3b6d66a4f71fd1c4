"""Rounding errors of number formats in a matrix product, a long sum, and a small update.

All functions round to the format in software (`round_to`), so tf32 and fp8 can be compared on a
CPU, and the result does not depend on the hardware. The rows are for tables and plots.

>>> [row.format for row in matmul_error([16], formats=["tf32", "bf16"])]
['tf32', 'bf16']
>>> accumulation_error([1024, 8192], formats=["fp16"], value=1.0)[1].error  # stops at 2048
0.75
>>> update_survives(1.0, 1e-4, FORMATS["fp16"]), update_survives(1.0, 1e-3, FORMATS["fp16"])
(False, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minidist.precision.formats import FORMATS, Format, round_to


class ErrorRow(NamedTuple):
    """One measurement.

    Attributes:
        format: of the inputs, or of the running sum.
        accumulate: format of the running sum.
        size: number of terms in the sum.
        error: see the function that returned the row.
    """

    format: str
    accumulate: str
    size: int
    error: float


def matmul_error(
    sizes: Sequence[int] = (8, 32, 128),
    *,
    formats: Sequence[str] = ("fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"),
    accumulate: str = "fp32",
    seed: int = 0,
) -> list[ErrorRow]:
    """Error of A B with inputs rounded to a format; A and B are (size, size), normally distributed.

    Tensor cores multiply 16-bit numbers exactly and add in fp32. This function does the same, with
    one rounded addition per term. `accumulate="fp16"` shows why tensor cores add in fp32.

    Returns:
        One row per size and format; `error` is |C - AB| / |AB| in the Frobenius norm, against fp64.
    """
    rows = []
    for size in sizes:
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(size, size, generator=generator, dtype=torch.float64) for _ in "ab")
        exact = a @ b
        for name in formats:
            a_rounded, b_rounded = (round_to(each, FORMATS[name]) for each in (a, b))
            total = torch.zeros_like(exact)
            for k in range(size):
                product = a_rounded[:, k, None] * b_rounded[None, k, :]
                total = round_to(total + product, FORMATS[accumulate])
            error = ((total - exact).norm() / exact.norm()).item()
            rows.append(ErrorRow(name, accumulate, size, error))
    return rows


def accumulation_error(
    sizes: Sequence[int] = (256, 1024, 4096),
    *,
    formats: Sequence[str] = ("fp32", "fp16", "bf16"),
    value: float = 0.1,
) -> list[ErrorRow]:
    """Relative error of adding the same number `size` times, one after the other.

    The sum stops growing when the number is less than half the spacing at the sum.
    """
    rows = []
    for name in formats:
        fmt = FORMATS[name]
        term = round_to(torch.tensor(value, dtype=torch.float64), fmt)
        total = torch.zeros_like(term)
        for count in range(1, max(sizes) + 1):
            total = round_to(total + term, fmt)
            if count in sizes:
                exact = value * count
                rows.append(ErrorRow(name, name, count, abs(total.item() - exact) / exact))
    return rows


def update_survives(weight: float, update: float, fmt: Format) -> bool:
    """Whether weight + update differs from weight in the format. Often it does not, so master
    weights are fp32."""
    before = round_to(torch.tensor(weight, dtype=torch.float64), fmt)
    return bool(round_to(before + update, fmt) != before)
