"""Local SGD: each rank trains alone for some steps, then the ranks average their parameters.

Data parallelism averages gradients at every step. Local SGD takes H steps without communication and
then averages parameters: H times fewer bytes, and H times fewer waits for the slowest rank.

    step        0     1     2     3     4     5     6     7
    gradients   mean  mean                                     start_step = 2: like DDP at first
    parameters              .     .     mean  .     .     mean  period = 3: then local

Phases of a step:
1. Before `start_step`: average the gradients, because replicas diverge fastest early in training
   ("post-local SGD").
2. The optimiser's own step, on each rank.
3. From `start_step` on, every `period` steps: average the parameters.

Example::

    local = LocalSGD(model, optimizer, period=8, start_step=100)
    for x, y in loader:                      # a plain model, no DDP around it
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        local.step()                         # instead of optimizer.step()
    local.average()                          # before evaluating or saving: replicas differ
    print(local.saved_bytes)

**Period 1 is not DDP.** Averaging parameters after every step equals averaging gradients before the
step only if the step is linear in the gradients. An SGD step is linear, with momentum and weight
decay too: the mean of the ranks' momenta is the momentum of the mean gradient. Adam divides by the
root of a mean of squares. The mean of squares of the ranks' gradients is not the square of their
mean, so each rank divides by a different number. Clipping and skipped steps are not linear either.

With a period above 1 the algorithm differs from DDP for any optimiser, because the ranks compute
gradients at different parameters.

`DiLoCo` takes an optimiser step where local SGD takes the mean: a second, outer optimiser with
momentum uses the ranks' movement since the last meeting as its gradient.

Papers: Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767; post-local SGD:
Lin et al., arXiv 1808.07217; DiLoCo: Douillard et al., arXiv 2311.08105. `torch_local_sgd` below
uses torch's own implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidist.device import by_dtype_and_device
from minidist.errors import named_rank
from minidist.precision.clip import refuse_pieces
from minidist.unsupported import Unsupported

HOLDERS = Unsupported(
    "LocalSGD, DiLoCo",
    "optimisers that average gradients or hold the weights themselves (ShardedOptimizer, "
    "Zero2Optimizer, MasterWeights)",
    instead="use an optimiser of torch, over parameters in fp32 and with autocast",
)


@torch.no_grad()
def average_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> int:
    """Replace each tensor by its mean over the group, in place: one all-reduce per dtype.

    All ranks pass tensors of equal shapes in equal order. Tensors of less than 32 bits are averaged
    in fp32.

    Returns:
        Bytes that this rank sends in ring all-reduces, 2 (n-1)/n of the tensors.
    """
    n = dist.get_world_size(group)
    sent_bytes = 0
    for some in by_dtype_and_device(tensors):
        wide = torch.promote_types(some[0].dtype, torch.float32)
        flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in some])
        dist.all_reduce(flat, group=group)
        flat /= n
        for tensor, mean in zip(some, flat.split([t.numel() for t in some]), strict=True):
            tensor.copy_(mean.view(tensor.shape))
        sent_bytes += 2 * (n - 1) * flat.numel() * flat.element_size() // n
    return sent_bytes


class LocalSGD:
    """Takes the optimiser's steps, and averages the parameters every `period` steps.

    Replicas must start equal, so the constructor sends rank 0's parameters and buffers to all ranks
    (collective).

    Args:
        module: a plain module. A DDP or FSDP wrapper would also average gradients.
        optimizer: this rank's optimiser.
        period: steps between two averagings of parameters, H in the paper.
        start_step: number of steps with averaged gradients at the beginning.
        average_state: keys of the optimiser's per-parameter state to average with the parameters,
            e.g. ("momentum_buffer",) of SGD or ("exp_avg", "exp_avg_sq") of Adam. State that is not
            averaged still comes from the rank's own steps, although its parameters have moved.
        group: the ranks that share the work; None means all.

    Attributes:
        sent_bytes: bytes that this rank has sent.
        saved_bytes: bytes that averaging gradients at every step would have sent, minus
            `sent_bytes`.

    Raises:
        ValueError: `period` or `start_step` is out of range, or the module averages gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        period: int,
        *,
        start_step: int = 0,
        average_state: Sequence[str] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if period < 1 or start_step < 0:
            raise ValueError(
                "LocalSGD: period must be at least 1 and start_step at least 0, got "
                f"{period} and {start_step}"
            )
        # Every wrapper that averages gradients has a method to switch this off: torch's DDP, our
        # DDP, FSDP.
        if hasattr(module, "no_sync") or hasattr(module, "set_requires_gradient_sync"):
            raise ValueError(
                f"LocalSGD: needs the plain module, got {type(module).__name__}, which averages "
                "gradients in every backward"
            )
        refuse_pieces(module.parameters(), type(self).__name__)
        if hasattr(optimizer, "prepare_gradients"):
            raise HOLDERS.error(
                f"got {type(optimizer).__name__} on {named_rank(group)}", where=type(self).__name__
            )
        self.module = module
        self.optimizer = optimizer
        self.period = period
        self.start_step = start_step
        self.average_state = tuple(average_state)
        self.group = group
        self.num_steps = 0
        self.sent_bytes = 0
        self._gradient_bytes = 0
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)

    @property
    def saved_bytes(self) -> int:
        return self._gradient_bytes - self.sent_bytes

    @torch.no_grad()
    def step(self) -> None:
        """One step of the optimiser, and an averaging if it is due. All ranks must call it."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        n = dist.get_world_size(self.group)
        num_bytes = sum(p.numel() * p.element_size() for p in parameters)
        self._gradient_bytes += 2 * (n - 1) * num_bytes // n
        # 1. Like DDP at first. A parameter without a gradient on this rank may have a gradient on
        # a different rank.
        if self.num_steps < self.start_step:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [p.grad for p in parameters if p.grad is not None]
            self.sent_bytes += average_tensors(gradients, self.group)
        # 2. Each rank on its own.
        self.optimizer.step()
        self.num_steps += 1
        # 3. Average.
        local_steps = self.num_steps - self.start_step
        if local_steps > 0 and local_steps % self.period == 0:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Average parameters, floating-point buffers and the chosen optimiser state. Collective."""
        tensors: list[torch.Tensor] = [p.detach() for p in self.module.parameters()]
        tensors += [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                tensors += self._state_of(parameter)
        self.sent_bytes += average_tensors(tensors, self.group)

    def _state_of(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        state = self.optimizer.state.get(parameter, {})
        if state and not state.keys() >= set(self.average_state):
            raise ValueError(
                f"LocalSGD: average_state is {self.average_state}, but "
                f"{type(self.optimizer).__name__} keeps {sorted(state)}"
            )
        # A parameter that never had a gradient has no state: zeros take part instead, and the
        # result is not kept.
        values = [state.get(key) for key in self.average_state]
        return [torch.zeros_like(parameter) if value is None else value for value in values]

    def state_dict(self) -> dict[str, Any]:
        """The number of steps taken. Between averagings, model and optimiser differ by rank."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


class DiLoCo(LocalSGD):
    """Local SGD whose meeting is a step of an outer optimiser: SGD with Nesterov momentum.

    Phases of a meeting, every `period` steps:
    1. Outer gradient: the parameters at the last meeting minus those of now, averaged over ranks.
    2. The outer step, from the parameters at the last meeting. It is the same on all ranks.
    3. All ranks go on from the result. The inner optimiser (AdamW in the paper) keeps its state.

    With `outer_lr=1` and `outer_momentum=0` this is `LocalSGD`. A rank keeps two more numbers per
    parameter, in at least fp32: the parameters at the last meeting, and the momentum. Rounded to 16
    bits, small outer steps would be lost.

    Args:
        module, optimizer, group: as `LocalSGD`.
        period: inner steps between two meetings, H in the paper (500 there).
        outer_lr, outer_momentum: of the outer optimiser; the defaults are the paper's.

    Raises:
        ValueError: as `LocalSGD`, or the outer optimiser's numbers are out of range; at a step:
            the set of trainable parameters has changed.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        period: int,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not outer_lr > 0 or not 0 <= outer_momentum < 1:
            raise ValueError(
                "DiLoCo: outer_lr must be above 0 and outer_momentum in 0 ... 1 (exclusive), got "
                f"{outer_lr} and {outer_momentum}"
            )
        super().__init__(module, optimizer, period, group=group)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        wide = [torch.promote_types(p.dtype, torch.float32) for p in self._parameters]
        self._met_at = [
            p.detach().to(dtype, copy=True) for p, dtype in zip(self._parameters, wide, strict=True)
        ]
        self.outer = torch.optim.SGD(
            self._met_at, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
        )
        self._steps_apart = 0

    def step(self) -> None:
        """One inner step, and an outer one if it is due. All ranks must call it."""
        now = {id(p) for p in self.module.parameters() if p.requires_grad}
        if now != {id(p) for p in self._parameters}:
            raise ValueError(
                f"DiLoCo: {len(now)} parameters are trainable and {len(self._parameters)} were "
                f"when it was made on {named_rank(self.group)}; the others would never meet: make "
                "it after adding, freezing or unfreezing"
            )
        self._steps_apart += 1
        super().step()

    @torch.no_grad()
    def average(self) -> None:
        """The outer step. Collective. Without a step since the last one, it does nothing."""
        if self._steps_apart == 0:
            return
        for before, now in zip(self._met_at, self._parameters, strict=True):
            # Measured from where the inner steps began: rounded, if the parameters have 16 bits.
            before.grad = before.to(now.dtype).to(before.dtype) - now
        moved = [before.grad for before in self._met_at if before.grad is not None]
        buffers = [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]
        self.sent_bytes += average_tensors([*moved, *buffers], self.group)
        self.outer.step()
        for before, now in zip(self._met_at, self._parameters, strict=True):
            now.copy_(before)
            before.grad = None
        self._steps_apart = 0

    def state_dict(self) -> dict[str, Any]:
        """Steps, the parameters at the last meeting, and the outer optimiser's state."""
        return {
            **super().state_dict(),
            "steps_apart": self._steps_apart,
            "met_at": [before.clone() for before in self._met_at],
            "outer": self.outer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps_apart = state["steps_apart"]
        for before, saved in zip(self._met_at, state["met_at"], strict=True):
            before.copy_(saved)
        self.outer.load_state_dict(state["outer"])


def torch_local_sgd(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    period: int,
    *,
    start_step: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[DistributedDataParallel, Any]:
    """Local SGD with torch: DDP whose hook stops averaging gradients, and an averaging optimiser.

    The steps that average differ: torch averages right after the first local step and then every
    `period` steps; `LocalSGD` averages after every `period` local steps.

    Returns:
        (ddp, optimizer): train with these as usual.
    """
    # Imported here, because these imports take every rank a second.
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    ddp = DistributedDataParallel(module, process_group=group)
    world = dist.group.WORLD if group is None else group
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=world,
        subgroup=None,
        start_localSGD_iter=start_step,
        post_local_gradient_allreduce=False,  # True averages gradients within each node
    )
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period, warmup_steps=start_step, process_group=group)
    return ddp, PostLocalSGDOptimizer(optimizer, averager)
