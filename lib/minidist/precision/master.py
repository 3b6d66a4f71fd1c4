"""Parameters in 16 bits, and an fp32 copy of them in the optimiser: master weights.

The model computes, stores and communicates in 16 bits. An update is often smaller than half the
spacing of the 16-bit numbers around the weight, so a 16-bit weight would lose the update at every
step: see `update_survives`. Therefore an fp32 copy (the master) sums the updates, and the model
gets the rounded value of this copy.

Phases of a step:
1. `prepare_gradients`: move each parameter's gradient to its master, in fp32.
2. The optimiser updates the masters.
3. Round the masters into the parameters.

Example::

    model = GPT(config).to(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), lambda p: torch.optim.AdamW(p, lr=1e-3))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

With fp16 and a scaler, `scaler.step(optimizer)` divides the masters' gradients. A parameter that
was changed from outside since the last step (`load_state_dict`, a broadcast) keeps its new value:
its master follows. Bytes per
parameter: 2 + 2 for the gradient + 4 for the master + 8 for Adam's states = 16, and 2 more during a
step, because the gradient is fp32 during the step. Micikevicius et al., arXiv 1710.03740.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minidist.errors import named_rank
from minidist.precision.clip import clip_by_global_norm, copy_note, shard_group


class MasterWeights:
    """An optimiser over fp32 copies of parameters.

    The class has the optimizer methods that a training loop and `GradScaler` call. Pass
    `.optimizer` to a scheduler. To clip, call its `clip_grad_norm_`, because the gradients that
    the step uses are those of the masters.

    Args:
        parameters: of any floating-point dtype, or pairs of a name and a parameter. fp32 parameters
            are copied as well, fp64 ones have fp64 masters; parameters without `requires_grad` are
            ignored. They may be the pieces of a `Zero3` model.
        make_optimizer: called with the list of masters, one for each trainable parameter. It can
            make groups of them: `lambda p: AdamW([{"params": p[:9]}, {"params": p[9:], "lr": 0}])`.

    Raises:
        ValueError: no trainable parameter, the same one twice, groups, a parameter has no
            floating-point dtype, or the optimizer is a sharded one, which has masters of its own;
            at a step: parameters were unfrozen or moved to a different device after this call.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        parameters = _listed(parameters)
        self.parameters = [p for p in parameters if p.requires_grad]
        self._frozen = [p for p in parameters if not p.requires_grad]
        if not self.parameters or not all(p.is_floating_point() for p in self.parameters):
            raise ValueError(
                "MasterWeights: needs trainable floating-point parameters, got dtypes "
                f"{sorted({str(p.dtype) for p in self.parameters})}"
            )
        wide = [p.detach().to(_master_dtype(p), copy=True) for p in self.parameters]
        self.masters = [each.requires_grad_() for each in wide]
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            copy_note(parameter, master)
        self.optimizer = make_optimizer(self.masters)
        if hasattr(self.optimizer, "master_dtype"):
            raise ValueError(
                f"MasterWeights: {type(self.optimizer).__name__} keeps masters itself: pass it the "
                f"parameters and master_dtype=torch.float32 ({named_rank()})"
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimiser over the masters."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state of the optimiser over the masters."""
        return self.optimizer.state

    @torch.no_grad()
    def prepare_gradients(self) -> None:
        """Move the gradients to the masters; add to gradients that a master already has.

        `step` calls this method. To accumulate in fp32, call it after the backward of each
        micro-batch; `step` uses the sum up, and `zero_grad` removes it.
        """
        self._check()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to(master.dtype, copy=True)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def _check(self) -> None:
        unfrozen = [tuple(p.shape) for p in self._frozen if p.requires_grad]
        moved = [
            f"from {master.device} to {parameter.device}"
            for parameter, master in zip(self.parameters, self.masters, strict=True)
            if parameter.device != master.device
        ]
        if unfrozen or moved:
            raise ValueError(
                f"MasterWeights: since it was made, parameters of shapes {unfrozen} were unfrozen "
                f"and {len(moved)} moved ({', '.join(moved[:1])}) on {named_rank()}; make the "
                "optimizer after these changes"
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the masters' gradients so that their norm is at most `max_norm`.

        Collective if the parameters are pieces of a `Zero3` model. Returns the norm before scaling.
        """
        self.prepare_gradients()
        group = shard_group(self.masters)
        if group is not None:
            return clip_by_global_norm(self.masters, max_norm, norm_type, group)
        return nn.utils.clip_grad_norm_(self.masters, max_norm, norm_type)

    @torch.no_grad()
    def _follow_parameters(self) -> None:
        """Give a master the parameter's value where it does not round to that value."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            is_same = master.to(parameter.dtype) == parameter
            master.copy_(torch.where(is_same, master, parameter.to(master.dtype)))

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters and round them into the parameters."""
        self.prepare_gradients()
        self._follow_parameters()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Remove the masters' gradients: a step has used them, or they are not finite.

        A loop that calls `model.zero_grad()` does not reach them.
        """
        for master in self.masters:
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of parameters and masters."""
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state and the masters, because the parameters are only rounded copies."""
        self._follow_parameters()
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": [master.detach().clone() for master in self.masters],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, and set the parameters to the rounded masters.

        Raises:
            ValueError: the state has masters of different shapes.
        """
        expected = [tuple(master.shape) for master in self.masters]
        got = [tuple(master.shape) for master in state["masters"]]
        if expected != got:
            raise ValueError(
                f"MasterWeights.load_state_dict: expected masters of shapes {expected}, got {got}"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        for parameter, master, saved in zip(
            self.parameters, self.masters, state["masters"], strict=True
        ):
            master.copy_(saved)
            parameter.copy_(master)


def _listed(parameters: Iterable[Any]) -> list[Tensor]:
    """The parameters, each once; raises ValueError if they are something else."""
    listed = [each[1] if isinstance(each, tuple) else each for each in parameters]
    other = next((each for each in listed if not isinstance(each, Tensor)), None)
    if other is not None:
        raise ValueError(
            f"MasterWeights: expected parameters, got {type(other).__name__} on {named_rank()}; "
            "groups are made of the masters, in make_optimizer"
        )
    if len({id(each) for each in listed}) < len(listed):
        raise ValueError(
            f"MasterWeights: {len(listed)} parameters, of which only "
            f"{len({id(each) for each in listed})} are different ones, on {named_rank()}; give a "
            "shared parameter once"
        )
    return listed


def _master_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
