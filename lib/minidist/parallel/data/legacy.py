"""DataParallel, the older method: one process, one thread per device, all data through device 0.

What a step of `torch.nn.DataParallel` does, and what crosses a link:

    1. scatter     the batch is cut; devices 1..n-1 get their parts from device 0
    2. replicate   **in every forward**, parameters and buffers are copied from device 0 to the
                   others
    3. apply       one thread per device runs its replica; the threads share one interpreter
    4. gather      outputs go to device 0, where the loss is computed over the whole batch
    5. backward    only runs through 4, 3, 2 in reverse: device 0 sends each device the
                   gradient of its outputs (reverse of gather); each device differentiates its
                   replica; the replicas' parameter gradients are **added up on device 0** (reverse
                   of replicate). Only the parameters on device 0 have a `.grad`.
    6. step        the optimizer changes the parameters of device 0 only. Nothing is broadcast after
                   it: the next forward's replicate does that.

So no device averages gradients, because the loss already is a mean over the whole batch. With P
bytes of parameters, device 0 sends (n-1) P and receives (n-1) P per step. In DDP's ring all-reduce
each rank sends and receives 2 (n-1)/n P, less than 2 P for any n.

>>> layer = nn.Linear(3, 2)                                     # 8 parameters of 4 bytes
>>> parallel = DataParallel(layer, devices=["cpu"] * 4)
>>> parallel(torch.ones(8, 3)).sum().backward()
>>> parallel.traffic.bytes["replicate"], parallel.traffic.bytes["add gradients"]
(96, 96)

The same device may be named several times. Copies are then made as between different devices, so
the traffic can be counted on a machine without GPUs. (`torch.nn.DataParallel` on a CPU just calls
the module.) Use DDP for real work.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Traffic:
    """Bytes that travelled between device 0 and the other devices, by reason.

    Out of device 0: scatter, replicate, output gradients. Into device 0: gather, add gradients,
    input gradients (only if the batch itself requires a gradient).
    """

    bytes: dict[str, int] = field(default_factory=dict)

    def count(self, reason: str, tensor: Tensor) -> None:
        self.bytes[reason] = self.bytes.get(reason, 0) + tensor.numel() * tensor.element_size()

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    def reset(self) -> None:
        self.bytes.clear()


class DataParallel(nn.Module):
    """Run a module on several devices of this process, each on a part of the batch.

    Buffers that replica 0 writes (BatchNorm's statistics) persist; those of other replicas are
    lost, as in torch. Replicas have no `parameters()`: their weights are results of replicate, not
    leaves.

    Args:
        module: its parameters are on `devices[0]`, and stay there.
        devices: where to run; the first device collects the outputs. Threads on the same "cpu"
            share one random number generator, so dropout there is not reproducible.

    Raises:
        ValueError: no device is given, or a parameter or buffer is not on the first device.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device | str]) -> None:
        super().__init__()
        if not devices:
            raise ValueError("DataParallel: needs at least one device, got none")
        self.devices = [torch.device(device) for device in devices]
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if tensor.device != self.devices[0]:
                raise ValueError(
                    f"DataParallel: {name} must be on {self.devices[0]}, the first of the devices, "
                    f"got {tensor.device}"
                )
        self.module = module
        self.traffic = Traffic()

    def forward(self, x: Tensor) -> Tensor:
        """The module's output for the batch `x` (first dimension: samples), on device 0.

        Raises:
            ValueError: an empty batch.
        """
        if len(x) == 0:
            raise ValueError("DataParallel: the batch has no samples")
        # Scatter: if the batch has fewer samples than devices, some devices have no work.
        sizes = [len(part) for part in x.chunk(len(self.devices))]
        devices = self.devices[: len(sizes)]
        parts = _Scatter.apply(x, sizes, devices, self.traffic)
        # Replicate.
        replicas = replicate(self.module, devices, self.traffic)
        # Apply.
        outputs = parallel_apply(replicas, parts, devices)
        # Gather.
        return _Gather.apply(devices, self.traffic, *outputs)  # type: ignore[return-value]


def replicate(
    module: nn.Module, devices: Sequence[torch.device], traffic: Traffic
) -> list[nn.Module]:
    """One replica of the module per device. All gradients flow back to `module`'s parameters."""
    parameters = list(module.parameters())
    copies = _Broadcast.apply(devices, traffic, *parameters)
    replicas: list[nn.Module] = []
    for i, device in enumerate(devices):
        mine = copies[i * len(parameters) : (i + 1) * len(parameters)]
        tensors = dict(zip(map(id, parameters), mine, strict=True))
        for buffer in module.buffers():
            # Replica 0 uses the original buffers, so that its changes persist.
            tensors[id(buffer)] = buffer if i == 0 else _move(buffer, device, traffic, "replicate")
        replicas.append(_clone(module, tensors, {}))
    return replicas


def _clone(module: nn.Module, tensors: dict[int, Tensor], done: dict[int, nn.Module]) -> nn.Module:
    """A copy of the module's tree with different tensors; everything else is shared."""
    if id(module) in done:
        return done[id(module)]
    copy = module.__new__(type(module))
    done[id(module)] = copy
    copy.__dict__ = dict(module.__dict__)
    # A replica's weights are results of an operation, so nn.Module does not accept them as
    # parameters. Forward also works with plain attributes.
    copy.__dict__["_parameters"] = {}
    for name, parameter in module._parameters.items():
        copy.__dict__[name] = None if parameter is None else tensors[id(parameter)]
    copy.__dict__["_buffers"] = {
        name: None if buffer is None else tensors[id(buffer)]
        for name, buffer in module._buffers.items()
    }
    copy.__dict__["_modules"] = {
        name: None if child is None else _clone(child, tensors, done)
        for name, child in module._modules.items()
    }
    return copy


def parallel_apply(
    replicas: Sequence[nn.Module], inputs: Sequence[Tensor], devices: Sequence[torch.device]
) -> list[Tensor]:
    """Call each replica on its input in its own thread; raises the first failed replica's error."""
    results: list[Tensor | BaseException | None] = [None] * len(replicas)
    # Grad mode and autocast are per thread, so new threads must set them.
    grad_enabled = torch.is_grad_enabled()
    kind = devices[0].type
    autocast, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def work(i: int) -> None:
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(grad_enabled))
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=autocast))
                if devices[i].type == "cuda":
                    stack.enter_context(torch.cuda.device(devices[i]))
                results[i] = replicas[i](inputs[i])
        except BaseException as error:
            error.add_note(f"in replica {i} of {len(replicas)}, on {devices[i]}")
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs: list[Tensor] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert result is not None
        outputs.append(result)
    return outputs


def _move(tensor: Tensor, device: torch.device, traffic: Traffic, reason: str) -> Tensor:
    """A copy on `device`, counted; also if source and target are the same device."""
    traffic.count(reason, tensor)
    return tensor.detach().to(device, copy=True)


class _Scatter(torch.autograd.Function):
    """Sends parts of the batch to the devices; backward: their gradients back to device 0."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sizes: list[int],
        devices: Sequence[torch.device],
        traffic: Traffic,
    ) -> tuple[Tensor, ...]:
        ctx.devices, ctx.traffic = devices, traffic
        parts = x.split(sizes)
        moved = (
            _move(part, device, traffic, "scatter")
            for part, device in zip(parts[1:], devices[1:], strict=True)
        )
        return (parts[0].clone(), *moved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        home = ctx.devices[0]
        moved = [_move(grad, home, ctx.traffic, "input gradients") for grad in grads[1:]]
        return torch.cat([grads[0], *moved]), None, None, None


class _Broadcast(torch.autograd.Function):
    """Copies parameters to all devices, one by one; backward: sums their gradients on device 0."""

    @staticmethod
    def forward(
        ctx: Any, devices: Sequence[torch.device], traffic: Traffic, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.devices, ctx.traffic = devices, traffic
        num = len(parameters)
        copies = [p.detach().view_as(p) for p in parameters]  # device 0 needs no copy
        for device in devices[1:]:
            copies += [_move(p, device, traffic, "replicate") for p in parameters]
        frozen = [i for i, copy in enumerate(copies) if not ctx.needs_input_grad[2 + i % num]]
        ctx.mark_non_differentiable(*(copies[i] for i in frozen))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        num = len(grads) // len(ctx.devices)
        totals: list[Tensor | None] = []
        for p in range(num):
            if not ctx.needs_input_grad[2 + p]:
                totals.append(None)
                continue
            total = grads[p].clone()
            for grad in grads[p + num :: num]:
                total += _move(grad, ctx.devices[0], ctx.traffic, "add gradients")
            totals.append(total)
        return None, None, *totals


class _Gather(torch.autograd.Function):
    """Copies outputs to device 0; backward: parts of the gradient go back to their devices."""

    @staticmethod
    def forward(
        ctx: Any, devices: Sequence[torch.device], traffic: Traffic, *outputs: Tensor
    ) -> Tensor:
        ctx.devices, ctx.traffic = devices, traffic
        ctx.sizes = [len(output) for output in outputs]
        moved = [_move(output, devices[0], traffic, "gather") for output in outputs[1:]]
        return torch.cat([outputs[0], *moved])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts = grads[0].split(ctx.sizes)
        moved = (
            _move(part, device, ctx.traffic, "output gradients")
            for part, device in zip(parts[1:], ctx.devices[1:], strict=True)
        )
        return None, None, parts[0], *moved
