"""Recomputes what is right in float64, in one process, with torch alone.

`RTOL` is the relative tolerance for each dtype in which ranks compute. Sums over ranks, batches and
buckets may be taken in any order, so the criteria never ask for equality.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from autograder.criteria import criterion
from autograder.criteria.common.answers import read_tensor
from autograder.criteria.criterion import Draw, Finding, Values

RTOL = {"bfloat16": 2e-2, "float32": 2e-4, "float64": 1e-9}


def draw_parameters(rng: np.random.Generator, sizes: Sequence[int]) -> Values:
    """Parameters p0, p1, … of `mlp(sizes)`: weight [out, in] and bias [out] per layer, float32."""
    arrays: Values = {}
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        arrays[f"p{2 * i}"] = rng.normal(0, fan_in**-0.5, (fan_out, fan_in)).astype(np.float32)
        arrays[f"p{2 * i + 1}"] = rng.normal(0, 0.3, fan_out).astype(np.float32)
    return arrays


def draw_batch(rng: np.random.Generator, count: int, sizes: Sequence[int]) -> Values:
    """Inputs x [count, in] and targets y [count, out], float32."""
    return {
        "x": rng.normal(size=(count, sizes[0])).astype(np.float32),
        "y": rng.normal(size=(count, sizes[-1])).astype(np.float32),
    }


def private_batches(
    draw: Draw, start: Values, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> list[Values]:
    """`start` for every rank, and with it the rank's own batches x/0, y/0, x/1, y/1, …

    Args:
        shapes: (samples,) of each batch, or (micro-batches, samples).
    """
    inputs = []
    for rank in range(draw.world_size):
        rng, values = draw.private(rank), dict(start)
        for number, shape in enumerate(shapes):
            batch = draw_batch(rng, math.prod(shape), sizes)
            values |= {f"{name}/{number}": batch[name].reshape(*shape, -1) for name in "xy"}
        inputs.append(values)
    return inputs


def mlp(arrays: Values, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Linear, tanh, Linear, … with the parameters p0, p1, … of `arrays`."""
    values = parameters_of(arrays)
    layers: list[nn.Module] = []
    for weight, bias in zip(values[::2], values[1::2], strict=True):
        layers += [linear(weight, bias, dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def linear(
    weight: np.ndarray, bias: np.ndarray | None = None, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    """A layer with these parameters."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
        if bias is not None:
            layer.bias.copy_(torch.from_numpy(bias))
    return layer


def parameters_of(arrays: Values) -> list[np.ndarray]:
    """p0, p1, … in order."""
    return [arrays[f"p{i}"] for i in range(sum(k[0] == "p" and k[1:].isdigit() for k in arrays))]


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error over all elements."""
    return ((read_tensor(output, "the model") - target) ** 2).mean()


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ordered(loss: Loss, answer: Values) -> Loss:
    """`loss(prediction, target)`, which notes in `answer` how it was called.

    The numbers do not show either mistake: the mean squared error stays the same if the target
    comes first, and a student who never calls `loss` may compute the same value.
    """

    def noted(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        answer["loss called"] = True
        if target.requires_grad:
            answer["target first"] = True
        return loss(prediction, target)

    return noted


def find_misused_loss(answer: Values, rank: int) -> Finding | None:
    """A finding if the loss from `ordered` got the target first, or was never called."""
    if answer.get("loss called") is not True:
        return Finding("loss_fn was never called; no other loss may take its place.", rank)
    if answer.get("target first") is True:
        return Finding("loss_fn got the target first; it takes (prediction, target).", rank)
    return None


def gradients(arrays: Values, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Gradient of the mean squared error for every parameter of `mlp(arrays)`, float64."""
    model = mlp(arrays, torch.float64)
    mse(model(torch.from_numpy(x).double()), torch.from_numpy(y).double()).backward()
    return [grad_of(p) for p in model.parameters()]


def grad_of(parameter: torch.Tensor) -> np.ndarray:
    """The gradient as a NumPy array; zeros if it is None."""
    grad = parameter.grad
    return np.zeros(parameter.shape) if grad is None else grad.detach().cpu().numpy()


def mean(per_rank: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over ranks."""
    return np.mean(np.stack([np.asarray(a, dtype=np.float64) for a in per_rank]), axis=0)


def differs(
    rank: int,
    what: str,
    got: object,
    expected: np.ndarray,
    *,
    dtype: str = "float32",
    hint: str = "",
    terms: Sequence[np.ndarray] = (),
) -> Finding | None:
    """A finding unless `got` is `expected`, at this dtype's tolerance.

    The absolute tolerance is proportional to the largest value of `expected` and `terms`.

    Args:
        terms: the summands of which `expected` is a sum or mean, or its values before training. If
            the summands nearly cancel in a tensor of one number, the rounding error is as large as
            that of the summands, not as that of the sum.
    """
    scale = max((float(np.abs(a).max()) for a in (expected, *terms) if np.size(a)), default=0.0)
    rtol = RTOL[dtype]
    return criterion.differs(
        rank, what, got, expected, rtol=rtol, atol=rtol * scale + 1e-12, hint=hint
    )


def agrees(got: object, expected: np.ndarray, dtype: str = "float32") -> bool:
    """Whether `got` is `expected`, at this dtype's tolerance."""
    return differs(0, "", got, expected, dtype=dtype) is None


def explain_gradient(
    got: object, mean_grad: np.ndarray, local_grad: np.ndarray, world_size: int
) -> str:
    """The likely reason why `got` is not the mean over ranks; "" if none is known."""
    if not isinstance(got, np.ndarray) or got.shape != mean_grad.shape:
        return ""
    if world_size > 1 and agrees(got, mean_grad * world_size):
        return f"That is {world_size} times the mean: the gradients were summed, not averaged."
    if agrees(got, local_grad) and not local_grad.any():
        return "This rank has no gradient of its own here: it gets the mean of all ranks, too."
    if agrees(got, local_grad):
        return (
            "That is this rank's own gradient: it was not reduced, or the mean was not written "
            "back to it."
        )
    if agrees(got, mean_grad / world_size):
        return "That is the mean divided by the world size once more."
    on_node = world_size - 1  # see `places.on_two_nodes`
    if on_node > 1 and agrees(got, mean_grad * world_size / on_node):
        return (
            f"That is the sum divided by {on_node}, not by {world_size}: the first node has "
            f"{on_node} ranks here. Is LOCAL_WORLD_SIZE taken for WORLD_SIZE, or a number written "
            "into the code?"
        )
    if world_size != 2 and agrees(got, mean_grad * world_size / 2):
        return "That is the sum divided by 2: is the number of ranks written into the code?"
    return ""


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    after_step: Callable[[], object] = lambda: None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Trains a float64 model on one batch (x, y) per step; final parameters and all losses."""
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = mse(model(torch.from_numpy(x).double()), torch.from_numpy(y).double())
        loss.backward()
        optimizer.step()
        after_step()
        losses.append(loss.item())
    return [p.detach().numpy() for p in model.parameters()], np.array(losses)


def train(
    arrays: Values,
    batches: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]],
    lr: float,
    clear: bool = True,
):
    """SGD on the mean over ranks of each rank's mean loss.

    Args:
        arrays: initial parameters.
        batches: one entry per step, which holds one (x, y) per rank.
        lr: learning rate.
        clear: False gives the result of a loop that never clears its gradients.

    Returns:
        final parameters (float64), and for each step the loss of each rank before the update.
    """
    model = mlp(arrays, torch.float64)
    losses: list[list[float]] = []
    for step in batches:
        if clear:
            model.zero_grad()
        per_rank = [
            mse(model(torch.from_numpy(x).double()), torch.from_numpy(y).double()) for x, y in step
        ]
        torch.stack(per_rank).mean().backward()
        losses.append([loss.item() for loss in per_rank])
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * torch.from_numpy(grad_of(p))
    return [p.detach().numpy() for p in model.parameters()], losses
