"""Parameters in 16 bits, and an fp32 copy of them in the optimiser: master weights.

The model computes, stores and communicates in 16 bits. An update is often smaller than half the
spacing of the 16-bit numbers around the weight, and would be lost at every step: see
`update_survives`. So updates are added up in an fp32 copy, and the model gets its rounded value.

Phases of a step:
1. `prepare_gradients`: each parameter's gradient becomes its master's, in fp32.
2. The optimiser's step on the masters.
3. The masters are rounded into the parameters.

Example::

    model = GPT(config).to(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), lambda p: torch.optim.AdamW(p, lr=1e-3))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

With fp16 and a scaler, `scaler.step(optimizer)` divides the masters' gradients. Bytes per
parameter: 2 + 2 for the gradient + 4 for the master + 8 for Adam's states = 16, and 2 more during a
step, as the gradient is fp32 then. Micikevicius et al., arXiv 1710.03740.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class MasterWeights:
    """An optimiser over fp32 copies of parameters.

    It has the methods of an optimizer that a loop and `GradScaler` call. Schedulers take
    `.optimizer`; clipping takes `.masters`, after `prepare_gradients`.

    Args:
        parameters: of any floating-point dtype. fp32 ones are copied as well.
        make_optimizer: called with the list of masters.

    Raises:
        ValueError: no parameter, or one is not of a floating-point dtype.
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
        """Those of the optimiser over the masters."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def prepare_gradients(self) -> None:
        """Move the gradients to the masters, adding to what is there until `zero_grad`.

        `step` does it. Call it after the backward of each micro-batch to accumulate in fp32.
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
        """Forget the gradients of parameters and masters."""
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state and the masters: parameters alone would lose what was rounded."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": [master.detach().clone() for master in self.masters],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state, and set the parameters to the rounded masters.

        Raises:
            ValueError: it has masters of other shapes.
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
