"""Criteria for task 4 of lab 1: the training loop.

Every rank gets rows of the dataset that no other rank has (its remaining rows are nan). So final
weights that agree with the oracle prove that the ranks exchanged their gradients.

`train_epochs` and `train_loss` use a network without hidden units whose inputs are one-hot, so
that every sample has weights of its own, which begin at zero: a sample was used if its weights have
changed, and its loss before its only step depends on nothing but its target. So a mistake in how
gradients or steps are made, which `train_steps` finds, costs nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Sampler

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import read, read_number
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

# --- train ---------------------------------------------------------------------------------------

TRAIN_SIZES = (4, 6, 1)
PER_RANK, BATCH_SIZE, LR = 10, 4, 2.0  # an epoch's last batch: 2 samples (even ranks) or 1 (odd)
# The student's loop gets FACTOR times the mean squared error as its loss function: a small loss
# and a large learning rate make a weight decay visible.
FACTOR = 0.037
# The same with one-hot inputs: losses so small that rounding them shows.
HOT_FACTOR, HOT_LR = 3.7e-6, 2e3
EPOCHS, OUTPUTS = 3, 2


class RowsOfThisRank(Dataset):
    """Rows x [n, in], y [n, out]; the rows of other ranks are nan."""

    def __init__(self, x: np.ndarray, y: np.ndarray, in_host: bool = False) -> None:
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        if in_host:
            self.x, self.y = (t.as_subclass(InHostMemory) for t in (self.x, self.y))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class InHostMemory(torch.Tensor):
    """A tensor that becomes a plain one when it is moved to a device."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        plain = self.as_subclass(torch.Tensor).to(*args, **kwargs)
        named = [*args, *kwargs.values()]
        moved = any(isinstance(a, torch.device | str | int) and a is not True for a in named)
        return plain if moved else plain.as_subclass(InHostMemory)

    def cuda(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).cuda(*args, **kwargs)


class DrawnSampler(Sampler[int]):
    """Yields the index list of the epoch that was set, and `before` until one is.

    `before` stands for an earlier training, so epoch 0 has to be set like any other. An epoch
    number out of range is clamped, so that a wrong number shows in the weights, and not as an error
    in an innocent line of the student's code.
    """

    def __init__(self, per_epoch: np.ndarray, before: np.ndarray) -> None:
        self.per_epoch, self.now = per_epoch.tolist(), before.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch's list."""
        self.now = self.per_epoch[min(max(int(epoch), 0), len(self.per_epoch) - 1)]

    def __iter__(self):
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class NextSampler(DrawnSampler):
    """Yields the next list whenever it is iterated, whatever epoch was set."""

    visits = 0

    def __iter__(self):
        self.set_epoch(self.visits)
        self.visits += 1
        return super().__iter__()


def _size(rank: int) -> int:
    """Samples of a rank in an epoch: ranks have equally many batches, not samples."""
    return PER_RANK - rank % 2


def draw_train_steps(draw: Draw) -> list[Values]:
    """Two epochs in the same order, so that a missing call of `set_epoch` does not matter."""
    start = oracle.draw_parameters(draw.shared("start"), TRAIN_SIZES)
    inputs = []
    for rank in range(draw.world_size):
        rng, rows = draw.private(rank), 2 * PER_RANK
        batch = oracle.draw_batch(rng, rows, TRAIN_SIZES)
        first = rng.permutation(rows)[: _size(rank)]
        inputs.append(start | _own_rows(draw.world_size, rank, batch) | {"hot": False})
        inputs[-1]["before"] = first + rank * rows
        inputs[-1]["order"] = np.stack([inputs[-1]["before"]] * 2)
    return inputs


def draw_train_epochs(draw: Draw) -> list[Values]:
    """Three epochs, and the list `before` the first `set_epoch`, all with different samples."""
    rows = (EPOCHS + 1) * PER_RANK
    width = draw.world_size * rows
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        x = np.eye(width, dtype=np.float32)[rank * rows : (rank + 1) * rows]
        y = rng.choice((-1, 1), (rows, OUTPUTS)) * rng.uniform(1, 2, (rows, OUTPUTS))
        values = _own_rows(draw.world_size, rank, {"x": x, "y": y.astype(np.float32)})
        drawn = rng.permutation(rows)[: (EPOCHS + 1) * _size(rank)].reshape(EPOCHS + 1, -1)
        *order, before = drawn + rank * rows
        zeros = np.zeros((OUTPUTS, width), dtype=np.float32)
        values |= {"p0": zeros, "order": np.stack(order), "before": before, "hot": True}
        inputs.append(values | {"any epoch": False})
    return inputs


def draw_train_loss(draw: Draw) -> list[Values]:
    """Like `draw_train_epochs`, with samples that do not depend on the epoch that is set."""
    return [values | {"any epoch": True} for values in draw_train_epochs(draw)]


def _own_rows(world_size: int, rank: int, batch: Values) -> Values:
    """The rows of `batch`, at this rank's place among rows of nan."""
    rows = len(batch["x"])
    values: Values = {}
    for name, own in batch.items():
        values[name] = np.full((world_size * rows, own.shape[1]), np.nan, dtype=np.float32)
        values[name][rank * rows : (rank + 1) * rows] = own
    return values


def _one_hot_model(inputs: Values) -> nn.Linear:
    outputs, width = inputs["p0"].shape
    model = nn.Linear(width, outputs, bias=False)
    nn.init.zeros_(model.weight)
    return model


def observe_train(train: Any, inputs: Values, context: Context) -> Values:
    """Trains torch's DDP with the student's loop; returns final parameters and losses.

    If the loop leaves the model in eval mode, `train_steps` calls it again, to see in which mode it
    trains then.
    """
    hot, order = inputs["hot"], inputs["order"]
    model = (_one_hot_model(inputs) if hot else oracle.mlp(inputs)).to(context.device)
    ids = [context.device] if context.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids)
    left: set[str] = set()  # what reached the model, or the loss, from host memory
    modes: set[bool] = set()  # whether the model went forward in training mode
    answer: Values = {}

    def note(what: str, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, InHostMemory):
            left.add(what)
        return value.as_subclass(torch.Tensor)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (HOT_FACTOR if hot else FACTOR) * oracle.mse(
            note("", output), note("the target", target)
        )

    def go(_: nn.Module, args: Any) -> Any:
        modes.add(model.training)
        return note("the input", args[0]), *args[1:]

    model.register_forward_pre_hook(go)
    run = partial(
        train,
        wrapped,
        RowsOfThisRank(inputs["x"], inputs["y"], in_host=not hot),
        (NextSampler if hot and inputs["any epoch"] else DrawnSampler)(order, inputs["before"]),
        oracle.ordered(loss, answer),
        batch_size=BATCH_SIZE,
        lr=HOT_LR if hot else LR,
        device=context.device,
    )
    losses = run(num_epochs=len(order))
    answer |= {f"p{i}": p.detach().cpu().numpy().copy() for i, p in enumerate(model.parameters())}
    answer["left"] = sorted(left - {""})
    if losses is not None:
        losses = read(losses, list, "train", "a list of losses")
        answer["losses"] = np.array([read_number(loss, "train, for a loss") for loss in losses])
    if not hot:
        if not model.training:
            run(num_epochs=1)
        answer["in eval mode"] = False in modes
    return answer


# --- judge train_steps ---------------------------------------------------------------------------


def _trained(
    case: Case, *, factor: float = FACTOR, lr: float = LR, drop_last: bool = False, **how: Any
) -> list[np.ndarray]:
    """Final parameters of one process that trains on the global batch."""
    starts = range(0, PER_RANK - BATCH_SIZE * drop_last, BATCH_SIZE)
    batches = [
        [
            (i["x"][rows], i["y"][rows])
            for i in how.get("inputs", case.inputs)
            for rows in [i["order"][epoch][start : start + BATCH_SIZE]]
        ]
        for epoch in range(len(case.inputs[0]["order"]))
        for start in starts
    ]
    return oracle.train(case.inputs[0], batches, factor * lr, how.get("clear", True))[0]


def _explain(case: Case, rank: int, got: list[Any]) -> str:
    """The mistake that gives the same parameters as the student's loop; "" if none is known."""
    mistakes = {
        "That is what comes of the mean squared error: was loss_fn used?": {"factor": 1.0},
        "That is what comes without the last, smaller batch.": {"drop_last": True},
        "That is what comes if gradients are never cleared: zero_grad() before each backward.": {
            "clear": False
        },
        f"That is what comes with {case.world_size} times the learning rate.": {
            "lr": LR * case.world_size
        },
        f"That is what comes with the learning rate divided by {case.world_size}.": {
            "lr": LR / case.world_size
        },
        "That is what comes of this rank's samples alone: is it the wrapped model that goes "
        "forward?": {"inputs": [case.inputs[rank]]},
    }
    for said, mistake in mistakes.items():
        wrong = _trained(case, **mistake)
        if all(oracle.agrees(g, w) for g, w in zip(got, wrong, strict=True)):
            return said
    return ""


def judge_train_steps(case: Case) -> Iterator[Finding]:
    """Weights equal those of one process that trains on the global batch.

    Batches may come by any DataLoader over the sampler; gradients may be cleared before backward or
    after the step.
    """
    expected = _trained(case)
    for rank, answer in enumerate(case.answers):
        left = answer.get("left")
        if isinstance(left, list) and left:
            yield Finding(f"{' and '.join(map(str, left))} of a batch never went to device.", rank)
        if swapped := oracle.find_misused_loss(answer, rank):
            yield swapped
        if answer.get("in eval mode") is True:
            yield Finding(
                "in one of two calls the model was trained in eval mode, which turns dropout off: "
                "leave it in training mode.",
                rank,
            )
        got = [answer.get(f"p{i}") for i in range(len(expected))]
        for i, value in enumerate(expected):
            what, start = f"parameter {i} after training", case.inputs[0][f"p{i}"]
            wrong = oracle.differs(rank, what, got[i], value, terms=[start])
            if wrong and oracle.agrees(got[i], start):
                yield Finding(f"{what} is what it was before.", rank)
            elif wrong:
                yield Finding(f"{wrong.message} {_explain(case, rank, got)}".strip(), rank)
            if wrong:
                break


# --- judge train_epochs and train_loss -----------------------------------------------------------


def _used(case: Case, rank: int) -> np.ndarray | None:
    """Whether a rank's weights of each row have changed; None if they are no finite weights."""
    got, start = case.answers[rank].get("p0"), case.inputs[rank]["p0"]
    if not isinstance(got, np.ndarray) or got.shape != start.shape or got.dtype.kind != "f":
        return None
    return (got != 0).any(axis=0) if np.isfinite(got).all() else None


def judge_train_epochs(case: Case) -> Iterator[Finding]:
    """In every epoch, the sampler was in that epoch: its samples have changed the weights."""
    for rank, inputs in enumerate(case.inputs):
        used = _used(case, rank)
        if used is None:
            yield Finding("the weights after training are not finite numbers.", rank)
            continue
        seen = [epoch for epoch, rows in enumerate(inputs["order"]) if used[rows].any()]
        if len(seen) < EPOCHS:
            yield Finding(
                f"in {EPOCHS} epochs the loader gave samples of the sampler's epochs {seen}, "
                f"expected {list(range(EPOCHS))}. Call sampler.set_epoch(epoch), for epoch 0, 1, "
                "2, …, before each first batch.",
                rank,
            )


def _factor(case: Case) -> float:
    """What the squared error was multiplied with in backward: HOT_FACTOR, or 1 without loss_fn.

    The only step of a sample moves its weights by lr · factor · y / (its batch · ranks).
    """
    ratios = []
    for rank, inputs in enumerate(case.inputs):
        used, got = _used(case, rank), case.answers[rank].get("p0")
        if used is None or got is None:
            continue
        for rows in inputs["order"]:
            for place, row in enumerate(rows):
                start = place // BATCH_SIZE * BATCH_SIZE
                size = min(BATCH_SIZE, len(rows) - start)
                step = HOT_LR * inputs["y"][row] / (size * case.world_size)
                if used[row]:
                    ratios.append(float((got[:, row] / step).mean()))
    plain = bool(ratios) and abs(float(np.median(ratios)) - 1.0) < 0.01
    return 1.0 if plain else HOT_FACTOR


def judge_train_loss(case: Case) -> Iterator[Finding]:
    """The reported loss is the mean over the samples of all ranks, before the step of each.

    Samples that the loop left out, which `judge_train_steps` finds, need not count. A loop that
    trained with the plain squared error instead of loss_fn may report that error. Ranks may
    exchange sums in each epoch or once at the end.
    """
    factor = _factor(case)
    expected, of_all = (_mean_losses(case, factor, only_used) for only_used in (True, False))
    for rank, answer in enumerate(case.answers):
        got = answer.get("losses")
        if oracle.agrees(got, of_all):
            continue
        hint = _explain_losses(case, rank, factor, got, expected)
        if wrong := oracle.differs(rank, "losses per epoch", got, expected, hint=hint):
            yield wrong


def _mean_losses(case: Case, factor: float, only_used: bool) -> np.ndarray:
    """Per epoch the mean loss over the samples of all ranks, or over those that made steps."""
    means = []
    for epoch in range(EPOCHS):
        squares = []
        for rank, inputs in enumerate(case.inputs):
            rows, used = inputs["order"][epoch], _used(case, rank)
            if only_used and used is not None and used.any():
                rows = rows[used[rows]]
            squares += (inputs["y"][rows].astype(np.float64) ** 2).mean(axis=1).tolist()
        means.append(factor * np.mean(squares) if squares else 0.0)
    return np.array(means)


def _explain_losses(case: Case, rank: int, factor: float, got: Any, expected: np.ndarray) -> str:
    """The likely reason, where a known mistake gives the same numbers; else ""."""
    means = np.zeros((case.world_size, EPOCHS))
    batches, last = np.zeros((2, case.world_size, EPOCHS))
    sizes = np.zeros(case.world_size)  # of the last batches
    for r, inputs in enumerate(case.inputs):
        for epoch, rows in enumerate(inputs["order"]):
            squares = factor * (inputs["y"][rows].astype(np.float64) ** 2).mean(axis=1)
            means[r, epoch] = squares.mean()
            starts = range(0, len(rows), BATCH_SIZE)
            of_batches = [squares[s : s + BATCH_SIZE].mean() for s in starts]
            batches[r, epoch], last[r, epoch] = np.mean(of_batches), of_batches[-1]
            sizes[r] = len(rows) - starts[-1]
    for said, wrong in {
        "That is the mean over this rank's samples only.": means[rank],
        "That is the mean of this rank's batches.": batches[rank],
        "That is the mean over ranks of each rank's mean: ranks differ in their number of "
        "samples.": means.mean(axis=0),
        "That is a mean of batches, which differ in size.": batches.mean(axis=0),
        "That is the loss of this rank's last batch.": last[rank],
        "That is the mean over the last batch of each rank.": np.average(
            last, axis=0, weights=sizes
        ),
        f"That is {case.world_size} times the mean.": expected * case.world_size,
    }.items():
        if oracle.agrees(got, wrong):
            return said
    return ""
