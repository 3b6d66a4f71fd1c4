"""Naive model parallelism: the layers are spread over p devices, and one device works at a time.

There are two forms. `ModelParallel` is one process that owns all devices: it moves the activation
from device to device, and autograd moves the gradient back. `forward_backward` uses one process per
device, with every transfer written out. A pipeline with one micro-batch does the same.

    rank 0  F .  .  .  .  B
    rank 1  .  F .  .  B  .       utilisation 1/p, less what the transfers take
    rank 2  .  .  F B  .  .

Example: 12 layers of 10 ms on 3 ranks, with transfers of 5 ms. The forward pass takes
3 * 40 + 2 * 5 = 130 ms, backward here takes the same, and the ranks work 30.8 % of the time.

>>> from minidist.parallel.pipeline.schedule import naive
>>> from minidist.parallel.pipeline.simulate import StageTimes, simulate
>>> times = StageTimes(forward_s=0.040, backward_s=0.040, weight_s=0.0, p2p_s=0.005)
>>> timeline = simulate(naive(3), times)
>>> round(timeline.makespan_s, 3), round(1 - timeline.bubble_fraction, 3)
(0.26, 0.308)
>>> naive_utilisation(3)
0.3333333333333333
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.parallel.pipeline.p2p import TensorSpec
from minidist.parallel.pipeline.ties import find_ties, has_ties, summed
from minidist.unsupported import Unsupported

TIED = Unsupported(
    "ModelParallel",
    "weights that stages share",
    instead="use forward_backward or a PipelineExecutor, or untie the weights",
)


def naive_utilisation(num_ranks: int) -> float:
    """Share of the time in which a rank works, with equal stages and free transfers: 1/p."""
    if num_ranks < 1:
        raise ValueError(f"naive_utilisation: num_ranks must be at least 1, got {num_ranks}")
    return 1 / num_ranks


class ModelParallel(nn.Module):
    """A model whose stages live on different devices of this process.

    >>> stages = [nn.Linear(4, 8), nn.Linear(8, 2)]
    >>> model = ModelParallel(stages, ["cpu", "cpu"])  # or ["cuda:0", "cuda:1"]
    >>> model(torch.ones(3, 4)).shape
    torch.Size([3, 2])

    Args:
        stages: the stages in order, see `split_model`. They are moved to their devices.
        devices: one per stage.

    Raises:
        ValueError: not one device per stage, or stages that share a weight.
    """

    def __init__(self, stages: Sequence[nn.Module], devices: Sequence[torch.device | str]) -> None:
        super().__init__()
        if len(stages) != len(devices):
            raise ValueError(
                f"ModelParallel: one device per stage, got {len(devices)} devices for "
                f"{len(stages)} stages"
            )
        if any(has_ties(stage) for stage in stages):
            raise TIED.error("some are tied, and several devices cannot hold one weight together")
        self.devices = [torch.device(device) for device in devices]
        pairs = zip(stages, self.devices, strict=True)
        self.stages = nn.ModuleList(stage.to(device) for stage, device in pairs)

    def forward(self, x: Tensor) -> Tensor:
        """x may be on any device. The result is on the last stage's device; put targets there."""
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device))
        return x


def forward_backward(
    stage: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    *,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    input_spec: TensorSpec | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor | None:
    """One step over ranks with one stage each; gradients are added to `.grad`. Collective.

    Args:
        stage: on rank r, the r-th stage of the model.
        loss_fn: (output, target) -> scalar.
        inputs: needed on the first rank.
        targets: needed on the last rank.
        input_spec: needed on all ranks except the first: the spec of the previous rank's output.

    Returns:
        The loss on the last rank, detached; None on the other ranks.

    Raises:
        ValueError: an argument that this rank needs is missing.
    """
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    for name, value, needed in (
        ("inputs", inputs, rank == 0),
        ("input_spec", input_spec, rank > 0),
        ("targets", targets, rank == last),
    ):
        if needed and value is None:
            raise ValueError(f"forward_backward: rank {rank} needs {name}, got None")
    weight = next(stage.parameters(), None)
    device = torch.device("cpu") if weight is None else weight.device

    with summed(find_ties([stage], group), group):
        return _forward_backward(stage, loss_fn, inputs, targets, input_spec, group, device)


def _forward_backward(
    stage: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor | None,
    targets: Tensor | None,
    input_spec: TensorSpec | None,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor | None:
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    # 1. Receive the activation. It is the leaf at which this rank's graph begins, so it gets a
    # gradient.
    if rank == 0:
        assert inputs is not None
        x = inputs.to(device)
    else:
        assert input_spec is not None
        x = _move(dist.irecv, input_spec.empty(device), rank - 1, group).requires_grad_()
    # 2. Forward, then send the output.
    y = stage(x)
    if rank < last:
        _move(dist.isend, y.detach(), rank + 1, group)
        # 3. Receive the gradient of the output.
        gradient = _move(dist.irecv, torch.empty_like(y), rank + 1, group)
        torch.autograd.backward([y], [gradient])
    else:
        assert targets is not None
        y = loss_fn(y, targets.to(device))
        y.backward()
    # 4. Send the gradient of the input back.
    if rank > 0:
        _move(dist.isend, torch.zeros_like(x) if x.grad is None else x.grad, rank - 1, group)
    return y.detach() if rank == last else None


def _move(
    operation: Callable[..., object], tensor: Tensor, peer: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Send or receive, and wait. Only one message travels at a time, so this cannot deadlock."""
    # gloo has no send and recv for CUDA tensors, so these go through host memory.
    wire = torch.device("cpu") if dist.get_backend(group) == "gloo" else tensor.device
    carried = tensor.to(wire).contiguous()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(operation, carried, group=group, group_peer=peer)]
    ):
        work.wait()
    return carried.to(tensor.device)
