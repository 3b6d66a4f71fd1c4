"""Finds the known mistake behind a wrong answer: computes its results and compares them.

A judge calls this once it has found an answer wrong; no points depend on it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, same_array, told
from autograder.criteria.criterion import Case, Finding, Values

Start = Callable[[Values], tuple[nn.Module, torch.optim.Optimizer]]


def because(wrong: Finding, hint: str) -> Finding:
    """The finding with a hint; hints take long to compute, so only wrong answers get one."""
    return Finding(f"{wrong.message} {hint}".rstrip(), wrong.rank)


def _are(answer: Values, names: Sequence[str], values: Sequence[np.ndarray]) -> bool:
    return all(
        oracle.agrees(answer.get(name), value, "float64")
        for name, value in zip(names, values, strict=True)
    )


# --- a step by hand ------------------------------------------------------------------------------


def explain_sgd(case: Case, rank: int, start: Start) -> str:
    """Which divisor, or which gradients of an earlier backward, explain this rank's weights."""
    w = case.world_size
    for divisors, clears, hint in _steps_by_hand(w):
        found = _by_hand(case, start, divisors, clears)[rank]
        if _are(case.answers[rank], [f"p{i}" for i in range(len(found))], found):
            return hint
    return ""


def _steps_by_hand(w: int) -> Iterator[tuple[list[int], str, str]]:
    """Each rank's divisor, when gradients are cleared, and the hint for this mistake."""
    old = "Gradients that were in p.grad before the call are in the step: clear them before "
    yield [w] * w, "never", f"{old}backward()."
    yield [w] * w, "after", f"{old}backward(), not after the step."
    mean = f"The sum over ranks has to be divided by their number, {w}, once"
    if w > 1:
        yield [1] * w, "before", f"{mean}: here it was not divided."
        yield [w * w] * w, "before", f"{mean}: here it was divided twice."
    if w > 2:
        local = [w - 1] * (w - 1) + [1]  # see `places.on_two_nodes`
        yield local, "before", f"{mean}: here it was divided by LOCAL_WORLD_SIZE."
        yield [2] * w, "before", f"{mean}: here it was divided by 2."


def _by_hand(
    case: Case, start: Start, divisors: Sequence[int], clears: str
) -> list[list[np.ndarray]]:
    """Each rank's weights. As in the check, p.grad is not empty before the first step."""
    runs = [start(inputs) for inputs in case.inputs]
    for step in range(case.inputs[0]["steps"]):
        for (model, optimizer), inputs in zip(runs, case.inputs, strict=True):
            x, y = (torch.from_numpy(inputs[f"{n}/{step}"]).double() for n in "xy")
            if step == 0:
                oracle.mse(model(x), y).backward()
            if clears == "before":
                optimizer.zero_grad()
            oracle.mse(model(x), y).backward()
        everyones = [map(oracle.grad_of, model.parameters()) for model, _ in runs]
        sums = [torch.from_numpy(np.sum(grads, axis=0)) for grads in zip(*everyones, strict=True)]
        for (model, optimizer), divisor in zip(runs, divisors, strict=True):
            for p, total in zip(model.parameters(), sums, strict=True):
                p.grad = total / divisor
            optimizer.step()
            if clears == "after":
                optimizer.zero_grad()
    return [[p.detach().numpy() for p in model.parameters()] for model, _ in runs]


# --- scales --------------------------------------------------------------------------------------


def explain_scales(case: Case, rank: int, first: float) -> str:
    """Which overflows explain a rank's scale after each step; "" if none do."""
    answer = case.answers[rank]
    got, weights = told(answer, "scales"), [v for k, v in answer.items() if k[:1] == "p"]
    steps, interval = range(case.inputs[0]["steps"]), case.inputs[0]["growth_interval"]

    def has(name: str, step: int) -> bool:
        return any(not np.isfinite(i[f"{name}/{step}"]).all() for i in case.inputs)

    flags = [has("x", s) or has("y", s) for s in steps]
    is_nan = [has("x", s) for s in steps]
    is_inf = [has("y", s) for s in steps]
    since = [any(flags[: s + 1]) for s in steps]
    since_inf = [is_nan[s] or any(has("y", t) for t in range(s)) for s in steps]
    stays = "its inf or nan is still in p.grad. Clear the gradients before each backward()."
    if any(not np.isfinite(v).all() for v in weights if is_floats(v)):
        stays = "the optimizer has stepped with it, and the weights are no longer finite."
    step = flags.index(True) if any(flags) else 0
    falls_at_once = isinstance(got, list) and got[:2] == [first, first / 2]
    if falls_at_once and step > 1 and any(np.nanmax(abs(v)) > 1e9 for v in weights if is_floats(v)):
        return (
            "It falls before any gradient overflows, and the weights are huge: max_norm shortens "
            "gradients that are longer, and leaves all others as they are."
        )
    for found, hint in (
        (since, f"Since the first overflow, in step {step}, each step counts as one: {stays}"),
        (since_inf, "A gradient that is infinite and not nan is an overflow, too: isfinite()."),
        (is_nan, "A gradient that is infinite and not nan is an overflow, too: isfinite()."),
        (is_inf, "A gradient that is nan is an overflow, too: isfinite()."),
    ):
        scale, good, scales = first, 0, []
        for overflow in found:
            good = 0 if overflow else good + 1
            scale = scale / 2 if overflow else scale
            if good == interval:
                scale, good = scale * 2, 0
            scales.append(scale)
        if got == scales:
            return hint
    return ""


# --- the same start ------------------------------------------------------------------------------


def explain_broadcast(case: Case, answer: Values, name: str) -> str:
    """What is wrong with a parameter or buffer that is not rank 0's."""
    first, got = case.inputs[0], answer.get(name)
    hint = "Every rank has to begin with rank 0's."
    if name.startswith("buffer"):
        hint = "It enters the forward pass like a weight, and no gradient will repair it."
        others = [n for n in first["names"] if n.startswith("buffer") and n not in first["deep"]]
        if name in first["deep"] and all(same_array(answer.get(n), first[n]) for n in others):
            hint += " It is in a layer of a block, not in the model itself or in its child."
    elif name in first["deep"]:
        hint += " It is in a layer of a block, not in the model itself or in its child."
    if name.startswith("frozen"):
        hint = "It is not trained, but it is used: frozen at another value on each rank."
    if name.endswith("count") and same_array(got, np.float32(first[name]).astype(np.int64)):
        hint = "It is an int64 and has to arrive exactly: it must not travel as a float32."
    elif oracle.agrees(got, oracle.mean([inputs[name] for inputs in case.inputs])):
        hint = "That is the mean over the ranks: every rank has to begin with rank 0's."
    return hint


# --- a restart -----------------------------------------------------------------------------------


def explain_resume(
    answer: Values,
    name: str,
    model: nn.Module,
    saved: dict[str, Any],
    new: Callable[[nn.Module], torch.optim.Optimizer],
    go_on: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> str:
    """What has not come back after a restart, from the value called `name` that is wrong.

    Args:
        model: as it was when it was saved.
        saved: the optimizer's state then.
        new: makes an optimizer as a new process has it.
        go_on: trains to the end.
    """
    if "running" in name or "num_batches" in name:
        return "It is a buffer of BatchNorm, which evaluation needs: it has to come back, too."
    for parts, hint in (
        ((), "The optimizer began anew, with its first learning rate and without its memory."),
        (("state",), "The optimizer's learning rate did not come back: it is in param_groups."),
        (("param_groups",), "The optimizer's memory (momentum, Adam's moments) did not come back."),
    ):
        again = copy.deepcopy(model)
        other = new(again)
        state = other.state_dict()
        other.load_state_dict(copy.deepcopy(state | {part: saved[part] for part in parts}))
        go_on(again, other)
        values = {n: p.detach().double().numpy() for n, p in again.named_parameters()}
        if _are(answer, list(values), list(values.values())):
            return hint
    return "The model, the optimizer's memory and its learning rate all have to come back."
