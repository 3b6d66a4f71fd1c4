"""Loss scaling from scratch: `torch.amp.GradScaler`, with one decision for all ranks.

fp16 has no number between 0 and 6e-8, so small gradients become zero. The loss is therefore
multiplied by a scale, which multiplies every gradient, and gradients are divided again, in fp32,
before the optimiser sees them. The scale is found by trying: too large a one makes some gradient
inf or NaN; that step is skipped and the scale halved.

    scale       65536   65536   32768   32768 ...  2000 good steps ...  65536
    overflow      no     YES      no      no
    step          yes   skipped   yes     yes

Phases of an iteration:
1. `scale(loss).backward()`
2. `unscale_(optimizer)`: divide the gradients, look for inf and NaN, and ask the other ranks.
   Needed before anything that looks at gradients, e.g. clipping; else `step` does it.
3. `step(optimizer)`: the optimiser's step, unless a gradient on any rank was not finite.
4. `update()`: grow or back off.

Example::

    scaler = GradScaler(group=group)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

With DDP all ranks hold the same gradients and come to the same decision by themselves. When
gradients are sharded, an overflow is seen by the rank that holds it: if only that one skips,
parameters and scales differ from then on. So the finding itself is reduced over the group, one
number per optimiser and step. torch's own: `torch.amp.GradScaler(device)`, and
`ShardedGradScaler` of `torch.distributed.fsdp` with a group.

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


class Stage(Enum):
    """Where an optimiser is between two calls of `update`."""

    READY = auto()  # gradients are scaled
    UNSCALED = auto()  # gradients are divided, and known to be finite or not
    STEPPED = auto()  # the step was taken or skipped


class GradScaler:
    """Multiplies the loss, divides the gradients, skips steps that overflowed.

    The arguments mean what they mean in torch. All ranks of the group make the same calls.

    Args:
        group: ranks that must decide alike: those that hold shards of the same gradients (for
            FSDP with tensor parallelism, all of both). None: this rank decides for itself, as
            torch's GradScaler does; enough for plain DDP.
        growth_interval: good steps in a row after which the scale grows.
        enabled: False makes every method a plain pass-through.

    Raises:
        ValueError: a factor is out of range.
        RuntimeError: calls in the wrong order.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        enabled: bool = True,
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
        # fp32 as in torch; on the CPU, where it is decided about.
        self._set_scale(init_scale)
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._growth_tracker = 0  # good steps since the scale changed
        self._enabled = enabled
        self._group = group
        self._stages: dict[int, Stage] = {}
        self._found_inf: dict[int, bool] = {}

    # --- 1. scale -----------------------------------------------------------------------------

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        # A number on the CPU may be multiplied by on any device, without a copy that waits.
        return loss * self._scale if self._enabled else loss

    # --- 2. unscale ---------------------------------------------------------------------------

    @torch.no_grad()
    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of this optimiser's parameters by the scale. Once per step.

        An optimiser that has to fetch its gradients first does so in `prepare_gradients()`, if it
        has that method (see `MasterWeights`). One that keeps them elsewhere than in `param_groups`
        says where in `held_parameters()`, and in `shards_gradients` whether ranks hold different
        ones (see `ShardedOptimizer`).

        Raises:
            RuntimeError: called twice, or after `step`; or no rank of the group has a gradient.
            ValueError: ranks hold different gradients and the scaler has no group; or a parameter
                is fp16. Dividing its gradient would make small elements zero again: it needs an
                fp32 master.
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
        if self._group is None and getattr(optimizer, "shards_gradients", False):
            raise ValueError(
                "GradScaler.unscale_: every rank holds other gradients, and all have to decide "
                f"alike: expected GradScaler(group=...), got no group{self._where()}"
            )
        if hasattr(optimizer, "prepare_gradients"):
            optimizer.prepare_gradients()
        parameters = _parameters(optimizer)
        # Parameters, not gradients: a rank without gradients must raise as well, and not wait.
        are_held = hasattr(optimizer, "held_parameters")
        for parameter in parameters:
            # A frozen one may have any dtype. (A shard is a view and never "requires" a gradient.)
            if parameter.dtype == torch.float16 and (are_held or parameter.requires_grad):
                raise ValueError(
                    "GradScaler.unscale_: got an fp16 parameter of shape "
                    f"{tuple(parameter.shape)}, expected fp32 (or MasterWeights){self._where()}"
                )
        gradients = list(_local_gradients(parameters))
        found = self._divide(gradients)
        if self._group is not None:
            # One decision. A rank without gradients takes part: the others wait for it.
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        overflowed, any_gradient = found.tolist()
        if not any_gradient:
            raise RuntimeError(
                f"GradScaler.unscale_: no parameter of the optimizer has a gradient{self._where()}"
            )
        self._found_inf[id(optimizer)] = bool(overflowed)
        self._stages[id(optimizer)] = Stage.UNSCALED

    def _divide(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Divide in place; two numbers: 1 if anything was not finite, 1 if there was anything."""
        device = gradients[0].device if gradients else self._any_device()
        found = torch.zeros((), device=device)
        # The reciprocal in fp64, then fp32, as torch takes it.
        inverse = self._scale.double().reciprocal().float().item()
        for alike in by_dtype_and_device(g for g in gradients if g.numel()):
            extremes = _extremes(alike)
            bad = torch.logical_not(torch.isfinite(extremes).all())
            found = torch.maximum(found, bad.to(found))
            torch._foreach_mul_(alike, inverse)
        return torch.stack([found, torch.full_like(found, bool(gradients))])

    def _any_device(self) -> torch.device:
        """Where a group's collectives take their tensors from on a rank without gradients."""
        if self._group is not None and dist.get_backend(self._group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    # --- 3. step ------------------------------------------------------------------------------

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()`, unless a gradient was not finite. Unscales first if need be.

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
        return None if self._found_inf[id(optimizer)] else optimizer.step(**kwargs)

    # --- 4. update ----------------------------------------------------------------------------

    def update(self, new_scale: float | None = None) -> None:
        """Back off if any optimiser met an overflow, grow after enough good steps.

        Args:
            new_scale: set it to this instead.

        Raises:
            RuntimeError: no gradients were looked at since the last update.
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
            self._set_scale(self.get_scale() * self._backoff_factor)
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                grown = self.get_scale() * self._growth_factor
                if grown <= torch.finfo(torch.float32).max:
                    self._set_scale(grown)
                self._growth_tracker = 0
        self._stages.clear()
        self._found_inf.clear()

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
        """Take the state of this class or of torch's GradScaler.

        Raises:
            RuntimeError: the state is empty, so it comes from a disabled scaler.
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
        self._scale = torch.tensor(scale, dtype=torch.float32)

    def _where(self) -> str:
        return f" (rank {dist.get_rank()})" if dist.is_initialized() else ""


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    """What has the gradients that the step will use, in its `.grad`."""
    if hasattr(optimizer, "held_parameters"):
        return optimizer.held_parameters()
    return [p for group in optimizer.param_groups for p in group["params"]]


def _local_gradients(parameters: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Their gradients; of sharded ones (DTensor) this rank's part."""
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None:
            yield gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _extremes(alike: list[torch.Tensor]) -> torch.Tensor:
    """Numbers of which one is inf or NaN where any element is, [some]: no sum, which overflows."""
    if alike[0].is_cuda:  # one kernel for many gradients; on the CPU this norm is slow
        return torch.stack(list(torch._foreach_norm(alike, math.inf)))
    return torch.stack([extreme for gradient in alike for extreme in torch.aminmax(gradient)])
