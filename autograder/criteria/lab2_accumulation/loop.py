"""Criteria for the training loop that steps once per k micro-batches, without communication.

The optimizer is SGD with a learning rate of 0, so the weights do not change. A torch hook records
the gradients at every `optimizer.step()`. They tell which micro-batch entered which step with which
weight. Each criterion judges one aspect of this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import told
from autograder.criteria.common.weights import (
    Gradient,
    are_close,
    batch_gradients,
    collect,
    norm,
    present,
    show,
    weights_of,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab2_accumulation.gradients import peak_of, too_much_memory

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
    """Three runs whose number of batches is a multiple of k; one of them has k = 1."""
    rng = draw.shared()
    ks = [1, *(int(k) for k in rng.permutation([2, 3, 4, 5])[:2])]
    return _draw(draw, [{"k": k, "n": k * int(rng.integers(2, 4)), "plain": True} for k in ks])


def draw_tail(draw: Draw) -> list[Values]:
    """Numbers of batches one above and one below a multiple of k, and one below k itself."""
    k = int(draw.shared().integers(3, 6))
    return _draw(draw, [{"k": k, "n": n} for n in (2 * k + 1, 3 * k - 1, k - 1)])


def draw_zero_grad(draw: Draw) -> list[Values]:
    """Two epochs on one model, which holds old gradients before the first epoch.

    The optimizer has two groups of parameters.
    """
    k = int(draw.shared().integers(2, 5))
    n = 2 * k + 1  # a tail, whose gradients must not enter the next epoch
    inputs = _draw(draw, [{"k": k, "n": n, "groups": True}, {"k": k, "n": n, "goes_on": True}])
    for rank, values in enumerate(inputs):
        rng = draw.shared(f"stale {rank}")
        for i, p in enumerate(oracle.parameters_of(values)):
            values[f"stale/{i}"] = rng.normal(size=p.shape).astype(np.float32)
    return inputs


def draw_clip(draw: Draw) -> list[Values]:
    """A group and a tail whose gradients are far above the limit; a group far below; and k = 1.

    At last one step of an optimizer with two groups of parameters, one of which is frozen.
    """
    k = int(draw.shared().integers(3, 5))
    runs = [{"k": k, "n": k + 2}, {"k": k, "n": k}, {"k": 1, "n": 2}]
    runs += [{"k": k, "n": k, "groups": True, "frozen": True}]
    inputs = _draw(draw, runs, spread=2.0)
    for values in inputs:
        large, small, alone, grouped = (_basis(values, run) for run in range(4))
        groups = (large[:k], large[k:])
        smallest = min(
            *(norm(_mean(g)) * len(g) / k for g in groups), *(norm(g) / k for g in large)
        )
        limits = (
            0.3 * smallest,
            3 * k * sum(norm(g) for g in small),
            0.3 * min(norm(g) for g in alone),
            0.3 * min(norm(_mean(grouped)), *(norm(g) / k for g in grouped)),
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


def _basis(inputs: Values, run: int) -> list[Gradient]:
    """The gradient of each batch of a run; zeros for a parameter that is frozen."""
    gradients = batch_gradients(inputs, batches_of(inputs, run))
    if inputs["runs"][run].get("frozen"):
        gradients = [[*rest, np.zeros_like(last)] for *rest, last in gradients]
    return gradients


# --- observe -------------------------------------------------------------------------------------


class Batches:
    """Offers only what every DataLoader has: a length and an iterator."""

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self):
        return iter(self._batches)


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
        first, *rest = self.model.parameters()
        if run.get("frozen"):
            rest[-1].requires_grad_(False)
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

    @property
    def position(self) -> int:
        """How many steps the scheduler has made."""
        return self.scheduler.last_epoch if self.scheduler else 0

    def _before_step(self, *_: Any) -> None:
        if len(self.gradients) < self.limit:
            self.gradients.append([oracle.grad_of(p).copy() for p in self.model.parameters()])
            self.schedule.append(self.position)


def observe(train_epoch: Any, inputs: Values, context: Context) -> Values:
    """One epoch per run: the gradients at each step, the return value, the scheduler's position."""
    answer: Values = {}
    loss_fn = oracle.ordered(oracle.mse, answer)
    training = None
    for number, run in enumerate(inputs["runs"]):
        if training is None or not run.get("goes_on"):
            training = _Training(inputs, run, context)
        if number == 0 and "stale/0" in inputs:
            for i, p in enumerate(training.model.parameters()):
                p.grad = torch.from_numpy(inputs[f"stale/{i}"].copy()).to(context.device)
        training.begin(2 * run["n"] + 2)
        options: Values = {"max_norm": run["max_norm"]} if "max_norm" in run else {}
        if training.scheduler:
            options["scheduler"] = training.scheduler
        pairs = [
            (torch.from_numpy(x).to(context.device), torch.from_numpy(y).to(context.device))
            for x, y in batches_of(inputs, number)
        ]
        # Who needs more than is promised loses it in one criterion only.
        batches = Batches(pairs) if run.get("plain") else _loader(pairs)
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
        for step, gradient in enumerate(training.gradients):
            for i, g in enumerate(gradient):
                answer[f"g{number}/{step}/{i}"] = g
    return answer


def observe_steps(train_epoch: Any, inputs: Values, context: Context) -> Values:
    """Like `observe`, and the memory of an epoch of large batches."""
    answer = observe(train_epoch, inputs, context)
    model = oracle.mlp(inputs).to(context.device)
    x, y = (torch.from_numpy(inputs[f"{n}/0/0"]).to(context.device).repeat(40, 1) for n in "xy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = Batches([(x, y)] * (2 * MEMORY_K))
    answer["peak"] = peak_of(
        lambda: train_epoch(model, batches, oracle.mse, optimizer, accumulation_steps=MEMORY_K),
        lambda: oracle.mse(model(x), y).backward(),
    )
    return answer


# --- judge ---------------------------------------------------------------------------------------


@dataclass
class _Step:
    """One optimizer step: the weight of every batch, and the batches that no earlier step had."""

    weights: np.ndarray
    new: list[int]
    gradient: list[Any]


def _steps(case: Case, rank: int, number: int, extra: Sequence[Gradient] = ()) -> list[_Step] | str:
    """The steps of a run, or a message why they cannot be determined.

    Args:
        extra: gradients beside those of the batches; their weights come last.
    """
    inputs, answer = case.inputs[rank], case.answers[rank]
    n = inputs["runs"][number]["n"]
    count = told(answer, f"steps/{number}")
    if not isinstance(count, int) or not 0 <= count <= 2 * n + 2:
        return "the epoch did not end as it should."
    basis = [*_basis(inputs, number), *extra]
    steps: list[_Step] = []
    seen: set[int] = set()
    for step in range(count):
        gradient = collect(answer, f"g{number}/{step}", NUM_PARAMETERS)
        weights = weights_of(basis, gradient)
        if weights is None:
            return (
                f"optimizer step {step}: p.grad is not a sum of the gradients of this epoch's "
                "batches."
            )
        new = [i for i in present(weights) if i not in seen]
        seen.update(new)
        steps.append(_Step(weights, new, gradient))
    return steps


def _judge(case: Case, judge_run: Any) -> Iterator[Finding]:
    """The first finding of each rank: `judge_run(rank, number, run, steps)` returns a message."""
    for rank in range(case.world_size):
        for number, run in enumerate(case.inputs[rank]["runs"]):
            # What an epoch before has left is not judged here.
            extra = _basis(case.inputs[rank], number - 1) if run.get("goes_on") else ()
            steps = _steps(case, rank, number, extra)
            message = steps if isinstance(steps, str) else judge_run(rank, number, run, steps)
            if message:
                head = f"{run['n']} batches, accumulation_steps={run['k']}: "
                yield Finding(head + message, rank)
                break


def judge_steps(case: Case) -> Iterator[Finding]:
    """Step s has the batches sk to sk + k - 1, each with weight 1/k, and there are n/k steps."""

    def judge_run(rank: int, number: int, run: Values, steps: list[_Step]) -> str:
        k, n = run["k"], run["n"]
        for s, step in enumerate(steps[: n // k]):
            group = list(range(s * k, s * k + k))
            if step.new != group:
                return (
                    f"optimizer step {s} took in batches {step.new}, expected {group}."
                    f"{_why_group(step.new, group, s)}"
                )
            if not are_close(step.weights[group], [1 / k] * k):
                return (
                    f"optimizer step {s}: weights {show(step.weights[group])}, expected "
                    f"{1 / k:.3g} each."
                )
        if len(steps) != n // k:
            return (
                f"{len(steps)} optimizer steps, expected {n // k}. Count a group only when it "
                "has a batch."
            )
        got = told(case.answers[rank], f"returned/{number}")
        return "" if got == n // k else f"returned {got}, expected {n // k} optimizer steps."

    found = {finding.rank: finding for finding in _judge(case, judge_run)}
    for rank, answer in enumerate(case.answers):
        swapped = oracle.find_misused_loss(answer, rank)
        if wrong := found.get(rank) or swapped or too_much_memory(answer.get("peak"), rank):
            yield wrong


def _why_group(new: list[int], group: list[int], step: int) -> str:
    if step == 0 and new == [0]:
        return " Counted from 0, i % k == 0 is true at once: the group is full at (i + 1) % k == 0."
    if new == group[-1:]:
        return " The earlier gradients are gone: clear them once per group, not per batch."
    return ""


def judge_tail(case: Case) -> Iterator[Finding]:
    """The batches that are left over make a step of their own, with their mean gradient."""

    def judge_run(rank: int, number: int, run: Values, steps: list[_Step]) -> str:
        k, n = run["k"], run["n"]
        count, steps = len(steps), _with_batches(steps)
        tail = list(range(n // k * k, n))
        last = steps[-1] if steps else None
        whole = len(tail)
        if _keeps_last(case, rank):
            tail = tail[-1:]
        if last is None or not set(tail) & set(last.new):
            return f"the last batches {tail} entered no optimizer step; their group is smaller."
        if last.new != tail:
            return f"the last optimizer step took in batches {last.new}, expected {tail}."
        if not are_close(last.weights[tail], [1 / whole] * len(tail)):
            return (
                f"the last optimizer step has weights {show(last.weights[tail])} for batches "
                f"{tail}, expected {1 / whole:.3g} each: the mean over the batches that "
                "this group really has."
            )
        got = told(case.answers[rank], f"returned/{number}")
        return "" if got in (count, len(steps)) else f"{count} optimizer steps, but returned {got}."

    return _judge(case, judge_run)


def _with_batches(steps: list[_Step]) -> list[_Step]:
    """The steps without those at the end that had no gradient, which `judge_steps` finds."""
    last = max((i for i, step in enumerate(steps) if present(step.weights)), default=-1)
    return steps[: last + 1]


def _keeps_last(case: Case, rank: int) -> bool:
    """Whether only the last batch of a whole group is left in a step, which `judge_steps` finds."""
    k, steps = case.inputs[rank]["runs"][0]["k"], _steps(case, rank, 0)
    if isinstance(steps, str) or len(steps) < 2:
        return False
    return all(step.new == [number * k + k - 1] for number, step in enumerate(steps[:2]))


def judge_zero_grad(case: Case) -> Iterator[Finding]:
    """No step contains gradients from before the epoch or from an earlier step."""
    for rank in range(case.world_size):
        inputs = case.inputs[rank]
        stale = [inputs[f"stale/{i}"].astype(np.float64) for i in range(NUM_PARAMETERS)]
        first = batch_gradients(inputs, batches_of(inputs, 0))
        for number, extra in enumerate(([stale], [stale, *first])):
            steps = _steps(case, rank, number, extra)
            if message := steps if isinstance(steps, str) else _old(inputs, number, steps):
                if isinstance(steps, str):
                    message += " Is something old in some of them, such as a second group's?"
                yield Finding(f"epoch {number}: {message}", rank)
                break


def _old(inputs: Values, number: int, steps: list[_Step]) -> str:
    n = inputs["runs"][number]["n"]
    if len(steps) < 2:
        return f"{len(steps)} optimizer steps, too few to tell."
    for s, step in enumerate(steps):
        entered = present(step.weights)
        if any(i >= n for i in entered):
            return (
                f"optimizer step {s} contains gradients that were in p.grad before this epoch: "
                "clear them at its beginning."
            )
        if old := sorted(set(entered) - set(step.new)):
            return (
                f"optimizer step {s} contains batches {old} once more: clear the gradients "
                "after each step."
            )
    return ""


def judge_clip(case: Case) -> Iterator[Finding]:
    """The whole accumulated gradient is clipped once, before the step."""

    def judge_run(rank: int, number: int, run: Values, steps: list[_Step]) -> str:
        limit = run["max_norm"]
        if not any(present(step.weights) for step in steps):
            return "there was no optimizer step with a gradient."
        for step in steps:
            entered = step.weights[step.new]  # old batches are not judged here
            size = norm(step.gradient)
            if entered.size == 0:
                continue  # a surplus step is not judged here, either
            if number != 1 and not np.isclose(size, limit, rtol=0.02):
                return (
                    f"max_norm={limit:.4g}: at the optimizer step the gradient's norm is "
                    f"{size:.4g}. Clip before the step, after the last backward, and when "
                    "p.grad is the mean of the group."
                    + " The norm is that over the parameters of all the optimizer's groups."
                    * bool(run.get("groups"))
                )
            if number == 1 and size > 0.9 * limit:
                return (
                    f"max_norm={limit:.4g}: the norm was made {size:.4g} although it was "
                    "below the limit: clipping never enlarges."
                )
            if not are_close(entered, np.full(entered.shape, entered.mean())):
                return (
                    f"max_norm={limit:.4g}: batches entered with weights {show(entered)}, "
                    "expected equal ones: clip the accumulated gradient once, not that of "
                    "each batch."
                )
        return ""

    return _judge(case, judge_run)


def judge_schedule(case: Case) -> Iterator[Finding]:
    """The scheduler steps once after each optimizer step."""

    def judge_run(rank: int, number: int, run: Values, steps: list[_Step]) -> str:
        answer, count = case.answers[rank], len(_with_batches(steps))
        if count < 2:
            return f"{count} optimizer steps, too few to tell."
        begin = told(answer, f"end/{number - 1}") if run.get("goes_on") else 0
        begin = begin if isinstance(begin, int) else 0
        expected, made = list(range(begin, begin + count)), told(answer, f"schedule/{number}")
        made = made[:count] if isinstance(made, list) else made
        ends = (begin + count, begin + len(steps))
        if made != expected or told(answer, f"end/{number}") not in ends:
            epoch = f", after {begin} in an epoch before" if begin else ""
            return (
                f"{count} optimizer steps{epoch}, but the scheduler made "
                f"{answer.get(f'end/{number}')}; before each optimizer step it had made "
                f"{answer.get(f'schedule/{number}')}, expected {expected}: scheduler.step() "
                "belongs right after optimizer.step()."
            )
        return ""

    return _judge(case, judge_run)
