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

With fp16 and a scaler, `scaler.step(optimizer)` divides the masters' gradients. Bytes per
parameter: 2 + 2 for the gradient + 4 for the master + 8 for Adam's states = 16, and 2 more during a
step, because the gradient is fp32 during the step. Micikevicius et al., arXiv 1710.03740.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class MasterWeights:
    """An optimiser over fp32 copies of parameters.

    The class has the optimizer methods that a training loop and `GradScaler` call. Pass
    `.optimizer` to a scheduler. To clip, call `prepare_gradients` and clip `.masters`.

    Args:
        parameters: of any floating-point dtype. fp32 parameters are copied as well; parameters
            without `requires_grad` are ignored.
        make_optimizer: called with the list of masters.

    Raises:
        ValueError: no trainable parameter, or a parameter has no floating-point dtype.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters or not all(p.is_floating_point() for p in self.parameters):
            raise ValueError(
                "MasterWeights: needs trainable floating-point parameters, got dtypes "
                f"{sorted({str(p.dtype) for p in self.parameters})}"
            )
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        self.optimizer = make_optimizer(self.masters)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimiser over the masters."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def prepare_gradients(self) -> None:
        """Move the gradients to the masters; add to gradients that a master already has.

        `step` calls this method. To accumulate in fp32, call it after the backward of each
        micro-batch; `zero_grad` removes the sum.
        """
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to(torch.float32, copy=True)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters and round them into the parameters."""
        self.prepare_gradients()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)

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
