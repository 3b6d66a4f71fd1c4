"""Linear layers split over the ranks of a group, and the layer norm that goes with them.

A weight of shape (out, in) is split by *columns* of its transpose, the matrix that multiplies from
the right (along `out`), or by *rows* of this matrix (along `in`):

    column-parallel:  x replicated,  W = [W_0; W_1],  y_i = x W_i^T          y split along features
    row-parallel:     x split,       W = [W_0, W_1],  y = sum_i x_i W_i^T    y replicated

A column-parallel layer followed by a row-parallel layer needs no communication between the two, and
one all-reduce in each direction around the pair.

Phases of a column-parallel layer with `overlap`, backward:
1. start gathering the input again (sequence parallelism keeps only a part of it),
2. compute the gradient of the input, a partial sum; start reducing it,
3. meanwhile compute the gradients of weight and bias,
4. wait.

Example, on each rank of a group of 2::

    torch.manual_seed(0)                                    # same full layers on all ranks
    tp = TensorParallel(group=mesh.group("tp"))
    up = ColumnParallelLinear(nn.Linear(32, 128), tp)       # holds (64, 32)
    down = RowParallelLinear(nn.Linear(128, 32), tp)        # holds (32, 64) and the whole bias
    z_BTD = down(F.gelu(up(x_BTD)))                         # equal on both ranks

Papers: Megatron-LM (arXiv 1909.08053, section 3), sequence parallelism (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.device import all_gather_single, reduce_scatter_single
from minidist.parallel.tensor.config import TensorParallel
from minidist.parallel.tensor.mappings import (
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
)
from minidist.replaced import check_layer


class ShardedModule(nn.Module):
    """A layer of which each rank holds a part.

    `shards` says which of its parameters are parts: name -> (split dimension, size of this
    dimension in the full layer). All other parameters are replicated.
    """

    shards: dict[str, tuple[int, int]]
    tp: TensorParallel


class ColumnParallelLinear(ShardedModule):
    """A linear layer split along its output features.

    Args:
        full: the whole layer, the same on all ranks; each rank copies its part.
        gather_output: join the outputs of all ranks. Not needed before a row-parallel layer.

    Shapes: (..., in) to (..., out / n), or (..., out) with gather_output. With sequence parallelism
    the input is the rank's part (B, T / n, in) and the output covers the whole sequence.

    Raises:
        ValueError: the output features cannot be split evenly, or the layer is more than a linear
            layer.
    """

    def __init__(self, full: nn.Linear, tp: TensorParallel, *, gather_output: bool = False) -> None:
        super().__init__()
        check_layer("ColumnParallelLinear", full, nn.Linear)
        tp.split("ColumnParallelLinear: output features", full.out_features)
        self.tp = tp
        self.training = full.training
        self.gather_output = gather_output
        self.weight = parameter_like(full.weight, tp.part(full.weight, 0))
        self.bias = None
        if full.bias is not None:
            self.bias = parameter_like(full.bias, tp.part(full.bias, 0))
        self.shards = {"weight": (0, full.out_features), "bias": (0, full.out_features)}

    def forward(self, x: Tensor) -> Tensor:
        (y,) = column_parallel(x, [self], self.tp)
        return gather_from(y, -1, self.tp.group) if self.gather_output else y


class RowParallelLinear(ShardedModule):
    """A linear layer split along its input features, whose partial results are summed.

    Every rank adds the bias once, after the sum. The bias is a replicated parameter: if it were
    added before the sum, it would count n times; if only one rank added it, the ranks would differ.

    Args:
        full: the whole layer, the same on all ranks; each rank copies its part.

    Shapes: (..., in / n) to (..., out); (B, T, in / n) to (B, T / n, out) with sequence
    parallelism.

    Raises:
        ValueError: the input features cannot be split evenly, or the layer is more than a linear
            layer, or the input has a wrong width.
    """

    def __init__(self, full: nn.Linear, tp: TensorParallel) -> None:
        super().__init__()
        check_layer("RowParallelLinear", full, nn.Linear)
        tp.split("RowParallelLinear: input features", full.in_features)
        self.tp = tp
        self.training = full.training
        self.weight = parameter_like(full.weight, tp.part(full.weight, 1))
        self.bias = None
        if full.bias is not None:
            self.bias = parameter_like(full.bias, full.bias.detach().clone())
        self.shards = {"weight": (1, full.in_features)}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[1]:
            raise ValueError(
                f"[rank {dist.get_rank()}] RowParallelLinear: expected this rank's "
                f"{self.weight.shape[1]} of {self.shards['weight'][1]} input features, got "
                f"{x.shape[-1]}; is the layer before it column-parallel, without gather_output?"
            )
        partial = F.linear(x, self.weight)
        if self.tp.sequence_parallel:
            y = reduce_scatter_sequence(partial, 1, self.tp.group)
        else:
            y = reduce_from(partial, self.tp.group)
        # Add the bias in y's dtype: under autocast y has a low-precision dtype, and an fp32 bias
        # would promote the sum.
        return y if self.bias is None else y + replicated(self.bias, self.tp).to(y.dtype)


class ParallelLayerNorm(nn.LayerNorm):
    """A layer norm with replicated parameters, on replicated or sequence-split activations."""

    def __init__(self, full: nn.LayerNorm, tp: TensorParallel) -> None:
        check_layer("ParallelLayerNorm", full, nn.LayerNorm)
        super().__init__(
            list(full.normalized_shape),
            full.eps,
            full.elementwise_affine,
            bias=full.bias is not None,
            device=full.weight.device if full.elementwise_affine else None,
            dtype=full.weight.dtype if full.elementwise_affine else None,
        )
        self.load_state_dict(full.state_dict())
        for own, whole in zip(self.parameters(), full.parameters(), strict=True):
            own.requires_grad_(whole.requires_grad)
        self.tp = tp
        self.training = full.training

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (
            None if p is None else replicated(p, self.tp) for p in (self.weight, self.bias)
        )
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def parameter_like(full: Tensor, part: Tensor) -> nn.Parameter:
    """A parameter for a part of `full`; frozen if `full` is."""
    return nn.Parameter(part, requires_grad=full.requires_grad)


def replicated(parameter: Tensor, tp: TensorParallel) -> Tensor:
    """A replicated parameter, ready for use on this rank's activations.

    With sequence parallelism each rank sees different tokens, so its gradient is a partial sum, and
    the ranks must sum their gradients. Applying f (`copy_to`) to the parameter does this.
    Megatron-LM instead marks these parameters and sums their gradients after the backward pass.
    This needs fewer collectives, but is one more step that a program can forget.
    """
    return copy_to(parameter, tp.group) if tp.sequence_parallel else parameter


def column_parallel(x: Tensor, layers: Sequence[Any], tp: TensorParallel) -> list[Tensor]:
    """Outputs of one or more column-parallel layers for the same input.

    Query, key and value share one input. Together they need one collective per direction instead of
    three.

    Args:
        x: (..., in), replicated; with sequence parallelism this rank's part (B, T / n, in).
        layers: modules with this rank's `weight` (out / n, in) and `bias` (out / n) or None.
    """
    if not tp.overlap or tp.size == 1:
        x = gather_sequence(x, 1, tp.group) if tp.sequence_parallel else copy_to(x, tp.group)
        return [F.linear(x, layer.weight, layer.bias) for layer in layers]
    tensors = [x, *(layer.weight for layer in layers)]
    tensors += [layer.bias for layer in layers if layer.bias is not None]
    if len({layer.bias is None for layer in layers}) > 1:
        raise ValueError("column_parallel: either all layers have a bias or none")
    if torch.is_autocast_enabled(x.device.type):  # autocast has no effect in autograd functions
        tensors = [t.to(torch.get_autocast_dtype(x.device.type)) for t in tensors]
    return list(_OverlappedColumns.apply(tp, len(layers), *tensors))


class _OverlappedColumns(torch.autograd.Function):
    """y_i = x W_i^T + b_i for several i; backward communicates while it computes."""

    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, num: int, x: Tensor, *parameters: Tensor) -> Any:
        weights, biases = parameters[:num], parameters[num:]
        ctx.tp, ctx.num_biases = tp, len(biases)
        ctx.save_for_backward(x, *weights)  # only this rank's part of the sequence
        if tp.sequence_parallel:
            x = gather_sequence(x, 1, tp.group)
        layers = zip(weights, biases or (None,) * num, strict=True)
        return tuple(F.linear(x, weight, bias) for weight, bias in layers)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tp: TensorParallel = ctx.tp
        x, *weights = ctx.saved_tensors

        # 1. Start gathering the input again.
        gather: Any = None
        if tp.sequence_parallel:
            part = x.movedim(1, 0).contiguous()  # the collectives split the first dimension
            x = part.new_empty(part.shape[0] * tp.size, *part.shape[1:])
            gather = all_gather_single(x, part, group=tp.group, async_op=True)

        # 2. The gradient of the input: each rank has the share of its columns.
        partial = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            partial += grad @ weight
        if gather is not None:
            gather.wait()
            x = x.movedim(0, 1)
            partial = partial.movedim(1, 0).contiguous()
            grad_x = partial.new_empty(partial.shape[0] // tp.size, *partial.shape[1:])
            reduce: Any = reduce_scatter_single(grad_x, partial, group=tp.group, async_op=True)
            grad_x = grad_x.movedim(0, 1)
        else:
            grad_x = partial.contiguous()
            reduce = dist.all_reduce(grad_x, group=tp.group, async_op=True)

        # 3. Meanwhile: the gradients of weights and biases, which need no reduction.
        rows = x.flatten(0, -2)
        flat = [grad.flatten(0, -2) for grad in grads]
        grad_weights = [grad.T @ rows for grad in flat]
        grad_biases = [grad.sum(0) for grad in flat[: ctx.num_biases]]

        # 4. Wait.
        reduce.wait()
        return None, None, grad_x, *grad_weights, *grad_biases
