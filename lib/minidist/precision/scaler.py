"""Loss scaling from scratch: `torch.amp.GradScaler`, with one decision for all ranks.

fp16 has no number between 0 and 6e-8, so small gradients become zero. The loss is therefore
multiplied by a scale, which multiplies every gradient by the same scale. The gradients are divided
by the scale, in fp32, before the optimiser uses them. The scaler finds the scale by trying: if the
scale is too large, some gradient is inf or NaN; then the step is skipped and the scale is halved.

    scale       65536   65536   32768   32768 ...  2000 good steps ...  65536
    overflow      no     YES      no      no
    step          yes   skipped   yes     yes

Phases of an iteration:
1. `scale(loss).backward()`
2. `unscale_(optimizer)`: divide the gradients, look for inf and NaN, and combine the result over
   the ranks. Call it before code that reads gradients, e.g. clipping; otherwise `step` calls it.
3. `step(optimizer)`: the optimiser's step, unless a gradient on any rank was not finite.
4. `update()`: increase or decrease the scale.

Example::

    scaler = GradScaler(group=group)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

With DDP all ranks hold the same gradients, so all ranks make the same decision without
communication. With sharded gradients, only the rank that holds an overflowed gradient sees the
overflow. If only this rank skipped the step, parameters and scales would differ between ranks
afterwards. So the ranks of the group all-reduce two numbers per optimiser and step: whether there
was an overflow, and whether there was any gradient. torch-native: `torch.amp.GradScaler(device)`,
and `ShardedGradScaler` of `torch.distributed.fsdp` with a group.

Micikevicius et al., arXiv 1710.03740.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist

from minidist.device import by_dtype_and_device
from minidist.errors import MinidistError
from minidist.precision.clip import own_norms, shard_group


class Stage(Enum):
    """The state of an optimiser between two calls of `update`."""

    READY = auto()  # gradients are scaled
    UNSCALED = auto()  # gradients are divided and checked for inf and NaN
    STEPPED = auto()  # the step was taken or skipped


class GradScaler:
    """Multiplies the loss, divides the gradients, skips steps with an overflow.

    The arguments mean the same as in torch. All ranks of the group make the same calls.

    Args:
        group: the ranks that must make the same decision: all ranks that hold shards of the same
            gradients (for FSDP with tensor parallelism, the ranks of both). None: this rank decides
            alone, as torch's GradScaler does; this is enough for plain DDP.
        growth_interval: good steps in a row after which the scale grows.
        min_scale: the lowest scale. Default: fp32's smallest normal number (finite reciprocal).
        enabled: False turns scaling off: losses, gradients and steps pass through unchanged.

    Raises:
        ValueError: a factor is out of range.
        RuntimeError: calls in the wrong order.
        MinidistError: in `update`: a step overflows at the smallest scale, so that the scale is not
            the reason.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        enabled: bool = True,
        min_scale: float = torch.finfo(torch.float32).tiny,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if init_scale <= 0 or growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ValueError(
                "GradScaler: needs init_scale > 0, growth_factor > 1 and 0 < backoff_factor < 1, "
                f"got {init_scale}, {growth_factor}, {backoff_factor}"
            )
        if growth_interval < 1:
            raise ValueError(
                f"GradScaler: growth_interval must be at least 1, got {growth_interval}"
            )
        if not min_scale >= torch.finfo(torch.float32).tiny:
            raise ValueError(
                f"GradScaler: min_scale must be at least {torch.finfo(torch.float32).tiny}, got "
                f"{min_scale}"
            )
        self._min_scale = min_scale
        # The scale is fp32 as in torch, and on the CPU, where `update` changes it.
        self._set_scale(init_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0  # good steps since the scale changed
        self._num_overflows = 0  # skipped steps in a row
        self._enabled = enabled
        self._group = group
        self._stages: dict[int, Stage] = {}
        self._found_inf: dict[int, bool] = {}

    # --- 1. scale -----------------------------------------------------------------------------

    def scale(self, loss: Any) -> Any:
        """The loss times the scale; of a list or tuple of losses each one."""
        if isinstance(loss, list | tuple):
            return type(loss)(self.scale(each) for each in loss)
        # A scalar tensor on the CPU works with a loss on any device, without a synchronising copy.
        return loss * self._scale if self._enabled else loss

    # --- 2. unscale ---------------------------------------------------------------------------

    @torch.no_grad()
    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of this optimiser's parameters by the scale. Once per step.

        If the optimiser has a method `prepare_gradients()`, `unscale_` calls it first, so that the
        optimiser can fetch its gradients (see `MasterWeights`); a skipped step calls its
        `drop_gradients()`, if there is one. If the gradients are not in the
        parameters of `param_groups`, `held_parameters()` must return the tensors that have them,
        and `shards_gradients` tells whether ranks hold different gradients (see
        `ShardedOptimizer`).

        Raises:
            RuntimeError: called twice, or after `step`; or no rank of the group has a gradient.
            ValueError: ranks hold different gradients and the scaler has no group; or a parameter
                is fp16. Dividing an fp16 gradient would make small elements zero again, so the
                parameter needs an fp32 master.
        """
        if not self._enabled:
            return
        stage = self._stages.get(id(optimizer), Stage.READY)
        if stage is Stage.UNSCALED:
            raise RuntimeError(
                f"GradScaler.unscale_: called twice for this optimizer since the last update()"
                f"{self._where()}"
            )
        if stage is Stage.STEPPED:
            raise RuntimeError(f"GradScaler.unscale_: called after step(){self._where()}")
        if self._group is None and shards_gradients(optimizer):
            raise ValueError(
                "GradScaler.unscale_: every rank holds other gradients, and all have to decide "
                f"alike: expected GradScaler(group=...), got no group{self._where()}"
            )
        if hasattr(optimizer, "prepare_gradients"):
            optimizer.prepare_gradients()
        parameters = held_parameters(optimizer)
        # Check parameters, not gradients: a rank without gradients must also raise here, or it
        # would wait in the all-reduce for the ranks that raised.
        are_held = hasattr(optimizer, "held_parameters")
        for parameter in parameters:
            # A frozen parameter may have any dtype. Held shards are always checked, because a shard
            # is a view whose `requires_grad` is never set.
            if parameter.dtype == torch.float16 and (are_held or parameter.requires_grad):
                raise ValueError(
                    "GradScaler.unscale_: got an fp16 parameter of shape "
                    f"{tuple(parameter.shape)}, expected fp32 (or MasterWeights){self._where()}"
                )
        gradients = [_dense(gradient) for gradient in _local_gradients(parameters)]
        found = self._divide(gradients)
        if self._group is not None:
            # One decision for the group. A rank without gradients must take part in the collective.
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        overflowed, any_gradient = found.tolist()
        if not any_gradient:
            raise RuntimeError(
                f"GradScaler.unscale_: no parameter of the optimizer has a gradient{self._where()}"
            )
        self._found_inf[id(optimizer)] = bool(overflowed)
        self._stages[id(optimizer)] = Stage.UNSCALED

    def _divide(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Divide in place. Returns two numbers, each 1 or 0: an element was not finite; there was
        a gradient."""
        device = gradients[0].device if gradients else self._any_device()
        found = torch.zeros((), device=device)
        # The reciprocal is computed in fp64 and rounded to fp32, as in torch.
        inverse = self._scale.double().reciprocal().float().item()
        for alike in by_dtype_and_device(g for g in gradients if g.numel()):
            extremes = _extremes(alike)
            bad = torch.logical_not(torch.isfinite(extremes).all())
            found = torch.maximum(found, bad.to(found))
            torch._foreach_mul_(alike, inverse)
        return torch.stack([found, torch.full_like(found, bool(gradients))])

    def _any_device(self) -> torch.device:
        """The device for the group's collectives on a rank without gradients."""
        if self._group is not None and dist.get_backend(self._group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    # --- 3. step ------------------------------------------------------------------------------

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()`, unless a gradient was not finite. Unscales first if necessary.

        Raises:
            RuntimeError: called twice, or with a closure.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or args:
            raise RuntimeError("GradScaler.step: a closure would need a scale per evaluation")
        if self._stages.get(id(optimizer)) is Stage.STEPPED:
            raise RuntimeError(
                f"GradScaler.step: called twice for this optimizer since the last update()"
                f"{self._where()}"
            )
        if self._stages.get(id(optimizer), Stage.READY) is Stage.READY:
            self.unscale_(optimizer)
        self._stages[id(optimizer)] = Stage.STEPPED
        if not self._found_inf[id(optimizer)]:
            return optimizer.step(**kwargs)
        if hasattr(optimizer, "drop_gradients"):
            optimizer.drop_gradients()
        return None

    # --- 4. update ----------------------------------------------------------------------------

    def update(self, new_scale: float | None = None) -> None:
        """Decrease the scale if any optimiser had an overflow, increase it after enough good steps.

        Args:
            new_scale: set the scale to this value instead.

        Raises:
            RuntimeError: no `step` or `unscale_` since the last update, and no new_scale.
            MinidistError: an overflow at the smallest scale.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._set_scale(new_scale)
        elif not self._found_inf:
            raise RuntimeError(
                f"GradScaler.update: no step() or unscale_() since the last update{self._where()}"
            )
        elif any(self._found_inf.values()):
            self._back_off()
        else:
            self._num_overflows = 0
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                grown = self.get_scale() * self._growth_factor
                if grown <= torch.finfo(torch.float32).max:
                    self._set_scale(grown)
                self._growth_tracker = 0
        self._stages.clear()
        self._found_inf.clear()

    def _back_off(self) -> None:
        self._growth_tracker = 0
        self._num_overflows += 1
        lower = self.get_scale() * self._backoff_factor
        if lower >= self._min_scale:
            self._set_scale(lower)
            return
        self._stages.clear()
        self._found_inf.clear()
        raise MinidistError(
            f"GradScaler.update: gradients were inf or nan in {self._num_overflows} steps in a "
            f"row, down to a scale of {self.get_scale():g} (smallest {self._min_scale:g}); no "
            "scale helps: look for inf or nan in the inputs, the parameters and the loss (a mean "
            "over nothing?), e.g. with torch.autograd.set_detect_anomaly(True)",
            rank=dist.get_rank() if dist.is_initialized() else None,
        )

    # --- what it knows ------------------------------------------------------------------------

    def get_scale(self) -> float:
        """The scale, 1.0 if disabled."""
        return self._scale.item() if self._enabled else 1.0

    def is_enabled(self) -> bool:
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, after `update`. The keys are those of torch's GradScaler."""
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of this class or of torch's GradScaler.

        Raises:
            RuntimeError: the state is empty, which means that it comes from a disabled scaler.
        """
        if not self._enabled:
            return
        if not state:
            raise RuntimeError("GradScaler.load_state_dict: the state of a disabled scaler")
        self._set_scale(state["scale"])
        self._growth_factor = state["growth_factor"]
        self._backoff_factor = state["backoff_factor"]
        self._growth_interval = state["growth_interval"]
        self._growth_tracker = state["_growth_tracker"]

    def _set_scale(self, scale: float) -> None:
        if not 0 < scale < math.inf:
            raise ValueError(
                f"GradScaler: the scale must be above 0 and finite, got {scale}{self._where()}"
            )
        self._scale = torch.tensor(scale, dtype=torch.float32)

    def _where(self) -> str:
        return f" (rank {dist.get_rank()})" if dist.is_initialized() else ""


def shards_gradients(optimizer: Any) -> bool:
    """Whether ranks hold different gradients of this optimiser, and so must decide together."""
    given = getattr(optimizer, "shards_gradients", None)
    return shard_group(held_parameters(optimizer)) is not None if given is None else given


def held_parameters(optimizer: Any) -> list[torch.Tensor]:
    """The tensors whose `.grad` the optimiser's step will use."""
    if hasattr(optimizer, "held_parameters"):
        return optimizer.held_parameters()
    return [p for group in optimizer.param_groups for p in group["params"]]


def _local_gradients(parameters: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    """The gradients of the parameters; for sharded gradients (DTensor) this rank's part."""
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None:
            yield gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient's elements as a dense real tensor that shares its memory: the values of a sparse
    gradient, real and imaginary parts of a complex one."""
    gradient = gradient._values() if gradient.layout == torch.sparse_coo else gradient
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _extremes(alike: list[torch.Tensor]) -> torch.Tensor:
    """A few numbers; at least one is inf or NaN if any element is. A sum could overflow instead."""
    if alike[0].is_cuda:  # one kernel for many gradients; on the CPU this norm is slow
        return torch.stack(own_norms(alike, math.inf))
    return torch.stack([extreme for gradient in alike for extreme in torch.aminmax(gradient)])
