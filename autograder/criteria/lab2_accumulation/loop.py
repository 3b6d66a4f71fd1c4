"""What the criteria for the training loop observe: one step per k batches, without communication.

The optimizer is SGD with a learning rate of 0, so the weights do not change. A torch hook records
the gradients at every `optimizer.step()`. They tell which micro-batch entered which step with which
weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from autograder.criteria.common import oracle
from autograder.criteria.common.weights import (
    Gradient,
    batch_gradients,
    norm,
)
from autograder.criteria.criterion import Context, Draw, Values
from autograder.criteria.lab2_accumulation.memory import peak_of

SIZES = (5, 9, 3)
NUM_PARAMETERS = 4
SAMPLES = 3
MEMORY_K = 6


# --- draw ----------------------------------------------------------------------------------------


def _draw(draw: Draw, runs: list[Values], spread: float = 1.0) -> list[Values]:
    """One private model per rank; a run is a dict with k, the number n of batches, and options.

    Args:
        spread: each batch's targets are this many times larger than those of the batch before.
    """
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        values: Values = oracle.draw_parameters(rng, SIZES) | {"runs": runs}
        for number, run in enumerate(runs):
            for i in rng.permutation(run["n"]):
                batch = oracle.draw_batch(rng, SAMPLES, SIZES)
                values[f"x/{number}/{i}"] = batch["x"]
                values[f"y/{number}/{i}"] = batch["y"] * np.float32(spread**i)
        inputs.append(values)
    return inputs


def draw_steps(draw: Draw) -> list[Values]:
    """Three runs whose number of batches is a multiple of k; one of them has k = 1.

    One run with a larger k has three groups, more than may be in memory at once.
    """
    rng = draw.shared()
    ks = [1, *(int(k) for k in rng.permutation([2, 3, 4, 5])[:2])]
    groups = [int(rng.integers(2, 4)), *(int(n) for n in rng.permutation([2, 3]))]
    return _draw(
        draw, [{"k": k, "n": k * n, "plain": True} for k, n in zip(ks, groups, strict=True)]
    )


def draw_tail(draw: Draw) -> list[Values]:
    """Numbers of batches one above and one below a multiple of k, and one below k itself.

    The last run is a second epoch, in which groups begin anew.
    """
    k = int(draw.shared().integers(3, 6))
    runs: list[Values] = [{"k": k, "n": n} for n in (2 * k + 1, 3 * k - 1, k - 1)]
    return _draw(draw, [*runs, runs[0] | {"goes_on": True}])


def draw_zero_grad(draw: Draw) -> list[Values]:
    """Two epochs on one model, which holds old gradients before the first epoch.

    The optimizer has two groups of parameters. Then an epoch on a new model with two frozen
    parameters, of which one holds an old gradient, and the other holds None.
    """
    k = int(draw.shared().integers(2, 5))
    n = 2 * k + 1  # a tail, whose gradients must not enter the next epoch
    runs: list[Values] = [{"k": k, "n": n, "groups": True}, {"k": k, "n": n, "goes_on": True}]
    runs += [{"k": k, "n": 2 * k, "groups": True, "frozen": [1, 3]}]
    inputs = _draw(draw, runs)
    for rank, values in enumerate(inputs):
        rng = draw.shared(f"stale {rank}")
        for run, holders in ((0, (0, 1, 2, 3)), (2, (0, 2, 3))):
            for i in holders:
                shape = values[f"p{i}"].shape
                values[f"stale/{run}/{i}"] = rng.normal(size=shape).astype(np.float32)
    return inputs


def draw_clip(draw: Draw) -> list[Values]:
    """A group and a tail whose gradients are far above the limit; a group far below; and k = 1.

    Then one step of an optimizer with two groups of parameters, one of which is frozen; and one
    with a limit of 0.
    """
    k = int(draw.shared().integers(3, 5))
    runs = [{"k": k, "n": k + 2}, {"k": k, "n": k}, {"k": 1, "n": 2}]
    runs += [{"k": k, "n": k, "groups": True, "frozen": [3]}, {"k": k, "n": k}]
    inputs = _draw(draw, runs, spread=2.0)
    for values in inputs:
        large, small, alone, grouped = (basis_of(values, run) for run in range(4))
        groups = (large[:k], large[k:])
        smallest = min(
            *(norm(_mean(g)) * len(g) / k for g in groups), *(norm(g) / k for g in large)
        )
        limits = (
            0.3 * smallest,
            3 * k * sum(norm(g) for g in small),
            0.3 * min(norm(g) for g in alone),
            0.3 * min(norm(_mean(grouped)), *(norm(g) / k for g in grouped)),
            0.0,
        )
        values["runs"] = [
            run | {"max_norm": m} for run, m in zip(values["runs"], limits, strict=True)
        ]
    return inputs


def draw_schedule(draw: Draw) -> list[Values]:
    """Runs with different k, each with a scheduler, and with a tail unless k is 1.

    The last run is a second epoch, in which the schedule goes on.
    """
    rng = draw.shared()
    ks = (1, int(rng.integers(4, 6)), int(rng.integers(2, 4)))
    runs: list[Values] = [{"k": k, "n": 3 * k + 1, "schedule": True} for k in ks]
    return _draw(draw, [*runs, runs[-1] | {"goes_on": True}])


def _mean(gradients: Sequence[Gradient]) -> Gradient:
    return [oracle.mean(parts) for parts in zip(*gradients, strict=True)]


def batches_of(inputs: Values, run: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The batches of a run, in their order."""
    return [
        (inputs[f"x/{run}/{i}"], inputs[f"y/{run}/{i}"]) for i in range(inputs["runs"][run]["n"])
    ]


def basis_of(inputs: Values, run: int) -> list[Gradient]:
    """The gradient of each batch of a run; zeros for a parameter that is frozen."""
    frozen = inputs["runs"][run].get("frozen", ())
    return [
        [np.zeros_like(g) if i in frozen else g for i, g in enumerate(gradient)]
        for gradient in batch_gradients(inputs, batches_of(inputs, run))
    ]


def stale_of(inputs: Values, run: int) -> Gradient:
    """The old gradients before a run; zeros for a parameter that holds none."""
    parameters = oracle.parameters_of(inputs)
    return [inputs.get(f"stale/{run}/{i}", np.zeros(p.shape)) for i, p in enumerate(parameters)]


# --- observe -------------------------------------------------------------------------------------


class Batches:
    """Offers only what every DataLoader has: a length and an iterator.

    Attributes:
        passes: how often somebody began to go through the batches.
        held: the most batches that were handed out, but in no step, when a new one was asked for.
        alive: the most batches that were in memory then.
    """

    def __init__(
        self,
        batches: list[tuple[torch.Tensor, torch.Tensor]],
        entered: Callable[[], int] = lambda: 0,
    ) -> None:
        self._batches, self._entered = batches, entered
        self.passes, self.held, self.alive = 0, 0, 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.passes += 1
        handed_out: list[weakref.ref[torch.Tensor]] = []
        for number, (x, y) in enumerate(self._batches):
            self._note(number, handed_out)
            batch = x.clone()
            handed_out.append(weakref.ref(batch))
            yield batch, y
        self._note(len(self), handed_out)

    def _note(self, number: int, handed_out: list[weakref.ref[torch.Tensor]]) -> None:
        self.held = max(self.held, number - self._entered())
        self.alive = max(self.alive, sum(ref() is not None for ref in handed_out))


def _loader(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> DataLoader:
    """A DataLoader that yields these batches."""
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=SAMPLES)


class _Training:
    """What the epochs of one training share: a model, its optimizer and its scheduler.

    It notes the gradients and the scheduler's position before each optimizer step.
    """

    def __init__(self, inputs: Values, run: Values, context: Context) -> None:
        self.model = oracle.mlp(inputs).to(context.device)
        first, *rest = self.parameters = list(self.model.parameters())
        for i in run.get("frozen", ()):
            self.parameters[i].requires_grad_(False)
        groups = [{"params": [first]}, {"params": rest}]
        self.optimizer = torch.optim.SGD(
            groups if run.get("groups") else [first, *rest],
            lr=0.0,
        )
        self.optimizer.register_step_pre_hook(self._before_step)
        self.scheduler: LambdaLR | None = None
        if run.get("schedule"):
            self.scheduler = LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.begin(0)

    def begin(self, limit: int) -> None:
        """Forgets what was noted; then notes at most `limit` steps."""
        self.limit, self.schedule = limit, list[int]()
        self.gradients: list[Gradient] = []
        self.filled = set[int]()  # parameters whose p.grad was not None in some step

    @property
    def position(self) -> int:
        """How many steps the scheduler has made."""
        return self.scheduler.last_epoch if self.scheduler else 0

    def _before_step(self, *_: Any) -> None:
        if len(self.gradients) < self.limit:
            self.gradients.append([oracle.grad_of(p).copy() for p in self.parameters])
            self.filled |= {i for i, p in enumerate(self.parameters) if p.grad is not None}
            self.schedule.append(self.position)


def observe(train_epoch: Any, inputs: Values, context: Context) -> Values:
    """One epoch per run: the gradients at each step, the return value, the scheduler's position."""
    answer: Values = {}
    loss_fn = oracle.ordered(oracle.mse, answer)
    training = None
    for number, run in enumerate(inputs["runs"]):
        if training is None or not run.get("goes_on"):
            training = _Training(inputs, run, context)
        for i, p in enumerate(training.parameters):
            if (name := f"stale/{number}/{i}") in inputs:
                p.grad = torch.from_numpy(inputs[name].copy()).to(context.device)
        training.begin(2 * run["n"] + 2)
        options: Values = {"max_norm": run["max_norm"]} if "max_norm" in run else {}
        if training.scheduler:
            options["scheduler"] = training.scheduler
        pairs = [
            (torch.from_numpy(x).to(context.device), torch.from_numpy(y).to(context.device))
            for x, y in batches_of(inputs, number)
        ]
        # Only plain runs use `Batches`, so a loop that needs a DataLoader loses one criterion.
        plain = Batches(pairs, lambda t=training, k=run["k"]: k * len(t.gradients))
        batches = plain if run.get("plain") else _loader(pairs)
        returned = train_epoch(
            training.model,
            batches,
            loss_fn,
            training.optimizer,
            accumulation_steps=run["k"],
            **options,
        )
        is_count = isinstance(returned, int) and not isinstance(returned, bool)
        answer[f"returned/{number}"] = returned if is_count else repr(returned)[:80]
        answer[f"steps/{number}"] = len(training.gradients)
        answer[f"schedule/{number}"] = training.schedule
        answer[f"end/{number}"] = training.position
        answer[f"data/{number}"] = [plain.passes, plain.held, plain.alive]
        answer[f"filled/{number}"] = sorted(training.filled)
        for step, gradient in enumerate(training.gradients):
            for i, g in enumerate(gradient):
                answer[f"g{number}/{step}/{i}"] = g
    return answer


def observe_steps(train_epoch: Any, inputs: Values, context: Context) -> Values:
    """Like `observe`, and the memory of an epoch of large batches, with a tail."""
    answer = observe(train_epoch, inputs, context)
    model = oracle.mlp(inputs).to(context.device)
    x, y = (torch.from_numpy(inputs[f"{n}/0/0"]).to(context.device).repeat(40, 1) for n in "xy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = Batches([(x, y)] * (2 * MEMORY_K - 1))
    answer["peak"] = peak_of(
        lambda: train_epoch(model, batches, oracle.mse, optimizer, accumulation_steps=MEMORY_K),
        lambda: oracle.mse(model(x), y).backward(),
    )
    return answer
