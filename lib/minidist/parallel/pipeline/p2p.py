"""Messages between stages: agree on shapes and dtypes once, then send with batch_isend_irecv.

Phases: before the first step, agree on every stage's output (`infer_specs`, by one forward pass
with zeros). Then in each step, post each exchange of the program, wait for an input just before its
use, and wait for the sends at the end of the step.

Example::

    specs = infer_specs(schedule, rank, stages, TensorSpec.of(micro_batch), device, group)
    mailbox = Mailbox(schedule, rank, specs, device, group)
    mailbox.post(exchange, {message: tensor})   # returns at once
    x = mailbox.take(message)                   # waits for this one input
    mailbox.finish()                            # waits until everything is sent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.errors import MismatchError
from minidist.parallel.pipeline.program import Exchange, Message
from minidist.parallel.pipeline.schedule import Kind, Schedule


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor. Printed e.g. as float32 [2, 8, 16]."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device | str) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Mailbox:
    """Sends and receives of one rank. Posting returns at once; only `take` and `finish` wait.

    Args:
        specs: the spec of every stage's output.
        device: where the stages compute.
        group: rank i of the group is rank i of the schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        specs: Sequence[TensorSpec],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.schedule, self.rank, self.specs, self.group = schedule, rank, specs, group
        self.device = device
        # gloo has no send and recv for CUDA tensors, so these go through host memory.
        self.wire = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self._arriving: dict[Message, tuple[Tensor, list[Any]]] = {}
        self._leaving: list[tuple[Tensor, list[Any]]] = []

    def spec(self, message: Message) -> TensorSpec:
        """The spec of a message. A gradient has the shape and dtype of its activation."""
        activation = message.made_by if message.made_by.kind is Kind.FORWARD else message.used_by
        owner = message.source if message.made_by.kind is Kind.FORWARD else message.target
        return self.specs[self.schedule.stage(owner, activation.chunk)]

    def post(self, exchange: Exchange, outgoing: Mapping[Message, Tensor]) -> None:
        """Start all messages of an exchange. `outgoing` has the tensors that this rank sends."""
        operations, tensors = [], []
        for message in exchange.messages:
            sends = message.source == self.rank
            if sends:
                tensor = outgoing[message].detach().to(self.wire).contiguous()
            else:
                tensor = self.spec(message).empty(self.wire)
            operations.append(
                dist.P2POp(
                    dist.isend if sends else dist.irecv,
                    tensor,
                    group=self.group,
                    group_peer=message.target if sends else message.source,
                )
            )
            tensors.append(tensor)
        works = dist.batch_isend_irecv(operations)
        # gloo returns one handle per operation, and a second wait on the same handle hangs. NCCL
        # returns one handle for the whole batch, and several waits are allowed. Each tensor is kept
        # until it is sent.
        separate = len(works) == len(operations)
        for i, message in enumerate(exchange.messages):
            own = [works[i]] if separate else works
            if message.target == self.rank:
                self._arriving[message] = (tensors[i], own)
            else:
                self._leaving.append((tensors[i], own))

    def take(self, message: Message) -> Tensor:
        """Wait for a posted message and return its tensor, on the device of the stages."""
        tensor, works = self._arriving.pop(message)
        for work in works:
            work.wait()
        return tensor.to(self.device)

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for _, works in self._leaving:
            for work in works:
                work.wait()
        self._leaving.clear()


def infer_specs(
    schedule: Schedule,
    rank: int,
    stages: Sequence[nn.Module],
    first_input: TensorSpec | None,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[TensorSpec]:
    """Shape and dtype of every stage's output. Collective; one stage after the other.

    Args:
        stages: this rank's chunks.
        first_input: spec of one micro-batch's input; needed on rank 0.

    Raises:
        MismatchError: on every rank, if a stage cannot take the output of the previous stage.
    """
    specs: list[TensorSpec] = []
    for stage in range(schedule.num_stages):
        owner, chunk = schedule.place(stage)
        answer: list[Any] = [None]
        if rank == owner:
            spec = specs[-1] if stage else first_input
            try:
                if spec is None:
                    raise ValueError("no inputs were given to the rank of stage 0")
                answer = [_output_spec(stages[chunk], spec, device)]
            except Exception as error:
                before = f"the output of stage {stage - 1}" if stage else "the micro-batch"
                answer = [
                    f"stage {stage} cannot take {before}, {spec}: {type(error).__name__}: {error}"
                ]
        # Broadcast errors as well; otherwise the other ranks would wait for a shape for ever.
        dist.broadcast_object_list(
            answer, group=group, group_src=owner, device=_wire(device, group)
        )
        if isinstance(answer[0], str):
            raise MismatchError(answer[0], rank=owner)
        specs.append(answer[0])
    return specs


def compare_specs(specs: Sequence[TensorSpec], group: dist.ProcessGroup | None = None) -> None:
    """Raise MismatchError on all ranks unless all were given the same specs. Collective."""
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, list(map(str, specs)), group=group)
    for rank, row in enumerate(rows):
        if row != rows[0]:
            raise MismatchError(
                f"specs differ: expected {', '.join(rows[0])} as on rank 0, got {', '.join(row)}",
                rank=rank,
            )


def _output_spec(stage: nn.Module, spec: TensorSpec, device: torch.device) -> TensorSpec:
    """The spec of a stage's output for zeros. Buffers and random state are restored afterwards.

    This does not use the meta device, for two reasons: the meta device accepts a product of float32
    and float64, and it cannot communicate, as a tensor-parallel stage must.
    """
    buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    x = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        y = stage(x)
        for name, buffer in stage.named_buffers():
            buffer.copy_(buffers[name])
    if not isinstance(y, Tensor):
        raise TypeError(f"a stage has to return one tensor, got {type(y).__name__}")
    return TensorSpec.of(y)


def _wire(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    return device if dist.get_backend(group) == "nccl" else torch.device("cpu")
