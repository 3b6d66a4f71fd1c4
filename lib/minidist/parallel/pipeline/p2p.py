"""What travels between stages: shapes and dtypes agreed once, then tensors by batch_isend_irecv.

Phases: agree on every stage's output before the first step (`infer_specs`, by one forward pass of
zeros); then per step post each exchange of the program, wait for an input just before it is used,
and for the sends at the end of the step.

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
    """Shape and dtype of a tensor. Printed as float32 [2, 8, 16]."""

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
        specs: of the output of every stage.
        device: where the stages compute.
        group: rank i of it is rank i of the schedule.
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
        # gloo has no send and recv for CUDA tensors: they go through the host.
        self.wire = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self._arriving: dict[Message, tuple[Tensor, list[Any]]] = {}
        self._leaving: list[tuple[Tensor, list[Any]]] = []

    def spec(self, message: Message) -> TensorSpec:
        """A gradient has the shape and dtype of the activation it belongs to."""
        activation = message.made_by if message.made_by.kind is Kind.FORWARD else message.used_by
        owner = message.source if message.made_by.kind is Kind.FORWARD else message.target
        return self.specs[self.schedule.stage(owner, activation.chunk)]

    def post(self, exchange: Exchange, outgoing: Mapping[Message, Tensor]) -> None:
        """Start all messages of an exchange. `outgoing` has the tensors of those that we send."""
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
        # gloo gives one handle per operation, and a second wait for the same one hangs; NCCL gives
        # one for the whole batch, which may be waited for again. A tensor lives until it has left.
        separate = len(works) == len(operations)
        for i, message in enumerate(exchange.messages):
            own = [works[i]] if separate else works
            if message.target == self.rank:
                self._arriving[message] = (tensors[i], own)
            else:
                self._leaving.append((tensors[i], own))

    def take(self, message: Message) -> Tensor:
        """Wait for a posted message and hand out its tensor, on the device of the stages."""
        tensor, works = self._arriving.pop(message)
        for work in works:
            work.wait()
        return tensor.to(self.device)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
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
    """Shape and dtype of every stage's output. Collective; stage after stage.

    Args:
        stages: this rank's chunks.
        first_input: of one micro-batch; needed on rank 0.

    Raises:
        MismatchError: on every rank, if a stage cannot take what the stage before it gives.
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
        # Errors travel as well: otherwise the other ranks would wait for a shape for ever.
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
    """What a stage makes of zeros. Its buffers and the random numbers are as they were after it.

    Not on the meta device: that takes a product of float32 and float64, and cannot communicate,
    as a stage that is tensor-parallel itself has to.
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
