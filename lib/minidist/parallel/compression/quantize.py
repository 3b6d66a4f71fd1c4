"""Fewer bits per element: fp16, bf16, int8.

Example::

    Cast(torch.bfloat16).reduce(flat_N)        # 2 bytes per element instead of 4
    Int8(per_channel=True).reduce(flat_N, segments_of(parameters))

int8 needs a step size. All ranks use the same step, max |x| / 127 over all ranks, which they agree
on with a small MAX all-reduce. There is one step per parameter, or one per row of a parameter (an
output channel). With one step per row, a row with small gradients has a fine step, even if a
different row has large gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from minidist.parallel.compression.compressor import Compressor, Exchange, Segment, chunk_size
from minidist.parallel.compression.exchange import Exact, two_phase_mean

_LEVELS = 127


class Cast(Compressor):
    """Gradients travel as `dtype`, and are added in fp32.

    fp16 ends at 65504 and bf16 keeps 8 bits, so fp16 loses range and bf16 loses precision. For
    fp16, the values are divided before they travel and multiplied afterwards. This is a trade-off:
    with a division by n, the largest possible value is n times larger, but values also underflow
    (below 6e-8, fp16's smallest number) when they are n times larger. A gradient that still
    overflows gives inf on every rank.

    Args:
        dtype: torch.float16, torch.bfloat16, or torch.float32 for no compression.
        predivide: divisor of fp16 values on the wire; None means the group's size, which also keeps
            sums in range (as in the fp16 hook of torch's DDP). Not used for other dtypes.
        error_feedback: see `Compressor`; seldom needed with 16 bits.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        predivide: float | None = None,
        error_feedback: bool = False,
    ) -> None:
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"Cast: dtype must be float32, float16 or bfloat16, got {dtype}")
        if predivide is not None and not 0 < predivide < float("inf"):
            raise ValueError(f"Cast: predivide must be a positive number, got {predivide}")
        super().__init__(error_feedback=error_feedback)
        self.dtype = dtype
        self.predivide = predivide

    def _exchange(self, values: torch.Tensor, segments: list[Segment], group: Any) -> Exchange:
        if self.dtype == torch.float32:
            codec = Exact() if values.dtype == torch.float32 else _CastCodec(self, 1.0, values)
        else:
            divisor = self.predivide or float(group.size())
            codec = _CastCodec(self, divisor if self.dtype == torch.float16 else 1.0, values)
        return (yield from two_phase_mean(values, codec, group, self.traffic))


class _CastCodec:
    def __init__(self, cast: Cast, divisor: float, like: torch.Tensor) -> None:
        self.wire_dtype, self.divisor, self.dtype = cast.dtype, divisor, like.dtype

    def encode(self, values: torch.Tensor, part: slice) -> torch.Tensor:
        return (values / self.divisor).to(self.wire_dtype)

    def decode(self, wire: torch.Tensor, part: slice) -> torch.Tensor:
        return wire.to(self.dtype) * self.divisor


class Int8(Compressor):
    """Gradients travel as whole multiples of a step, from -127 to 127.

    Args:
        per_channel: one step per row of each parameter of two or more dimensions, instead of one
            per parameter. Costs 4 bytes per row.
        error_feedback: see `Compressor`.
    """

    def __init__(self, *, per_channel: bool = False, error_feedback: bool = True) -> None:
        super().__init__(error_feedback=error_feedback)
        self.per_channel = per_channel

    def _exchange(self, values: torch.Tensor, segments: list[Segment], group: Any) -> Exchange:
        n = group.size()
        # Largest magnitude per channel, then over the ranks. NaN is replaced by inf because a MAX
        # may lose a NaN; an inf makes the step inf, and all values of the channel NaN.
        channels = self._channels(values, segments)
        largest = torch.stack([channel.abs().amax() for channel in channels])
        largest = largest.nan_to_num(nan=float("inf"), posinf=float("inf")).float()
        self.traffic.sent_bytes += 2 * (n - 1) * chunk_size(largest.numel(), n) * 4
        yield dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True)
        # One step per element, with zeros where the exchange pads.
        sizes = torch.tensor([channel.numel() for channel in channels], device=values.device)
        steps = values.new_zeros(chunk_size(values.numel(), n) * n)
        steps[: values.numel()] = (largest / _LEVELS).to(values.dtype).repeat_interleave(sizes)
        return (yield from two_phase_mean(values, _Int8Codec(steps), group, self.traffic))

    def _channels(self, values: torch.Tensor, segments: list[Segment]) -> list[torch.Tensor]:
        channels: list[torch.Tensor] = []
        parts = values.split([segment.numel for segment in segments])
        for segment, part in zip(segments, parts, strict=True):
            if part.numel() == 0:
                continue
            rows = segment.shape[0] if self.per_channel and len(segment.shape) > 1 else 1
            channels += part.view(rows, -1)
        return channels


class _Int8Codec:
    def __init__(self, steps: torch.Tensor) -> None:
        self.steps = steps

    def encode(self, values: torch.Tensor, part: slice) -> torch.Tensor:
        # 0/0 (a channel of zeros) and inf/inf (a value that is not finite) travel as 0.
        levels = (values / self.steps[part]).nan_to_num(0.0)
        return levels.round().clamp(-_LEVELS, _LEVELS).to(torch.int8)

    def decode(self, wire: torch.Tensor, part: slice) -> torch.Tensor:
        return wire.to(self.steps.dtype) * self.steps[part]
