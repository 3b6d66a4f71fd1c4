"""Criteria for tasks 1, 2 and 4 of lab 1: from the process group to the training loop.

Every rank gets rows of the dataset that no other rank has (its remaining rows are nan). So final
weights that agree with the oracle prove that the ranks exchanged their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Sampler

from autograder.criteria.common import oracle
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs, integer

# --- setup ---------------------------------------------------------------------------------------


def draw_setup(draw: Draw) -> list[Values]:
    """A private vector per rank."""
    return [{"value": draw.private(r).normal(size=5)} for r in range(draw.world_size)]


def observe_setup(setup_distributed: Any, inputs: Values, context: Context) -> Values:
    """Sets up twice, then sums the private vectors over the resulting process group."""
    setup_distributed()
    group = dist.group.WORLD
    rank, world_size, device = setup_distributed()
    device = torch.device(device)
    value = torch.from_numpy(inputs["value"]).to(device)
    dist.all_reduce(value)
    return {
        "rank": integer(rank, "rank"),
        "world_size": integer(world_size, "world_size"),
        "device": device.type,
        "backend": str(dist.get_backend()),
        "sum": value.cpu().numpy(),
        "same_group": dist.group.WORLD is group,
    }


def judge_setup(case: Case) -> Iterator[Finding]:
    """Right rank and world size, a device that fits the backend, and a group that communicates."""
    total = np.sum([inputs["value"] for inputs in case.inputs], axis=0)
    for rank, answer in enumerate(case.answers):
        for what, expected in (("rank", rank), ("world_size", case.world_size)):
            if answer.get(what) != expected:
                yield Finding(f"{what}: expected {expected}, got {answer.get(what)}.", rank)
        pair = (answer.get("device"), answer.get("backend"))
        if pair not in (("cpu", "gloo"), ("cuda", "nccl"), ("cuda", "gloo")):
            yield Finding(
                f"device {pair[0]!r} with backend {pair[1]!r}: use nccl where each rank has a "
                "GPU of its own, else gloo on the CPU.",
                rank,
            )
        if answer.get("same_group") is not True:
            yield Finding("the second call replaced the process group.", rank)
        if wrong := differs(
            rank, "sum over ranks", answer.get("sum"), total, rtol=1e-9, atol=1e-12
        ):
            yield wrong


# --- wrap_model ----------------------------------------------------------------------------------

WRAP_SIZES = (5, 7, 2)


def draw_wrap(draw: Draw) -> list[Values]:
    """Every rank starts with different parameters and has different data."""
    return [
        oracle.draw_parameters(draw.private(r), WRAP_SIZES)
        | oracle.draw_batch(draw.private(r), 6, WRAP_SIZES)
        for r in range(draw.world_size)
    ]


def observe_wrap(wrap_model: Any, inputs: Values, context: Context) -> Values:
    """Parameters after wrapping, gradients after one backward."""
    model = oracle.mlp(inputs)
    wrapped = wrap_model(model, context.device)
    if not isinstance(wrapped, DistributedDataParallel):
        raise TypeError(
            "wrap_model: expected a torch.nn.parallel.DistributedDataParallel, "
            f"got {type(wrapped).__name__}"
        )
    x, y = (torch.from_numpy(inputs[k]).to(context.device) for k in "xy")
    oracle.mse(wrapped(x), y).backward()
    answer: Values = {}
    for i, p in enumerate(wrapped.parameters()):
        answer[f"p{i}"] = p.detach().cpu().numpy()
        answer[f"g{i}"] = oracle.grad_of(p)
    return answer


def judge_wrap(case: Case) -> Iterator[Finding]:
    """Parameters are rank 0's, gradients the mean over ranks."""
    start = oracle.parameters_of(case.inputs[0])
    local = [oracle.gradients(case.inputs[0], i["x"], i["y"]) for i in case.inputs]
    for rank, answer in enumerate(case.answers):
        for i, expected in enumerate(start):
            if wrong := oracle.differs(
                rank,
                f"parameter {i} after wrapping",
                answer.get(f"p{i}"),
                expected,
                hint="DDP copies rank 0's parameters to every rank.",
            ):
                yield wrong
                break
            grad = oracle.mean([grads[i] for grads in local])
            got = answer.get(f"g{i}")
            hint = oracle.explain_gradient(got, grad, local[rank][i], case.world_size)
            if wrong := oracle.differs(rank, f"gradient {i}", got, grad, hint=hint):
                yield wrong


# --- train ---------------------------------------------------------------------------------------

TRAIN_SIZES = (4, 6, 1)
PER_RANK, BATCH_SIZE, LR = 10, 4, 0.2  # an epoch's last batch: 2 samples (even ranks) or 1 (odd)
FACTOR = 0.5  # the loss function handed to the student's loop is this times the mean squared error


class RowsOfThisRank(Dataset):
    """Rows x [n, in], y [n, out]; the rows of other ranks are nan."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class DrawnSampler(Sampler[int]):
    """Yields the index list of the epoch that was set; epoch 0 until `set_epoch` is called.

    An epoch number out of range is clamped. So a wrong number shows in the weights, and not as an
    error in an innocent line of the student's code.
    """

    def __init__(self, per_epoch: np.ndarray) -> None:
        self.per_epoch, self.epoch = per_epoch.tolist(), 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch's list."""
        self.epoch = min(max(int(epoch), 0), len(self.per_epoch) - 1)

    def __iter__(self):
        return iter(self.per_epoch[self.epoch])

    def __len__(self) -> int:
        return len(self.per_epoch[self.epoch])


def _draw_training(draw: Draw, num_epochs: int, same_order: bool) -> list[Values]:
    world_size, rows = draw.world_size, 2 * PER_RANK
    start = oracle.draw_parameters(draw.shared("start"), TRAIN_SIZES)
    inputs = []
    for rank in range(world_size):
        rng = draw.private(rank)
        x = np.full((world_size * rows, TRAIN_SIZES[0]), np.nan, dtype=np.float32)
        y = np.full((world_size * rows, TRAIN_SIZES[-1]), np.nan, dtype=np.float32)
        mine = slice(rank * rows, (rank + 1) * rows)
        batch = oracle.draw_batch(rng, rows, TRAIN_SIZES)
        x[mine], y[mine] = batch["x"], batch["y"]
        own = PER_RANK - rank % 2  # ranks have equally many batches, not samples
        first = rng.permutation(rows)[:own]
        order = [first if same_order else rng.permutation(rows)[:own] for _ in range(num_epochs)]
        inputs.append(start | {"x": x, "y": y, "order": np.stack(order) + rank * rows})
    return inputs


def draw_train_steps(draw: Draw) -> list[Values]:
    """Two epochs in the same order, so that a missing call of `set_epoch` does not matter."""
    return _draw_training(draw, 2, same_order=True)


def draw_train_epochs(draw: Draw) -> list[Values]:
    """Three epochs, each in a different order."""
    return _draw_training(draw, 3, same_order=False)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return FACTOR * oracle.mse(output, target)


def observe_train(train: Any, inputs: Values, context: Context) -> Values:
    """Trains torch's DDP with the student's loop; returns final parameters and losses."""
    model = oracle.mlp(inputs).to(context.device)
    ids = [context.device] if context.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids)
    order = inputs["order"]
    losses = train(
        wrapped,
        RowsOfThisRank(inputs["x"], inputs["y"]),
        DrawnSampler(order),
        _loss,
        num_epochs=len(order),
        batch_size=BATCH_SIZE,
        lr=LR,
        device=context.device,
    )
    answer: Values = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.parameters())}
    if losses is not None:
        answer["losses"] = np.array([float(loss) for loss in losses])
    return answer


def _oracle_training(case: Case) -> tuple[list[np.ndarray], np.ndarray]:
    """Final parameters, and the mean loss over all samples of all ranks per epoch."""
    num_epochs = len(case.inputs[0]["order"])
    starts = range(0, PER_RANK, BATCH_SIZE)
    batches = [
        [
            (i["x"][rows], i["y"][rows])
            for i in case.inputs
            for rows in [i["order"][epoch][start : start + BATCH_SIZE]]
        ]
        for epoch in range(num_epochs)
        for start in starts
    ]
    parameters, losses = oracle.train(case.inputs[0], batches, FACTOR * LR)
    sizes = np.array([[len(x) for x, _ in step] for step in batches])
    sums = (sizes * FACTOR * np.array(losses)).sum(axis=1).reshape(num_epochs, len(starts))
    return parameters, sums.sum(axis=1) / (sizes.sum() / num_epochs)


def _judge_parameters(case: Case, hint: str) -> Iterator[Finding]:
    expected, _ = _oracle_training(case)
    for rank, answer in enumerate(case.answers):
        for i, value in enumerate(expected):
            if wrong := oracle.differs(
                rank,
                f"parameter {i} after training",
                answer.get(f"p{i}"),
                value,
                hint=hint,
                terms=[case.inputs[0][f"p{i}"]],
            ):
                yield wrong
                break


def judge_train_steps(case: Case) -> Iterator[Finding]:
    """Weights equal those of one process that trains on the global batch."""
    return _judge_parameters(
        case,
        "Per batch: zero the gradients, forward through the wrapped model, backward, one SGD step "
        "with lr; keep the last, smaller batch.",
    )


def judge_train_epochs(case: Case) -> Iterator[Finding]:
    """Like `judge_train_steps`, with an order per epoch that only `set_epoch` selects."""
    return _judge_parameters(
        case, "Call sampler.set_epoch(epoch), for epoch 0, 1, 2, …, before each first batch."
    )


def judge_train_loss(case: Case) -> Iterator[Finding]:
    """The reported loss is the mean over all samples of all ranks."""
    _, expected = _oracle_training(case)
    for rank, answer in enumerate(case.answers):
        if wrong := oracle.differs(
            rank,
            "losses per epoch",
            answer.get("losses"),
            expected,
            hint="Sum loss × batch size over the batches, sum that and the sample count over all "
            "ranks with one all-reduce that every rank calls, then divide.",
        ):
            yield wrong
