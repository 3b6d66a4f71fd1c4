"""What every compressor shares: the residual, the checks, and the count of bytes.

A reduction is a generator that yields each collective after starting it. `Compressor.reduce` waits
at every yield; the DDP hook meanwhile lets other buckets start their collectives.

Phases of a reduction:
1. Correct: add this rank's residual to its gradient.
2. Exchange: the compressor's own collectives return the mean, and the values this rank has sent.
3. Remember: the values not sent are the new residual, unless the mean is not finite.

Error feedback: Karimireddy et al., arXiv 1901.09847.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minidist.errors import named_rank

# Yields a collective that has been started, and is resumed when the collective's result is there.
Exchange = Generator[Any, None, tuple[torch.Tensor, torch.Tensor]]


class Segment(NamedTuple):
    """One parameter's part of a flat gradient: a key for the parameter, and its shape."""

    key: Hashable
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def segments_of(parameters: Iterable[torch.Tensor]) -> list[Segment]:
    """The segments of a flat tensor that holds these parameters' gradients in this order.

    The key is the parameter itself, so a residual stays with its parameter when buckets change: DDP
    builds new buckets after its first step.
    """
    return [Segment(parameter, tuple(parameter.shape)) for parameter in parameters]


@dataclass
class Traffic:
    """Bytes that this rank has sent, and what fp32 ring all-reduces would have sent.

    The counts assume bandwidth-optimal collectives: (n-1)/n of the tensor for an all-to-all, n-1
    times the rank's own part for an all-gather, 2 (n-1)/n of the tensor for an all-reduce.
    """

    sent_bytes: int = 0
    fp32_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than fp32; 1.0 if nothing has been sent yet."""
        return self.fp32_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def reset(self) -> None:
        self.sent_bytes = self.fp32_bytes = 0


def chunk_size(numel: int, world_size: int) -> int:
    """Elements per rank when `numel` elements are cut into `world_size` equal parts."""
    return -(-numel // world_size)


class Compressor:
    """Base of all compressors; a subclass implements `_exchange`.

    One compressor serves any number of buckets but belongs to one group, because its residuals are
    per parameter and per rank. All ranks must make the same calls in the same order.

    Args:
        error_feedback: add what was lost in one step to the gradient of the next step. Costs one
            fp32 tensor of the gradient's size.
    """

    def __init__(self, *, error_feedback: bool) -> None:
        self.error_feedback = error_feedback
        self.traffic = Traffic()
        self._residuals: dict[Hashable, torch.Tensor] = {}

    def reduce(
        self,
        flat: torch.Tensor,
        segments: Sequence[Segment] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        """The mean of `flat` over the group, through this compressor. Collective.

        Args:
            flat: gradient, 1-D, floating point, of equal length on all ranks. Not changed.
            segments: which parameters `flat` holds, see `segments_of`. None is for a compressor
                that always reduces the same tensor, which then counts as one 1-D parameter.
            group: the ranks to average over; None means all.

        Returns:
            A new tensor of the shape and dtype of `flat`, with the same bits on every rank.

        Raises:
            ValueError: `flat` is not a flat floating-point tensor, or the segments do not fit it.
        """
        steps = self.phases(flat, segments, group)
        while True:
            try:
                next(steps).wait()
            except StopIteration as end:
                return end.value

    def phases(
        self,
        flat: torch.Tensor,
        segments: Sequence[Segment] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Generator[Any, None, torch.Tensor]:
        """`reduce` in steps: yields each collective as a Work to wait for, and returns the mean."""
        segments = [Segment("flat", tuple(flat.shape))] if segments is None else list(segments)
        self._check(flat, segments)
        return self._phases(flat, segments, dist.group.WORLD if group is None else group)

    def _phases(
        self, flat: torch.Tensor, segments: list[Segment], group: Any
    ) -> Generator[Any, None, torch.Tensor]:
        if flat.numel() == 0:
            return flat.clone()
        n = group.size()
        self.traffic.fp32_bytes += 2 * (n - 1) * chunk_size(flat.numel(), n) * 4
        # 1. Correct. Sums in less than fp32 would lose the small values that the residual keeps.
        values = flat.detach().to(torch.promote_types(flat.dtype, torch.float32), copy=True)
        before = self._residual_of(values, segments) if self.error_feedback else None
        if before is not None:
            values += before
        # 2. Exchange.
        mean, sent = yield from self._exchange(values, segments, group)
        # 3. Remember. `where` instead of `if`, because an `if` would make the CPU wait for the GPU.
        if before is not None:
            residual = torch.where(torch.isfinite(mean).all(), values - sent, before)
            parts = residual.split([segment.numel for segment in segments])
            for segment, part in zip(segments, parts, strict=True):
                self._residuals[segment.key] = part
        return mean.to(flat.dtype)

    def _exchange(self, values: torch.Tensor, segments: list[Segment], group: Any) -> Exchange:
        """Reduce `values` and return (mean, sent), both with the shape and dtype of `values`.

        `sent` is this rank's contribution to the mean: the mean of `sent` over the ranks is `mean`.
        """
        raise NotImplementedError

    def _residual_of(self, values: torch.Tensor, segments: list[Segment]) -> torch.Tensor:
        parts = []
        for segment in segments:
            part = self._residuals.get(segment.key)
            if part is None:
                part = values.new_zeros(segment.numel)
            elif part.numel() != segment.numel:
                raise ValueError(
                    f"{type(self).__name__}: a residual of {part.numel()} elements is kept for a "
                    f"segment that now has {segment.numel} on {named_rank()}; several tensors need "
                    "segments with a key each (segments_of)"
                )
            parts.append(part.to(values.device, values.dtype))
        return torch.cat(parts)

    def _check(self, flat: torch.Tensor, segments: list[Segment]) -> None:
        name = type(self).__name__
        if flat.dim() != 1 or not flat.is_floating_point():
            raise ValueError(
                f"{name}.reduce: needs a 1-D floating-point tensor, got {flat.dtype} of shape "
                f"{tuple(flat.shape)} on {named_rank()}"
            )
        total = sum(segment.numel for segment in segments)
        if total != flat.numel():
            raise ValueError(
                f"{name}.reduce: the segments have {total} elements together, the tensor has "
                f"{flat.numel()} on {named_rank()}"
            )
        if len({segment.key for segment in segments}) != len(segments):
            raise ValueError(f"{name}.reduce: two segments have the same key on {named_rank()}")

    def rescale(self, factor: float) -> None:
        """Multiply every residual, e.g. by new/old when a loss scaler has changed its scale.

        Residuals have the scale of the gradients that were reduced. If these gradients were scaled
        by 1024 and the next gradients are scaled by 512, the residuals need a factor of 0.5.
        """
        for residual in self._residuals.values():
            residual.mul_(factor)

    def state_dict(self, named: Iterable[tuple[str, Hashable]]) -> dict[str, dict[str, Any]]:
        """What this rank must save to continue bit for bit; the content differs between ranks.

        Args:
            named: pairs of a name and a segment's key, e.g. `model.named_parameters()`.
        """
        named = list(named)
        kept = {key for values in self._tables().values() for key in values}
        if kept and not kept & {key for _, key in named}:
            warnings.warn(
                f"{type(self).__name__}.state_dict: it keeps something for {len(kept)} keys, and "
                f"none of them has a name here on {named_rank()}: pass the keys of the segments "
                '("flat" without segments), or what was not sent is lost',
                stacklevel=2,
            )
        return {
            table: {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, key in named
                if (value := values.get(key)) is not None
            }
            for table, values in self._tables().items()
        }

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Any]], named: Iterable[tuple[str, Hashable]]
    ) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: the state has a name that `named` lacks, or has the tables of a different
                kind of compressor.
        """
        keys = dict(named)
        tables = self._tables()
        unknown = {name for values in state.values() for name in values} - set(keys)
        if set(state) != set(tables) or unknown:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: expected the tables {sorted(tables)} of "
                f"{len(keys)} names, got {sorted(state)} with unknown names {sorted(unknown)}"
            )
        for table, values in state.items():
            tables[table].clear()
            for name, value in values.items():
                own = value.clone() if isinstance(value, torch.Tensor) else value
                tables[table][keys[name]] = own

    def _tables(self) -> dict[str, dict[Hashable, Any]]:
        return {"residuals": self._residuals}
