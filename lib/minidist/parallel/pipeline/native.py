"""The same stages with torch's own torch.distributed.pipelining.

    ours                 torch                           rule on micro-batches
    gpipe                ScheduleGPipe                   -
    one_f_one_b          Schedule1F1B                    m >= p
    interleaved          ScheduleInterleaved1F1B         m a multiple of max(1, m // p)
    (zb_h1, one chunk)   ScheduleInterleavedZeroBubble   the same; it is the paper's ZB-1P

Both take the mean over the targets of the batch. torch divides the gradients by m after the last
backward, so here each loss gets m times its share of the targets; our executor scales each loss. So
with torch, gradients must be zeroed before each step; with our executor they may accumulate.

Example::

    pipeline = NativePipeline(stages[rank], "1F1B", m, lm_loss)
    loss = pipeline.step(inputs, targets)   # on the last rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from minidist.parallel.pipeline.means import Count, check_mean, count_targets, zero_loss
from minidist.parallel.pipeline.ties import Tie, find_ties, summed

SINGLE = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}
MULTI = {
    "interleaved 1F1B": pipelining.ScheduleInterleaved1F1B,
    "zero bubble": pipelining.ScheduleInterleavedZeroBubble,
}


class NativePipeline:
    """torch's pipeline with the interface of `PipelineExecutor`.

    Args:
        stages: this rank's stage, or its chunks in order.
        schedule: one of "GPipe", "1F1B" (one stage per rank), "interleaved 1F1B", "zero bubble".
        num_micro_batches: m.
        loss_fn: (output, target) of a micro-batch -> mean over the micro-batch.
        count: see `PipelineExecutor`.
        group: the pipeline's ranks.

    Raises:
        ValueError: an unknown schedule, more chunks than the schedule allows, or m breaks torch's
            rule.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        schedule: str,
        num_micro_batches: int,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        *,
        count: Count = count_targets,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check_mean("NativePipeline", loss_fn, count)
        chunks = [stages] if isinstance(stages, nn.Module) else list(stages)
        if schedule not in SINGLE | MULTI:
            raise ValueError(
                f"NativePipeline: expected one of {[*SINGLE, *MULTI]}, got {schedule!r}"
            )
        if schedule in SINGLE and len(chunks) != 1:
            raise ValueError(
                f"NativePipeline: {schedule} takes one stage per rank, got {len(chunks)}"
            )
        self.rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.is_first, self.is_last = self.rank == 0, self.rank == num_ranks - 1
        made = [
            pipelining.PipelineStage(
                chunk,
                stage_index=i * num_ranks + self.rank,
                num_stages=len(chunks) * num_ranks,
                device=torch.device(device),
                group=group,
            )
            for i, chunk in enumerate(chunks)
        ]
        # torch has separate types for the two families: one stage, or a list of stages.
        kind: Any = (SINGLE | MULTI)[schedule]
        first: Any = made[0] if schedule in SINGLE else made
        self.schedule = kind(first, n_microbatches=num_micro_batches, loss_fn=self._loss)
        self.num_micro_batches, self.loss_fn, self.count = num_micro_batches, loss_fn, count
        self.chunks, self.group = chunks, group
        self._ties: list[Tie] | None = None
        self._total = 0.0

    def step(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Tensor | None:
        """One batch; gradients go to `.grad`. Returns the mean loss on the last rank, else None."""
        losses: list[Tensor] = []
        if self._ties is None:
            self._ties = find_ties(self.chunks, self.group)
        if self.is_last and targets is not None:
            self._total = float(self.count(targets))
        with summed(self._ties, self.group):
            self.schedule.step(
                *((inputs,) if self.is_first else ()),
                target=targets if self.is_last else None,
                losses=losses if self.is_last else None,
            )
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    def _loss(self, y: Tensor, targets: Tensor) -> Tensor:
        loss, number = self.loss_fn(y, targets), float(self.count(targets))
        if not number:
            return zero_loss(y)
        return loss * (number * self.num_micro_batches / self._total)
