"""How a rank's compute is counted: layers that are charged for, or a roofline over every operation.

Grading: `Charged` multiplies a layer's activations and gradients by factors. Only the broker can
give out these factors, and it charges for each of them. Teaching: `RooflineDevice` counts what each
operation costs and reports it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from minidist.emulate.client import Client
from minidist.emulate.plan import ChargePlan, PlanChannel

__all__ = ["Channel", "ChargePlan", "Charged", "PlanChannel", "RooflineDevice"]


class Channel(Protocol):
    """Where factors come from: what `emulated_world` yields, or a `PlanChannel`."""

    def charge(self, layer: int, direction: str) -> float: ...


class _Charge(torch.autograd.Function):
    """y = f * x; backward: f * g * dy, where g is requested only after dy has arrived."""

    @staticmethod
    def forward(ctx: Any, channel: Channel, layer: int, *outputs: torch.Tensor) -> Any:
        ctx.channel, ctx.layer = channel, layer
        ctx.factor = channel.charge(layer, "forward")
        return tuple(ctx.factor * output for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        factor = ctx.factor * ctx.channel.charge(ctx.layer, "backward")
        return (None, None, *(None if grad is None else factor * grad for grad in grads))


class Charged(torch.nn.Module):
    """A layer that has to be paid for: `y = f * module(x)`.

    In backward the incoming gradient is multiplied by f and by a second factor g before it reaches
    the module, so none of its parameters' gradients can be known before the charge. Both factors
    come from `channel.charge(layer, direction)`.

    Args:
        module: takes anything; returns a tensor, or a tuple or list of tensors.
        layer: its number in the charge plan.
        channel: None means the emulated world that runs at the time of the call.
    """

    def __init__(self, module: torch.nn.Module, layer: int, channel: Channel | None = None) -> None:
        super().__init__()
        self.module = module
        self.layer = layer
        self.channel = channel

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        channel = self.channel
        if channel is None:
            from minidist.emulate.backend import current_client

            channel = current_client()
        output = self.module(*args, **kwargs)
        if isinstance(output, torch.Tensor):
            return _Charge.apply(channel, self.layer, output)[0]  # type: ignore[index]
        return type(output)(_Charge.apply(channel, self.layer, *output))  # type: ignore[arg-type]

    # A deep copy of a model (or a pickle) must not try to copy the connection.
    def __deepcopy__(self, memo: dict[int, Any]) -> Charged:
        import copy

        return Charged(copy.deepcopy(self.module, memo), self.layer, self.channel)


class RooflineDevice(TorchDispatchMode):
    """Reports flops and bytes of every operation in the block as compute of this rank.

    The rank reports its own cost: good for teaching, not for grading. Views and operations on
    DTensors or fake tensors cost nothing; the local operations of a DTensor have a cost.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation: over a second

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(base.__name__ == "DTensor" for t in types for base in t.__mro__):
            return NotImplemented  # torch calls again, with the local tensors
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", func)
        if func.is_view or packet in _FREE or _has_fake(out) or _has_fake(args):
            return out
        count = flop_registry.get(packet)
        flops = float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
        num_bytes = float(_bytes_of(args) + _bytes_of(out))
        if flops == 0.0:
            flops = float(_numel_of(out))
        if num_bytes:
            self._client.compute(str(packet).removeprefix("aten."), flops, num_bytes)
        return out


_FREE = {
    torch.ops.aten.detach,
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _has_fake(value: Any) -> bool:
    return any(isinstance(t, FakeTensor) or t.is_meta for t in _tensors(value))


def _bytes_of(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(value))


def _numel_of(value: Any) -> int:
    return sum(t.numel() for t in _tensors(value))
