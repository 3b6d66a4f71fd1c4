"""Data parallelism, step 3 of 4: one all-reduce per parameter, while backward still runs.

Backward computes gradients from the last layer to the first. As soon as a gradient is complete, its
all-reduce starts: the network works while the processor computes the gradients of earlier layers.
Each parameter is one message, so a model with many small parameters pays many latencies; buckets
(step 4) solve this.

Phases: a hook marks a gradient as arrived; arrived gradients are launched in **one fixed order**;
`finish` fills in missing gradients, waits and divides.

The fixed order is necessary because the collectives of a group are matched by the order of their
calls. Ranks whose models take different branches complete gradients in different orders, and would
add gradients of different parameters.

Example::

    ddp = OverlappedDDP(model)
    loss_fn(ddp(x), y).backward()     # all-reduces start in here
    ddp.finish()                      # and are complete here
    optimizer.step()

Background: Li et al., "PyTorch Distributed" (arXiv 2006.15704), section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.errors import MinidistError
from minidist.parallel.data.replicas import (
    broadcast_state,
    check_no_new_parameters,
    check_same_model,
    refuse_copy,
)


class OverlappedDDP(nn.Module):
    """Averages gradients over `group`, parameter by parameter, in `backward()` and `finish()`.

    Every rank must call `finish()` once after each backward. Frozen parameters do not take part; a
    parameter without a gradient counts as zero. For accumulation, `no_sync` and buffers see
    `BucketedDDP`.

    Raises:
        MismatchError: at wrapping, if the ranks hold different models.
        MinidistError: a second backward began before `finish()`.
        ValueError: in forward, if parameters were unfrozen or added after wrapping.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module = module
        self._group = group
        check_same_model(module, group)
        broadcast_state(module, group)
        # Backward runs through the layers from the last to the first: launch in that order.
        self._order = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self._arrived: set[nn.Parameter] = set()
        self._works: list[Any] = []
        for parameter in self._order:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            check_no_new_parameters(self.module, set(self._order), "OverlappedDDP")
        return self.module(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy(self)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter in self._arrived:
            # Its all-reduce may still use the memory that autograd has just added to.
            raise MinidistError(
                "OverlappedDDP: a second backward before finish() of the first",
                rank=dist.get_rank(),
            )
        self._arrived.add(parameter)
        self._launch()

    def _launch(self) -> None:
        """Start the all-reduce of every gradient that is next in the order and has arrived."""
        while len(self._works) < len(self._order):
            parameter = self._order[len(self._works)]
            if parameter not in self._arrived:
                return
            assert parameter.grad is not None
            work = dist.all_reduce(parameter.grad, group=self._group, async_op=True)
            self._works.append(work)

    @torch.no_grad()
    def finish(self) -> None:
        """Collective: afterwards, every gradient is the mean over ranks."""
        for parameter in self._order:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._arrived.update(self._order)
        self._launch()
        for parameter, work in zip(self._order, self._works, strict=True):
            work.wait()
            assert parameter.grad is not None
            parameter.grad.div_(dist.get_world_size(self._group))
        self._arrived.clear()
        self._works.clear()
