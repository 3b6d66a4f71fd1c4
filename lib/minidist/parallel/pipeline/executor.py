"""Trains with any schedule: stages on the ranks of a group, activations sent between the ranks.

Phases of a step: cut the batch into micro-batches; walk this rank's program (`program.py`), a list
of actions and exchanges; sum the gradients of tied weights; wait until all messages are sent. The
sum in `.grad` is the gradient of the mean over the whole batch: each micro-batch's mean counts as
its share of the targets, 1/m if all micro-batches have equally many (`means.py`).

    F  take the input, run the stage, keep (input, output) until B, send the output on
    B  take the output's gradient, backward, send the input's gradient back
    W  the part of backward for which no rank waits (zero bubble, `backward.py`)

Example, on every rank of a group of p::

    stages = split_model(model, p)                                # the same model on every rank
    pipeline = PipelineExecutor(stages[rank], one_f_one_b(p, m), lm_loss)
    optimizer = torch.optim.AdamW(stages[rank].parameters())
    for inputs, targets in batches:                               # used on the first / last rank
        loss = pipeline.step(inputs, targets).loss                # a scalar on the last rank
        optimizer.step()
        optimizer.zero_grad()

Papers: arXiv 1811.06965 (GPipe), 2006.09503 (1F1B), 2104.04473 (interleaved), 2401.10241 (ZB).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.errors import MismatchError
from minidist.parallel.pipeline.backward import SplitBackward
from minidist.parallel.pipeline.means import (
    Count,
    check_mean,
    count_targets,
    shares,
    zero_loss,
)
from minidist.parallel.pipeline.p2p import Mailbox, TensorSpec, compare_specs, infer_specs
from minidist.parallel.pipeline.program import Exchange, Message, make_program
from minidist.parallel.pipeline.record import Run, StepResult, make_clock
from minidist.parallel.pipeline.schedule import Action, Kind, Schedule, forward_only
from minidist.parallel.pipeline.ties import Tie, find_ties, summed

LossFunction = Callable[[Tensor, Tensor], Tensor]


class PipelineExecutor:
    """Runs one schedule on the stages of this rank.

    Args:
        stages: this rank's stage, or its v chunks in order. Each takes and returns one tensor.
        schedule: a schedule of `schedule.py`, or your own.
        loss_fn: (output, target) of a micro-batch -> mean over the micro-batch, a scalar.
        count: targets of a micro-batch -> how many of them the mean of loss_fn counts, a number or
            a scalar tensor. By default all that are not -100; `lambda targets: 1` weighs all
            micro-batches alike.
        group: rank i of the group is rank i of the schedule; None means the default group. The
            group's timeout is the deadline of every wait.
        device: the device of the stages; by default that of their first parameter.
        specs: spec of every stage's output for one micro-batch, if known; the same on all ranks.
            By default the first step finds them by a forward pass with zeros.
        record: keep the times of all actions. On CUDA this synchronises the device in every step.

    Raises:
        ValueError: schedule, stages and group do not fit together; or the loss has an option by
            which its mean does not count as the default `count`.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        schedule: Schedule,
        loss_fn: LossFunction,
        *,
        count: Count = count_targets,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        specs: Sequence[TensorSpec] | None = None,
        record: bool = False,
    ) -> None:
        # Validate: without communication.
        check_mean(type(self).__name__, loss_fn, count)
        self.stages = [stages] if isinstance(stages, nn.Module) else list(stages)
        self.schedule, self.loss_fn, self.count = schedule, loss_fn, count
        self.group, self.record = group, record
        self.rank = dist.get_rank(group)
        self._validate(specs)

        # Derive: what this rank does, and when it sends and receives.
        self.program = make_program(schedule)[self.rank]
        weight = next((p for stage in self.stages for p in stage.parameters()), None)
        self.device = torch.device(device or ("cpu" if weight is None else weight.device))

        # Build.
        self.specs = None if specs is None else list(specs)
        self._input_spec: TensorSpec | None = None
        self._mailbox: Mailbox | None = None
        self._ties: list[Tie] = []
        self._evaluator: PipelineExecutor | None = None
        self._run = Run()

    @property
    def is_first(self) -> bool:
        """Whether this rank has stage 0, which needs the inputs."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which needs the targets and has the loss."""
        return self.rank == self.schedule.num_ranks - 1

    def step(
        self, inputs: Tensor | None = None, targets: Tensor | None = None, *, output: bool = False
    ) -> StepResult:
        """Forward and backward of one batch; gradients are added to `.grad`. Collective.

        Args:
            inputs: (B, ...), needed on the first rank; other ranks may pass anything.
            targets: (B, ...), needed on the last rank.
            output: also return the last stage's output, (B, ...), on the last rank.

        Raises:
            ValueError: a rank lacks its inputs or targets, or B is not a multiple of m. The first
                step raises this on all ranks; later steps raise only on the rank concerned, and the
                other ranks wait until the group's timeout. Also: gradients are switched off.
            MismatchError: a stage does not fit the previous stage (in the first step, on all
                ranks); or an output does not have the agreed shape or dtype (on its rank; the other
                ranks wait until the group's timeout, and the group cannot be used any more); or the
                micro-batches differ in shape or dtype from those of the first step (on the first
                rank).
        """
        self._begin(inputs, targets, output)
        with summed(self._ties, self.group):
            for step in self.program:
                if isinstance(step, Exchange):
                    self._exchange(step)
                else:
                    self._act(step)
        return self._end()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> StepResult:
        """Loss and output of one batch without gradients, on the last rank. Collective.

        The stages are in eval mode during the call. The batch must have the size of a training
        batch.
        """
        if self._evaluator is None:
            p, m, v = self.schedule.num_ranks, self.schedule.num_micro_batches, len(self.stages)
            self._evaluator = PipelineExecutor(
                self.stages,
                forward_only(p, m, v),
                self.loss_fn,
                count=self.count,
                group=self.group,
                device=self.device,
                specs=self.specs,
                record=self.record,
            )
        modes = [stage.training for stage in self.stages]
        try:
            for stage in self.stages:
                stage.eval()
            return self._evaluator.step(inputs, targets, output=True)
        finally:
            for stage, mode in zip(self.stages, modes, strict=True):
                stage.train(mode)

    # The kinds of action. Subclasses override them. --------------------------------------------

    def _forward(self, action: Action) -> None:
        x = self._input_of(action)
        y = self._call(action, x)
        if self._is_last_stage(action):
            y = self._loss(action, y) * self._run.weights[action.micro_batch]
        if self.schedule.splits_backward:
            self._run.keep(action, SplitBackward(x, y))
        elif self.schedule.trains:
            self._run.keep(action, (x, y))
        self._send(action, y)

    def _backward(self, action: Action) -> None:
        gradient = None if self._is_last_stage(action) else self._arrived(action)
        if self.schedule.splits_backward:
            split = self._run.live[action.micro_batch, action.chunk]
            self._send(action, split.input_gradient(gradient))
            return
        x, y = self._run.live.pop((action.micro_batch, action.chunk))
        if y.requires_grad:
            torch.autograd.backward([y], None if gradient is None else [gradient])
        if x is not None:
            self._send(action, torch.zeros_like(x) if x.grad is None else x.grad)

    def _weight(self, action: Action) -> None:
        self._run.live.pop((action.micro_batch, action.chunk)).weight_gradients()

    def _update(self, action: Action) -> None:
        raise AssertionError("schedules with updates are refused by the constructor")

    # Helpers of the actions. --------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        # Wait for inputs here, so that the span contains only computation.
        for source, made_by in self.schedule.needs(self.rank, action):
            if source != self.rank:
                message = Message(source, self.rank, made_by, action)
                self._run.inbox[message.used_by] = self._mail.take(message)
        with self._run.clock.span(action):
            match action.kind:
                case Kind.FORWARD:
                    self._forward(action)
                case Kind.BACKWARD:
                    self._backward(action)
                case Kind.WEIGHT:
                    self._weight(action)
                case Kind.UPDATE:
                    self._update(action)

    def _exchange(self, exchange: Exchange) -> None:
        outgoing = {
            message: self._run.outbox.pop(message.made_by)
            for message in exchange.messages
            if message.source == self.rank
        }
        self._mail.post(exchange, outgoing)

    def _input_of(self, action: Action) -> Tensor | None:
        """The stage's input from the previous stage; None for the first stage."""
        if self._is_first_stage(action):
            return None
        x = self._arrived(action)
        return x.detach().requires_grad_() if self.schedule.trains else x

    def _call(
        self, action: Action, x: Tensor | None, weights: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Run the stage, with its own weights or with `weights`, and check the output."""
        if x is None:
            x = self._run.inputs[action.micro_batch]
        stage = self.stages[action.chunk]
        y = stage(x) if weights is None else torch.func.functional_call(stage, weights, (x,))
        self._check_output(action, y)
        return y

    def _loss(self, action: Action, y: Tensor) -> Tensor:
        run = self._run
        loss = self.loss_fn(y, run.targets[action.micro_batch])
        if loss.numel() != 1:
            raise ValueError(
                f"PipelineExecutor: loss_fn has to return a scalar, got {TensorSpec.of(loss)} on "
                f"rank {self.rank}"
            )
        if not run.weights[action.micro_batch]:
            loss = zero_loss(y)
        run.losses[action.micro_batch] = loss.detach()
        if run.keep_output:
            run.outputs[action.micro_batch] = y.detach()
        return loss

    def _send(self, action: Action, tensor: Tensor | None) -> None:
        """Pass a result to the action that needs it: by the outbox, or directly on this rank."""
        if tensor is None:
            return
        stage = self.schedule.stage(self.rank, action.chunk)
        other = stage + 1 if action.kind is Kind.FORWARD else stage - 1
        if not 0 <= other < self.schedule.num_stages:
            return
        target, chunk = self.schedule.place(other)
        if target == self.rank:
            self._run.inbox[replace(action, chunk=chunk)] = tensor.detach()
        else:
            self._run.outbox[action] = tensor

    def _arrived(self, action: Action) -> Tensor:
        return self._run.inbox.pop(action)

    def _is_first_stage(self, action: Action) -> bool:
        return self.schedule.stage(self.rank, action.chunk) == 0

    def _is_last_stage(self, action: Action) -> bool:
        return self.schedule.stage(self.rank, action.chunk) == self.schedule.num_stages - 1

    @property
    def _mail(self) -> Mailbox:
        assert self._mailbox is not None
        return self._mailbox

    # Begin and end of a step. -------------------------------------------------------------------

    def _validate(self, specs: Sequence[TensorSpec] | None) -> None:
        if self.rank < 0:
            raise ValueError(
                f"PipelineExecutor: rank {dist.get_rank()} of the world is not in the group"
            )
        schedule, size = self.schedule, dist.get_world_size(self.group)
        if schedule.num_ranks != size:
            raise ValueError(
                f"PipelineExecutor: {schedule.name} is for {schedule.num_ranks} ranks, but the "
                f"group has {size} (rank {self.rank})"
            )
        if len(self.stages) != schedule.num_chunks:
            raise ValueError(
                f"PipelineExecutor: {schedule.name} needs {schedule.num_chunks} stages on every "
                f"rank, got {len(self.stages)} on rank {self.rank}"
            )
        if specs is not None and len(specs) != schedule.num_stages:
            raise ValueError(
                f"PipelineExecutor: specs need one entry per stage, {schedule.num_stages}, got "
                f"{len(specs)} on rank {self.rank}"
            )
        if schedule.updates_each_micro_batch and type(self) is PipelineExecutor:
            raise ValueError(
                f"PipelineExecutor: {schedule.name} updates weights inside the schedule; "
                "use PipeDreamExecutor"
            )

    def _begin(self, inputs: Tensor | None, targets: Tensor | None, output: bool) -> None:
        if self.schedule.trains and not torch.is_grad_enabled():
            raise ValueError("PipelineExecutor: gradients are switched off in step; use evaluate")
        micro_inputs, micro_targets, problem = [], [], None
        try:
            micro_inputs = self._split("inputs", inputs) if self.is_first else []
            micro_targets = self._split("targets", targets) if self.is_last else []
        except ValueError as error:
            problem = error
        spec = TensorSpec.of(micro_inputs[0]) if micro_inputs else None
        if self._mailbox is None:
            self._share_problem(problem)
            # Both branches are a collective of the whole group, which NCCL also needs before its
            # first message.
            if self.specs is None:
                self.specs = infer_specs(
                    self.schedule, self.rank, self.stages, spec, self.device, self.group
                )
            else:
                compare_specs(self.specs, self.group)
            if self.schedule.trains:
                self._ties = find_ties(self.stages, self.group)
            self._mailbox = Mailbox(self.schedule, self.rank, self.specs, self.device, self.group)
        elif problem is not None:
            raise problem
        if self._input_spec is not None and spec is not None and spec != self._input_spec:
            raise MismatchError(
                f"micro-batches changed: expected {self._input_spec} as in the first step, got "
                f"{spec}; make a new executor for a different shape",
                rank=self.rank,
            )
        self._input_spec = spec or self._input_spec
        self._run = Run(
            inputs=micro_inputs,
            targets=micro_targets,
            weights=shares(micro_targets, self.count),
            clock=make_clock(self.device, self.record),
            keep_output=output,
        )

    def _share_problem(self, problem: ValueError | None) -> None:
        """Collective, in the first step: if one rank cannot begin, all ranks raise."""
        texts: list[str | None] = [None] * self.schedule.num_ranks
        dist.all_gather_object(texts, None if problem is None else str(problem), group=self.group)
        if problem is not None:
            raise problem
        if any(texts):
            raise ValueError(next(text for text in texts if text))

    def _end(self) -> StepResult:
        self._mail.finish()
        run, self._run = self._run, Run()
        assert not run.live
        order = range(self.schedule.num_micro_batches)
        loss = None
        if run.losses:
            loss = torch.stack([run.losses[i] * run.weights[i] for i in order]).sum()
            loss = loss if any(run.weights) else loss * float("nan")  # as torch's mean of nothing
        return StepResult(
            loss=loss,
            output=torch.cat([run.outputs[i] for i in order]) if run.outputs else None,
            peak_activations=run.peak / self.schedule.num_chunks,
            spans=run.clock.spans(),
        )

    def _split(self, name: str, batch: Tensor | None) -> list[Tensor]:
        m = self.schedule.num_micro_batches
        if batch is None:
            raise ValueError(f"PipelineExecutor: rank {self.rank} needs {name}, got None")
        if batch.shape[0] % m or not batch.shape[0]:
            raise ValueError(
                f"PipelineExecutor: {name} of {batch.shape[0]} samples do not split into {m} equal "
                f"micro-batches (rank {self.rank})"
            )
        return list(batch.to(self.device).chunk(m))

    def _check_output(self, action: Action, y: Tensor) -> None:
        assert self.specs is not None
        stage = self.schedule.stage(self.rank, action.chunk)
        if not isinstance(y, Tensor) or TensorSpec.of(y) != self.specs[stage]:
            got = TensorSpec.of(y) if isinstance(y, Tensor) else type(y).__name__
            raise MismatchError(
                f"stage {stage}, {action}: expected output {self.specs[stage]}, got {got}",
                rank=self.rank,
            )
