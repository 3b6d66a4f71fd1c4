"""SyncBatchNorm: batch normalisation with the statistics of the joint batch of all ranks.

With plain BatchNorm every rank normalises with the mean and variance of its own part. With a few
images per rank these are noisy, and training with n ranks differs from training with one rank. Here
the statistics are those of all samples, and the gradient flows back through them: a sample changes
the mean, and therefore the outputs on **all** ranks.

Phases: local count, mean and sum of squared deviations; one all-gather; combine (Chan et al. 1979,
numerically stable, unlike E[x²] - E[x]²); normalise. Backward: two sums per channel, one
all-reduce.

With N samples per channel on all ranks together, x̂ = (x - μ) / σ and g = dL/dy:

    dL/dx = weight/σ · (g - Σg/N - x̂ Σ(g x̂)/N)        sums over all samples of all ranks

Example::

    model = convert_sync_batch_norm(ResNet())     # before wrapping, and before the optimizer
    ddp = BucketedDDP(model)

`torch.nn.SyncBatchNorm` does the same on a GPU, but does not run on a CPU. Without a process group,
or with one rank, this class is plain BatchNorm. Paper: Ioffe & Szegedy (arXiv 1502.03167).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from minidist.device import all_gather_single
from minidist.errors import named_rank


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over the batches of all ranks, for inputs (N, C, ...) of any dtype and device.

    Ranks may have different batch sizes, also 0: an input of shape (0, C, ...) gives an output of
    the same shape. Its backward must still run, because the other ranks wait for it; `output.sum()`
    of an empty output works as the loss. Statistics are computed in float32, or in float64 for
    float64 inputs.

    Gradients of weight and bias are those of this rank only, as a data-parallel wrapper expects.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats: as in `torch.nn.BatchNorm2d`.
        group: the ranks whose batches count; None means the default group. If ranks may skip
            parameters (find_unused), give it a separate group: its all-reduces run in backward
            between those of the buckets, and within one group all collectives must have the same
            order on every rank.

    Raises:
        ValueError: in forward in training mode, on every rank: the ranks have fewer than two values
            per channel together.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.group = group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: expected shape (N, {self.num_features}, ...), "
                f"got {tuple(input.shape)} on {named_rank(self.group)}"
            )

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=self.running_mean is None,
                eps=self.eps,
            )
        y, mean_C, var_C, count = cast(
            tuple[Tensor, Tensor, Tensor, Tensor],
            _Normalize.apply(input, self.weight, self.bias, self.eps, self.group),
        )
        self._track(mean_C, var_C, count)
        return y

    @torch.no_grad()
    def _track(self, mean_C: Tensor, var_C: Tensor, count: Tensor) -> None:
        """Update the running statistics; as in torch, the running variance is unbiased."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        weight = self.momentum
        if weight is None:  # the plain average over all batches
            weight = 1.0 / float(self.num_batches_tracked)
        unbiased_C = var_C * (count / (count - 1))
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), weight)


def convert_sync_batch_norm(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Replace every BatchNorm in a module by a SyncBatchNorm that uses the same tensors.

    Parameters stay the same objects, so an existing optimizer still holds them. A module that
    occurs twice is replaced by one module that occurs twice. Returns the module itself, or its
    replacement.
    """
    return _convert(module, group, {})


def _convert(
    module: nn.Module, group: dist.ProcessGroup | None, done: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module in done:
        return done[module]
    result = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        result = SyncBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            group,
        )
        result._parameters = module._parameters
        result._buffers = module._buffers
        result.train(module.training)
    done[module] = result
    for name, child in module.named_children():
        setattr(result, name, _convert(child, group, done))
    return result


class _Normalize(torch.autograd.Function):
    """Returns y, and the statistics used to normalise it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_C: Tensor | None,
        bias_C: Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        wide = x.to(dtype)
        num_channels = x.shape[1]
        per_channel = [1, num_channels] + [1] * (x.dim() - 2)
        dims = [d for d in range(x.dim()) if d != 1]

        # Local statistics; an empty batch has count 0 and no weight.
        local_count = x.numel() // num_channels
        mean_C = wide.sum(dims) / max(local_count, 1)
        squares_C = (wide - mean_C.view(per_channel)).square().sum(dims)
        count = torch.full((1,), float(local_count), dtype=dtype, device=x.device)

        # Statistics of all ranks.
        if _world_size(group) > 1:
            local = torch.cat([count, mean_C, squares_C])
            every_W = torch.empty(_world_size(group) * local.numel(), dtype=dtype, device=x.device)
            all_gather_single(every_W, local, group=group)
            counts_W1, means_WC, squares_WC = every_W.view(_world_size(group), -1).split(
                [1, num_channels, num_channels], dim=1
            )
            count = counts_W1.sum(0)
            mean_C = (counts_W1 * means_WC).sum(0) / count
            squares_C = (squares_WC + counts_W1 * (means_WC - mean_C).square()).sum(0)
        if count.item() < 2:
            raise ValueError(
                "SyncBatchNorm: training needs at least 2 values per channel on all ranks "
                f"together, got {count.item():.0f}"
            )
        var_C = squares_C / count

        # Normalise.
        inverse_std_C = torch.rsqrt(var_C + eps)
        normal = (wide - mean_C.view(per_channel)) * inverse_std_C.view(per_channel)
        y = normal
        if weight_C is not None:
            y = y * weight_C.to(dtype).view(per_channel)
        if bias_C is not None:
            y = y + bias_C.to(dtype).view(per_channel)

        # Keep x instead of x̂, because x stays in memory anyway.
        ctx.save_for_backward(x, weight_C, mean_C, inverse_std_C, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean_C, var_C, count)
        return y.to(x.dtype), mean_C, var_C, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_C, mean_C, inverse_std_C, count = ctx.saved_tensors
        dtype = mean_C.dtype
        num_channels = x.shape[1]
        per_channel = [1, num_channels] + [1] * (x.dim() - 2)
        dims = [d for d in range(x.dim()) if d != 1]
        grad = grads[0].to(dtype)
        normal = (x.to(dtype) - mean_C.view(per_channel)) * inverse_std_C.view(per_channel)

        # Local sums are the gradients of bias and weight.
        sums_2C = torch.cat([grad.sum(dims), (grad * normal).sum(dims)])
        grad_bias_C, grad_weight_C = sums_2C.clone().split(num_channels)

        grad_x = None
        if ctx.needs_input_grad[0]:
            # Sums over all ranks, because a sample affects the outputs on all ranks.
            if _world_size(ctx.group) > 1:
                dist.all_reduce(sums_2C, group=ctx.group)
            mean_grad_C, mean_product_C = (sums_2C / count).split(num_channels)
            grad_x = grad - mean_grad_C.view(per_channel)
            grad_x = grad_x - normal * mean_product_C.view(per_channel)
            scale_C = inverse_std_C if weight_C is None else inverse_std_C * weight_C.to(dtype)
            grad_x = (grad_x * scale_C.view(per_channel)).to(x.dtype)

        if weight_C is None:
            return grad_x, None, None, None, None
        return grad_x, grad_weight_C.to(weight_C.dtype), grad_bias_C.to(weight_C.dtype), None, None


def _world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
