"""Floating-point formats as data, and rounding to any of these formats.

A number is sign x 1.mantissa x 2**exponent. The number of exponent bits decides the range, the
number of mantissa bits the precision. Subnormal numbers are smaller than the smallest normal
number: they have no leading 1 and are evenly spaced down to zero.

>>> fp16, bf16 = FORMATS["fp16"], FORMATS["bf16"]
>>> fp16.max, bf16.max
(65504.0, 3.3895313892515355e+38)
>>> fp16.smallest_subnormal, bf16.smallest_normal
(5.960464477539063e-08, 1.1754943508222875e-38)
>>> fp16.epsilon, bf16.epsilon
(0.0009765625, 0.0078125)

fp16 can hold a gradient of 1e-4, but a gradient of 1e-8 becomes zero:

>>> round_to(torch.tensor([1e-4, 1e-7, 1e-8]), fp16)
tensor([1.0002e-04, 1.1921e-07, 0.0000e+00])

fp8: Micikevicius et al., arXiv 2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format.

    Args:
        exponent_bits: bits of the exponent, with bias 2**(bits-1) - 1.
        mantissa_bits: bits of the fraction that are stored.
        storage_bits: bits in memory.
        has_infinity: the largest exponent is reserved for inf and NaN, as in IEEE 754. fp8 e4m3 has
            no infinities and only one bit pattern for NaN, so its largest exponent holds numbers.
        dtype: torch's dtype; None for tf32, which exists only inside tensor cores.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    storage_bits: int
    has_infinity: bool = True
    dtype: torch.dtype | None = None

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max_exponent(self) -> int:
        return self.bias + (0 if self.has_infinity else 1)

    @property
    def min_exponent(self) -> int:
        """The smallest exponent of normal numbers."""
        return 1 - self.bias

    @property
    def max(self) -> float:
        """The largest finite number. In a format without infinities, the all-ones pattern is NaN,
        so the largest number is one step below this pattern."""
        last = 1 if self.has_infinity else 2
        return (2.0 - last * self.epsilon) * 2.0**self.max_exponent

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number. Relative rounding errors are at most half."""
        return 2.0**-self.mantissa_bits


FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format(
            name="fp32", exponent_bits=8, mantissa_bits=23, storage_bits=32, dtype=torch.float32
        ),
        Format(name="tf32", exponent_bits=8, mantissa_bits=10, storage_bits=32),
        Format(
            name="fp16", exponent_bits=5, mantissa_bits=10, storage_bits=16, dtype=torch.float16
        ),
        Format(
            name="bf16", exponent_bits=8, mantissa_bits=7, storage_bits=16, dtype=torch.bfloat16
        ),
        Format(
            name="fp8_e4m3",
            exponent_bits=4,
            mantissa_bits=3,
            storage_bits=8,
            has_infinity=False,
            dtype=torch.float8_e4m3fn,
        ),
        Format(
            name="fp8_e5m2",
            exponent_bits=5,
            mantissa_bits=2,
            storage_bits=8,
            dtype=torch.float8_e5m2,
        ),
    )
}


def spacing(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Distance between neighbouring numbers of the format at |x|, fp64 (one ulp)."""
    # frexp: |x| = fraction x 2**exponent with fraction in [0.5, 1). The form 1.mantissa needs a
    # fraction in [1, 2), hence exponent - 1.
    _, exponent = torch.frexp(x.double())
    exponent = (exponent - 1).clamp(min=fmt.min_exponent)
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - fmt.mantissa_bits)


def round_to(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round to the nearest number of the format, ties to even, as hardware does.

    Numbers that are too large become inf; in a format without infinities they become the largest
    number of the format (saturation).

    Args:
        x: any shape, floating point.

    Returns:
        A tensor of the same shape and dtype. The result is exact if x's dtype can hold all numbers
        of the format; fp32 can do so for all of `FORMATS`.
    """
    wide = x.double()
    step = spacing(wide, fmt)
    rounded = torch.round(wide / step) * step
    if fmt.has_infinity:
        # max + half a step is the tie between max and inf. Ties go to even, which is inf here.
        rounded = torch.where(rounded.abs() > fmt.max, rounded.sign() * torch.inf, rounded)
    else:
        rounded = rounded.clamp(-fmt.max, fmt.max)
    # For inf and NaN `step` has no meaning, so they are handled separately.
    if fmt.has_infinity:
        rounded = torch.where(torch.isinf(wide), wide, rounded)
    else:
        rounded = torch.where(torch.isinf(wide), wide.sign() * fmt.max, rounded)
    return torch.where(torch.isnan(wide), wide, rounded).to(x.dtype)


def underflow_share(x: torch.Tensor, fmt: Format, scale: float = 1.0) -> tuple[float, float]:
    """Shares of the non-zero elements of x that become (0, subnormal) when scale * x is rounded.

    It shows why loss scaling helps: a larger scale moves gradients away from the lower end of fp16.

    >>> gradients = torch.tensor([0.0, 1e-9, 3e-8, 1e-6, 1e-3])
    >>> underflow_share(gradients, FORMATS["fp16"])
    (0.25, 0.5)
    >>> underflow_share(gradients, FORMATS["fp16"], scale=1024.0)
    (0.0, 0.5)
    """
    values = (x.double() * scale)[x != 0].abs()
    if values.numel() == 0:
        return 0.0, 0.0
    rounded = round_to(values, fmt)
    zero = (rounded == 0).double().mean().item()
    subnormal = ((rounded > 0) & (rounded < fmt.smallest_normal)).double().mean().item()
    return zero, subnormal
