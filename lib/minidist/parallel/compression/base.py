"""What every compressor shares: the residual, the checks, and the count of bytes.

A reduction is a generator that yields at each collective it has started. `Compressor.reduce` waits
at every yield; the DDP hook lets other buckets start theirs in between.

Phases of a reduction:
1. Correct: add this rank's residual to its gradient.
2. Exchange: the compressor's own collectives; out come the mean and what was sent of ours.
3. Remember: what was not sent is the new residual, unless the mean is not finite.

Error feedback: Karimireddy et al., arXiv 1901.09847.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minidist.errors import named_rank

# Yields a collective that has been started; is resumed when its result is there.
Exchange = Generator[Any, None, tuple[torch.Tensor, torch.Tensor]]


class Segment(NamedTuple):
    """One parameter's part of a flat gradient: whose it is, and its shape."""

    key: Hashable
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def segments_of(parameters: Iterable[torch.Tensor]) -> list[Segment]:
    """The segments of a flat tensor that holds these parameters' gradients in this order.

    The parameter itself is the key, so a residual follows its parameter when buckets change: DDP
    builds new buckets after its first step.
    """
    return [Segment(parameter, tuple(parameter.shape)) for parameter in parameters]


@dataclass
class Traffic:
    """Bytes that this rank has sent, and what fp32 ring all-reduces would have sent.

    Counted for bandwidth-optimal collectives: (n-1)/n of the tensor for an all-to-all, n-1 times
    the own part for an all-gather, 2 (n-1)/n of the tensor for an all-reduce.
    """

    sent_bytes: int = 0
    fp32_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than fp32; 1.0 while nothing was sent."""
        return self.fp32_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def reset(self) -> None:
        self.sent_bytes = self.fp32_bytes = 0


def chunk_size(numel: int, world_size: int) -> int:
    """Elements per rank when `numel` elements are cut into `world_size` equal parts."""
    return -(-numel // world_size)


class Compressor:
    """Base of all compressors; a subclass writes `_exchange`.

    One compressor serves any number of buckets and belongs to one group: its residuals are per
    parameter and per rank. All ranks make equal calls in equal order.

    Args:
        error_feedback: add what was lost in one step to the next one. Costs one fp32 tensor of
            the gradient's size.
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
                that only ever reduces one tensor: it is then one parameter of one dimension.
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
        """`reduce` in steps: yields each collective as a work to wait for, returns the mean."""
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
        # 1. Correct. Sums in less than fp32 would lose what the residual is there to keep.
        values = flat.detach().to(torch.promote_types(flat.dtype, torch.float32), copy=True)
        before = self._residual_of(values, segments) if self.error_feedback else None
        if before is not None:
            values += before
        # 2. Exchange.
        mean, sent = yield from self._exchange(values, segments, group)
        # 3. Remember. `where` and not `if`: an `if` would make a GPU's host wait.
        if before is not None:
            residual = torch.where(torch.isfinite(mean).all(), values - sent, before)
            parts = residual.split([segment.numel for segment in segments])
            for segment, part in zip(segments, parts, strict=True):
                self._residuals[segment.key] = part
        return mean.to(flat.dtype)

    def _exchange(self, values: torch.Tensor, segments: list[Segment], group: Any) -> Exchange:
        """Reduce `values` and return (mean, sent), both of its shape and dtype.

        `sent` is what the mean has received of this rank, so that over the ranks the mean of
        `sent` is the result.
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

        Residuals are in units of the gradients that were reduced. If those were scaled by 1024
        and the next ones are scaled by 512, the residuals need a factor of 0.5.
        """
        for residual in self._residuals.values():
            residual.mul_(factor)

    def state_dict(self, named: Iterable[tuple[str, Hashable]]) -> dict[str, dict[str, Any]]:
        """What this rank must save to go on bit for bit; differs from rank to rank.

        Args:
            named: pairs of a name and a segment's key, e.g. `model.named_parameters()`.
        """
        named = list(named)
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
        """Put back what `state_dict` returned.

        Raises:
            ValueError: the state has a name that `named` lacks, or is another compressor's.
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
