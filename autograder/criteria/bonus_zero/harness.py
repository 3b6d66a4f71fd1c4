"""What the criteria of the sharded optimiser share: parameters, gradients, one process's result.

The loss is the sum of all parameters, each multiplied by a number drawn for this rank. So these
numbers are the gradient, whatever the parameters are, and the backward pass is real, with hooks.

The criteria prescribe no layout: they compare the values, wherever and in whatever order the ranks
hold them. A criterion that is not about the mean compares updates up to one factor, so that a wrong
factor costs only one criterion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, read
from autograder.criteria.criterion import Case, Draw, Finding, Values

ROUNDED = 4e-3  # relative; numbers that are no further apart were rounded on their way
Groups = Sequence[tuple[Sequence[Sequence[int]], Values]]  # (shapes, options) of each group


def draw_training(
    draw: Draw,
    groups: Groups,
    steps: int,
    micro_batches: int = 1,
    dtype: str = "float32",
    **more: Any,
) -> list[Values]:
    """Parameters p{i}, equal on all ranks; private gradients c{step}/{micro-batch}/{i}.

    All arrays have one dtype.
    """
    rng = draw.shared()
    shapes = [list(shape) for shapes, _ in groups for shape in shapes]
    counts = [len(shapes) for shapes, _ in groups]
    common: Values = {
        "shapes": shapes,
        "counts": counts,
        "options": [options for _, options in groups],
        "steps": steps,
        "micro_batches": micro_batches,
        "frozen": [],
        "tied": [],
        **more,
    }
    for i, shape in enumerate(shapes):
        common[f"p{i}"] = np.asarray(rng.normal(size=shape), dtype=dtype)
    inputs = []
    for rank in range(draw.world_size):
        own, values = draw.private(rank), dict(common)
        for step in range(steps):
            for micro in range(micro_batches):
                for i, shape in enumerate(shapes):
                    # All ranks and steps share the last term, so sums over them are not only noise.
                    drawn = own.normal(size=shape) + 0.7 * np.sign(common[f"p{i}"])
                    values[f"c{step}/{micro}/{i}"] = np.asarray(drawn, dtype=dtype)
        inputs.append(values)
    return inputs


def leave_out(inputs: list[Values], rank: int, step: int, micro: int, i: int) -> None:
    """Removes this rank's gradient of parameter i in this step and micro-batch."""
    inputs[rank].pop(f"c{step}/{micro}/{i}", None)


def make_parameters(inputs: Values, device: torch.device) -> list[nn.Parameter]:
    """The drawn parameters; frozen parameters do not require a gradient."""
    parameters = []
    for i in range(len(inputs["shapes"])):
        value = torch.from_numpy(np.array(inputs[f"p{i}"])).to(device)
        parameters.append(nn.Parameter(value, requires_grad=i not in inputs["frozen"]))
    return parameters


def make_groups(inputs: Values, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """The optimiser's groups; tied parameters occur again at the end of the last group."""
    groups, at = [], 0
    for count, options in zip(inputs["counts"], inputs["options"], strict=True):
        groups.append({"params": parameters[at : at + count], **options})
        at += count
    groups[-1]["params"] = groups[-1]["params"] + [parameters[i] for i in inputs["tied"]]
    return groups


def backward(parameters: list[nn.Parameter], inputs: Values, step: int, micro: int = 0) -> None:
    """A backward pass that gives each parameter this rank's gradient, if the rank has one."""
    terms = []
    for i, parameter in enumerate(parameters):
        name = f"c{step}/{micro}/{i}"
        if parameter.requires_grad and name in inputs:
            factor = torch.from_numpy(np.array(inputs[name])).to(parameter.device)
            terms.append((parameter * factor).sum())
    if terms:
        torch.stack(terms).sum().backward()


def take_step(optimizer: Any, parameters: list[nn.Parameter], inputs: Values, step: int) -> None:
    """One step: backward passes that are reduced, an update, and the gradients forgotten."""
    for micro in range(inputs["micro_batches"]):
        backward(parameters, inputs, step, micro)
        optimizer.reduce()
    optimizer.step()
    optimizer.zero_grad()


def none_left(parameters: list[nn.Parameter]) -> bool:
    """Whether no parameter has a gradient."""
    return all(parameter.grad is None for parameter in parameters)


def arrays_of(parameters: Sequence[torch.Tensor], name: str) -> Values:
    """The parameters as arrays name0, name1, …"""
    return {f"{name}{i}": p.detach().cpu().numpy().copy() for i, p in enumerate(parameters)}


def numbers_of(optimizer: Any) -> np.ndarray:
    """All numbers of `gradients()`, in one row."""
    gradients = read(optimizer.gradients(), list, "gradients()", "tensors")
    for gradient in gradients:
        if not isinstance(gradient, torch.Tensor):
            raise TypeError(f"gradients(): expected tensors, got {type(gradient).__name__}")
    flat = [gradient.detach().cpu().numpy().ravel() for gradient in gradients]
    return np.concatenate(flat) if flat else np.zeros(0, dtype=np.float32)


# --- what is right -------------------------------------------------------------------------------


def mean_gradient(case: Case, step: int, micro: int, i: int) -> np.ndarray:
    """The mean over all ranks in float64; a missing gradient counts as zeros."""
    zeros = np.zeros(tuple(case.inputs[0]["shapes"][i]))
    return oracle.mean([values.get(f"c{step}/{micro}/{i}", zeros) for values in case.inputs])


def mean_of_those_that_have(case: Case, step: int, micro: int, i: int) -> np.ndarray:
    """A wrong mean: only over the ranks that have a gradient."""
    having = [v[name] for v in case.inputs if (name := f"c{step}/{micro}/{i}") in v]
    return oracle.mean(having) if having else np.zeros(tuple(case.inputs[0]["shapes"][i]))


def mean_or_none(case: Case, step: int, micro: int, i: int) -> np.ndarray | None:
    """A wrong mean: None, not zeros, if no rank has a gradient."""
    have = any(f"c{step}/{micro}/{i}" in values for values in case.inputs)
    return mean_gradient(case, step, micro, i) if have else None


def trained(
    case: Case,
    kind: Any,
    options: Values,
    lr_factors: Sequence[float] = (),
    mean: Callable[[Case, int, int, int], np.ndarray | None] = mean_gradient,
) -> list[Any]:
    """The parameters after each step, as one process computes them in float64.

    Args:
        mean: takes the mean over ranks; a micro-batch with the mean None is left out.
    """
    inputs = case.inputs[0]
    parameters = [
        nn.Parameter(torch.from_numpy(np.array(inputs[f"p{i}"])).double())
        for i in range(len(inputs["shapes"]))
    ]
    trainable = [i for i in range(len(parameters)) if i not in inputs["frozen"]]
    kept = dict(inputs) | {"tied": []}
    groups = make_groups(kept, parameters)
    for group in groups:
        group["params"] = [p for p in group["params"] if any(p is parameters[i] for i in trainable)]
    optimizer = kind([group for group in groups if group["params"]], **options)
    history = []
    for step in range(inputs["steps"]):
        for i in trainable:
            means = [mean(case, step, m, i) for m in range(inputs["micro_batches"])]
            there = [each for each in means if each is not None]
            total = torch.from_numpy(np.asarray(np.sum(there, axis=0))) if there else None
            parameters[i].grad = total
        optimizer.step()
        for group, factor in zip(optimizer.param_groups, lr_factors, strict=False):
            group["lr"] *= factor
        history.append([p.detach().numpy().copy() for p in parameters])
    return history


def same_numbers(got: Sequence[Any], expected: Sequence[np.ndarray]) -> str | None:
    """How the nonzero numbers of all ranks differ from the expected ones, or None."""
    flat = []
    for each in got:
        if not is_floats(each) or each.ndim != 1:
            return "nothing was returned."
        if not np.isfinite(each).all():
            return "there are numbers that are not finite."
        flat.append(each.astype(np.float64))
    numbers = np.sort(np.concatenate(flat))
    numbers = numbers[numbers != 0]
    wanted = np.sort(np.concatenate([np.asarray(e, dtype=np.float64).ravel() for e in expected]))
    wanted = wanted[wanted != 0]
    if len(numbers) != len(wanted):
        why = "some are missing" if len(numbers) < len(wanted) else "some are on several ranks"
        return (
            f"all ranks together hold {len(numbers)} numbers that are not zero, expected "
            f"{len(wanted)}, each once, on one rank: {why}."
        )
    scale = float(np.abs(wanted).max(initial=0.0))
    apart = np.abs(numbers - wanted)
    off = apart > 1e-4 * np.abs(wanted) + 1e-5 * scale
    if not off.any():
        return None
    at = int(np.argmax(np.where(off, np.abs(wanted), 0)))
    why = ""
    if (apart <= ROUNDED * (np.abs(wanted) + scale)).all():
        why = " All numbers are there, but rounded: expected float32 on the whole way."
    return f"the largest number that differs should be {wanted[at]:.6g}, is {numbers[at]:.6g}.{why}"


def explain_numbers(got: Sequence[Any], means: Sequence[np.ndarray], world_size: int) -> str:
    """The likely reason why the numbers are not those of the mean, or an empty string."""
    for factor, why in (
        (world_size, f"That is {world_size} times the mean: it was summed, not averaged."),
        (1 / world_size, "That is the mean divided by the number of ranks once more."),
        (world_size / 2, "That is the sum divided by 2: is the number of ranks in the code?"),
    ):
        if factor != 1 and same_numbers(got, [mean * factor for mean in means]) is None:
            return why
    return ""


def same_direction(
    case: Case, rank: int, name: str, expected: Sequence[np.ndarray]
) -> Finding | None:
    """A finding unless the parameters moved as expected, up to one positive common factor."""
    inputs, answer = case.inputs[0], case.answers[rank]
    moved, wanted = [], []
    for i, value in enumerate(expected):
        got, start = answer.get(f"{name}{i}"), inputs[f"p{i}"].astype(np.float64)
        if not is_floats(got, start.shape):
            return Finding(f"parameter {i}: nothing of its shape was returned.", rank)
        if not np.isfinite(got).all() or np.abs(got).max(initial=0) > 1e6:
            return Finding(f"parameter {i} is not finite, or huge.", rank)
        moved.append((got - start).ravel())
        wanted.append((value - start).ravel())
    u, e = np.concatenate(moved), np.concatenate(wanted)
    factor = float(u @ e / max(e @ e, 1e-30))
    if not factor > 1e-3:
        return Finding("the parameters have not moved, or not along the gradient.", rank)
    scale = float(np.abs(e).max())

    def off_by(factor: float) -> list[np.ndarray]:
        return [
            np.abs(one / factor - other) > 1e-3 * np.abs(other) + 1e-3 * scale
            for one, other in zip(moved, wanted, strict=True)
        ]

    if not any(off.any() for off in off_by(factor)):
        return None
    # With the common factor, all numbers may be off: then a different factor shows the place.
    others = [(other, off_by(other)) for other in (factor, 1.0, float(case.world_size))]
    counted = [(sum(int(off.sum()) for off in offs), other, offs) for other, offs in others]
    count, factor, offs = min((each for each in counted if each[0]), key=lambda each: each[0])
    i = next(i for i, off in enumerate(offs) if off.any())
    said = _off_place(inputs, i, offs[i], moved[i], wanted[i])
    if factor != 1 and 2 * count < len(e):
        said += f" Most other changes are {factor:.3g} times as large as expected."
    return Finding(said, rank)


def _off_place(inputs: Values, i: int, off: np.ndarray, one: np.ndarray, other: np.ndarray) -> str:
    """The first place of parameter i that is off, in words."""
    k, shape = int(np.argmax(off)), tuple(inputs["shapes"][i])
    place = [int(n) for n in np.unravel_index(k, shape)]
    kind = ", which is frozen" if i in inputs["frozen"] else ""
    kind += ", which was given twice" if i in inputs["tied"] else ""
    why = ""
    own = float(one @ other / max(other @ other, 1e-30))
    if np.abs(one - own * other).max() <= 1e-3 * abs(own) * np.abs(other).max():
        why = f" All changes of this parameter are {own:.3g} times what they should be."
    return (
        f"parameter {i}, shape {shape}{kind}: expected a change of {other[k]:.5g} at {place}, got "
        f"{one[k]:.5g}.{why}"
    )
