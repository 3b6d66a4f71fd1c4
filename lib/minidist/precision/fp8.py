"""fp8 with scales: one for a tensor, for a tile of 128 numbers, or for a block of 32 (MXFP8).

fp8 e4m3 ends at 448 and has four significant bits. Numbers are divided by a scale, rounded, and
kept together with the scale. The numbers that share a scale are a block. The smaller the block, the
fewer numbers suffer from a large neighbour:

| recipe   | activations, gradients | weights             | scale              | paper            |
|----------|------------------------|---------------------|--------------------|------------------|
| "tensor" | one scale each         | one scale           | fp32               | arXiv 2209.05433 |
| "tile"   | 1 x 128                | 128 x 128           | fp32               | arXiv 2412.19437 |
| "mxfp8"  | 1 x 32                 | 1 x 32              | power of 2, 1 byte | arXiv 2310.10537 |

"tensor" rounds gradients to e5m2, which has more range and fewer digits; with small blocks e4m3
has range enough for all of them. Values are stored in torch's float8 dtypes. Products are
simulated: the rounded numbers are multiplied in fp32, as tensor cores multiply fp8 exactly and add
in (about) fp32.

>>> x = torch.tensor([[0.5, 1.0, 2.0, 4480000.0]])  # one scale: 10,000, and 0.0002 is too small
>>> quantize(x, BlockScaling()).numbers().tolist()
[[0.0, 0.0, 0.0, 4480000.0]]
>>> quantize(x, BlockScaling(columns=2)).numbers().tolist()  # 2 shares its scale with an outlier
[[0.5, 1.0, 0.0, 4480000.0]]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.precision.formats import FORMATS, Format


@dataclass(frozen=True, kw_only=True)
class BlockScaling:
    """Which numbers of a matrix share a scale, and which scales there are.

    Args:
        format: "fp8_e4m3" or "fp8_e5m2".
        rows, columns: of a block; None means all of them. Blocks at the edge may be smaller.
        power_of_two: scales are powers of two, the largest number's exponent minus that of the
            format's largest number, as in the OCP MX specification. They take one byte each; others
            are fp32. A block's largest number may then be cut to the format's largest.

    Raises:
        ValueError: a format that is not known, or a block without rows or columns.
    """

    format: str = "fp8_e4m3"
    rows: int | None = None
    columns: int | None = None
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.format not in ("fp8_e4m3", "fp8_e5m2"):
            raise ValueError(f"BlockScaling: format is fp8_e4m3 or fp8_e5m2, got {self.format!r}")
        for name in ("rows", "columns"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"BlockScaling: {name} of a block must be at least 1, got {size}")

    @property
    def fmt(self) -> Format:
        return FORMATS[self.format]

    def block_of(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of a block of the matrix x."""
        rows, columns = x.shape
        return self.rows or max(rows, 1), self.columns or max(columns, 1)

    def scales_of(self, x: Tensor) -> Tensor:
        """One scale per block of the matrix x, fp32, (row blocks, column blocks)."""
        rows, columns = self.block_of(x)
        down, right = -x.shape[0] % rows, -x.shape[1] % columns
        blocks = F.pad(x.detach().float().abs(), (0, right, 0, down))
        blocks = blocks.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        largest = blocks.amax(dim=(1, 3))
        if self.power_of_two:
            _, exponent = torch.frexp(largest)  # largest = fraction x 2**exponent, fraction < 1
            exponent = (exponent - 1 - self.fmt.max_exponent).clamp(min=-126)
            scales = torch.ldexp(torch.ones_like(largest), exponent)
            scales = torch.where(largest.isfinite(), scales, largest)
        else:
            scales = (largest / self.fmt.max).clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where(largest == 0, 1.0, scales)


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A matrix in fp8: `values` of torch's fp8 dtype, and an fp32 scale for each block."""

    values: Tensor
    scales: Tensor
    scaling: BlockScaling

    def numbers(self) -> Tensor:
        """The numbers that values and scales stand for, fp32."""
        return self.values.float() * _spread(self.scales, self.values, self.scaling)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory or in a message: one per value, one or four per scale."""
        return self.values.numel() + self.scales.numel() * (1 if self.scaling.power_of_two else 4)


def quantize(x: Tensor, scaling: BlockScaling, scales: Tensor | None = None) -> Scaled:
    """Round a matrix to fp8, block by block. What is too large becomes the format's largest number.

    Args:
        x: (rows, columns), floating point. A block with inf or NaN becomes NaN.
        scales: of the blocks, if they are known already; default: of the largest numbers in x.

    Raises:
        ValueError: x is no matrix.
    """
    if x.dim() != 2:
        raise ValueError(f"quantize: needs a matrix (2 dimensions), got shape {tuple(x.shape)}")
    scales = scaling.scales_of(x) if scales is None else scales
    scaled = x.detach().float() / _spread(scales, x, scaling)
    values = scaled.clamp(-scaling.fmt.max, scaling.fmt.max).to(scaling.fmt.dtype)
    return Scaled(values=values, scales=scales, scaling=scaling)


def _spread(scales: Tensor, x: Tensor, scaling: BlockScaling) -> Tensor:
    """The scale of each number of the matrix x."""
    rows, columns = scaling.block_of(x)
    wide = scales.repeat_interleave(rows, 0)[: x.shape[0]]
    return wide.repeat_interleave(columns, 1)[:, : x.shape[1]]


class DelayedScale:
    """One scale per tensor from the largest numbers of the last tensors, not of this one.

    The scale is known before the tensor is, so the kernel that makes the tensor can round it at
    once. A tensor that is suddenly larger is cut off. (Micikevicius et al., arXiv 2209.05433;
    Transformer Engine calls it delayed scaling, `BlockScaling()` current scaling.)

    Args:
        format: "fp8_e4m3" or "fp8_e5m2".
        history: number of tensors that are remembered. Tensors of zeros, which any scale suits, and
            tensors with inf or NaN, which would spoil the next scales, are not remembered.
    """

    def __init__(self, format: str = "fp8_e4m3", history: int = 16) -> None:
        self.scaling = BlockScaling(format=format)
        self._scales: deque[Tensor] = deque(maxlen=history)

    def quantize(self, x: Tensor) -> Scaled:
        """Round x with the largest scale of the remembered tensors; the first x with its own."""
        own = self.scaling.scales_of(x)
        used = torch.stack(list(self._scales) or [own]).amax(0)
        if x.numel() and own.isfinite().all() and (x != 0).any():
            self._scales.append(own)
        return quantize(x, self.scaling, used.expand_as(own))


# ------------------------------------------------------------------------------------------ layers


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """How the three products of a linear layer round their inputs."""

    activations: BlockScaling
    weights: BlockScaling
    gradients: BlockScaling


_TILE = BlockScaling(rows=1, columns=128)
_MX = BlockScaling(rows=1, columns=32, power_of_two=True)
FP8_RECIPES = {
    "tensor": Fp8Recipe(
        activations=BlockScaling(),
        weights=BlockScaling(),
        gradients=BlockScaling(format="fp8_e5m2"),
    ),
    "tile": Fp8Recipe(
        activations=_TILE, weights=BlockScaling(rows=128, columns=128), gradients=_TILE
    ),
    "mxfp8": Fp8Recipe(activations=_MX, weights=_MX, gradients=_MX),
}


def fp8_product(a: Tensor, b: Tensor, of_a: BlockScaling, of_b: BlockScaling) -> Tensor:
    """a @ b.T of (M, K) and (N, K), both rounded to fp8, added in fp32: (M, N).

    Blocks lie along K, the dimension that is summed over: each has one scale for its part of a sum.
    """
    return _matmul(quantize(a, of_a).numbers(), quantize(b, of_b).numbers().T)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):  # autocast would round sums to 16 bits
        return a @ b


class _Linear(torch.autograd.Function):
    """x @ weight.T: one product in forward and two in backward, all of fp8 inputs.

    The input is kept for backward in fp8.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Fp8Recipe) -> Tensor:
        kept = quantize(x, recipe.activations)
        ctx.save_for_backward(kept.values, kept.scales, weight)
        ctx.recipe = recipe
        return _matmul(kept.numbers(), quantize(weight, recipe.weights).numbers().T)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), recipe = grads, ctx.recipe
        values, scales, weight = ctx.saved_tensors
        x = Scaled(values=values, scales=scales, scaling=recipe.activations).numbers()
        grad_x = fp8_product(grad, weight.T, recipe.gradients, recipe.weights)
        # Summed over tokens, so the blocks of both lie along tokens now: rounded once more.
        grad_weight = fp8_product(grad.T, x.T, recipe.gradients, recipe.activations)
        return grad_x, grad_weight, None


class Fp8Linear(nn.Module):
    """A linear layer whose products have fp8 inputs. It takes over the layer's own parameters.

    Parameters and their gradients stay in the parameters' dtype (fp32): they are the master
    weights. The bias is added in fp32; the result has the dtype that the layer's would have. There
    are no gradients of gradients.

    Args:
        linear: its weight and bias are used, not copied.
    """

    def __init__(self, linear: nn.Linear, recipe: Fp8Recipe) -> None:
        super().__init__()
        self.weight, self.bias, self.recipe = linear.weight, linear.bias, recipe

    def forward(self, x: Tensor) -> Tensor:
        y: Any = _Linear.apply(x.reshape(-1, x.shape[-1]), self.weight, self.recipe)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        y = y if self.bias is None else y + self.bias
        kind = x.device.type
        autocast = torch.is_autocast_enabled(kind)
        return y.to(torch.get_autocast_dtype(kind) if autocast else x.dtype)


def use_fp8(model: nn.Module, recipe: Fp8Recipe, *, skip: Iterable[str] = ("head",)) -> list[str]:
    """Let the linear layers of a model multiply in fp8, in place; norms, softmax and sums stay.

    Args:
        skip: names of layers that stay as they are: the output layer is sensitive, and small.

    Returns:
        Names of the layers that were changed.

    Raises:
        ValueError: no layer was changed.
    """
    skipped = set(skip)
    changed = []
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent._modules.items()):  # also a layer with two names
            name = f"{parent_name}.{child_name}".lstrip(".")
            if type(child) is nn.Linear and name not in skipped:
                setattr(parent, child_name, Fp8Linear(child, recipe))
                changed.append(name)
    if not changed:
        raise ValueError(f"use_fp8: {type(model).__name__} has no nn.Linear outside {skipped}")
    return changed
