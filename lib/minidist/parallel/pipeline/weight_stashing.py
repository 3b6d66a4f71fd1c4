"""PipeDream: a pipeline without flush. Each mini-batch updates the weights after its backward.

Without a flush there is no bubble after the start. But weights change while a mini-batch is in the
pipeline: stage r of p makes p - r - 1 updates between the forward of a mini-batch and its backward.
This has two consequences, and the executor measures both:

1. **Weight stashing.** The backward pass must use the weights that the forward pass used. Otherwise
   its result is not the gradient of any function. So every stage keeps up to p - r versions.
2. **Staleness.** The gradient belongs to weights that are p - r - 1 updates old:

       w(t+1) = w(t) - lr * grad f(w_0(t-p+1), w_1(t-p+2), ..., w_{p-1}(t))

Phases of a mini-batch on a stage: forward with a snapshot of the newest weights; backward with the
same snapshot; optimizer step on the newest weights with this gradient. The next forward takes a new
snapshot.

Example::

    optimizer = torch.optim.SGD(stages[rank].parameters(), lr=0.1)
    pipeline = PipeDreamExecutor(stages[rank], pipedream(p, 20), lm_loss, optimizer)
    result = pipeline.step(inputs, targets)   # 20 mini-batches, 20 updates
    result.losses, result.staleness, result.peak_versions

Paper: PipeDream, arXiv 1806.03377, sections 3.2 and 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from minidist.parallel.pipeline.executor import LossFunction, PipelineExecutor
from minidist.parallel.pipeline.record import StepResult
from minidist.parallel.pipeline.schedule import Action, Schedule
from minidist.parallel.pipeline.ties import has_ties


@dataclass(frozen=True)
class PipeDreamResult(StepResult):
    """The result of a run of mini-batches on this rank. `loss` is the mean over all targets.

    Args:
        losses: (m,), the loss of every mini-batch before its update; None except on the last rank.
        staleness: per mini-batch, updates of this stage between its forward and its own update.
        peak_versions: the most versions of the weights that were kept at once.
    """

    losses: Tensor | None
    staleness: tuple[int, ...]
    peak_versions: int


@dataclass(eq=False)
class _Snapshot:
    """One version of a stage's weights, as separate leaves that no optimizer changes."""

    version: int  # number of updates that it contains
    weights: dict[str, Tensor]


class PipeDreamExecutor(PipelineExecutor):
    """Runs a PipeDream schedule: `step` takes m mini-batches and makes m updates.

    Args:
        stage: this rank's one stage.
        schedule: `pipedream(p, m)`.
        loss_fn: (output, target) of a mini-batch -> scalar. The loss is not divided by m, because
            every mini-batch is a separate batch.
        optimizer: the optimizer of the stage's parameters.
        stash_weights: False shows training without stashing: backward combines the newest weights
            with activations of older weights, and the gradient is wrong.
        options: `group`, `device`, `specs`, `record` of `PipelineExecutor`.

    Raises:
        ValueError: the schedule has no updates, or the stage has tied weights.
    """

    def __init__(
        self,
        stage: nn.Module,
        schedule: Schedule,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        *,
        stash_weights: bool = True,
        **options: Any,
    ) -> None:
        if not schedule.updates_each_micro_batch:
            raise ValueError(
                f"PipeDreamExecutor: expected a schedule with updates such as pipedream(p, m), "
                f"got {schedule.name}; use PipelineExecutor"
            )
        if has_ties(stage):
            raise ValueError(
                "PipeDreamExecutor: tied embeddings, or other tied weights, need the sum of the "
                "stages' gradients before an update, and here the stages update at different "
                "times; untie them"
            )
        super().__init__(stage, schedule, loss_fn, **options)
        self.optimizer, self.stash_weights = optimizer, stash_weights
        self.num_updates = 0
        self._newest: _Snapshot | None = None
        self._begin_run()

    def step(
        self, inputs: Tensor | None = None, targets: Tensor | None = None, *, output: bool = False
    ) -> PipeDreamResult:
        """m mini-batches, cut from `inputs` (first rank) and `targets` (last rank). Collective."""
        self._begin_run()
        result = super().step(inputs, targets, output=output)
        return PipeDreamResult(
            **vars(result),
            losses=self._losses,
            staleness=tuple(self._staleness),
            peak_versions=self._peak_versions,
        )

    def _begin_run(self) -> None:
        self._staleness: list[int] = []
        self._peak_versions = 0
        self._losses: Tensor | None = None

    def _forward(self, action: Action) -> None:
        x = self._input_of(action)
        snapshot = self._snapshot()
        y = self._call(action, x, snapshot.weights)
        if self._is_last_stage(action):
            y = self._loss(action, y)
        self._run.keep(action, (x, y, snapshot))
        versions = {id(kept[2]) for kept in self._run.live.values()}
        self._peak_versions = max(self._peak_versions, len(versions))
        self._send(action, y)

    def _backward(self, action: Action) -> None:
        gradient = None if self._is_last_stage(action) else self._arrived(action)
        x, y, snapshot = self._run.live.pop((action.micro_batch, action.chunk))
        if not self.stash_weights:
            # .data hides the change from autograd, which would otherwise raise an error.
            for name, parameter in self.stages[0].named_parameters():
                snapshot.weights[name].data.copy_(parameter.data)
        # A stage under activation checkpointing runs again in backward: with the snapshot, too.
        with _reparametrize_module(self.stages[0], snapshot.weights, tie_weights=True):
            torch.autograd.backward([y], None if gradient is None else [gradient])
        if x is not None:
            self._send(action, torch.zeros_like(x) if x.grad is None else x.grad)
        for name, parameter in self.stages[0].named_parameters():
            leaf = snapshot.weights[name]
            parameter.grad, leaf.grad = leaf.grad, None
        self._staleness.append(self.num_updates - snapshot.version)

    def _update(self, action: Action) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_updates += 1
        self._newest = None

    def _snapshot(self) -> _Snapshot:
        """A copy of the newest weights. Mini-batches that start between two updates share it."""
        if self._newest is None:
            weights = {
                name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
                for name, parameter in self.stages[0].named_parameters()
            }
            self._newest = _Snapshot(self.num_updates, weights)
        return self._newest

    def _end(self) -> StepResult:
        losses = [self._run.losses[i] for i in sorted(self._run.losses)]
        self._losses = torch.stack(losses) if losses else None
        self._newest = None  # other code may change the weights between runs
        return super()._end()
