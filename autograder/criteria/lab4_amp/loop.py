"""Criteria for the training loop with mixed precision, judged by the parameters after training.

The loop gets the grader's scaler, so a mistake in the student's own scaler costs no points here.
All criteria but the first train in float32, so a mistake with autocast costs no points there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograder.criteria.common import oracle
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs
from autograder.criteria.lab4_amp.scaler import same

SIZES = (5, 8, 2)
BATCH, LR = 4, 0.1
NEVER = 1_000_000
TINY = 1e-7  # with this factor on the loss, the gradients underflow in fp16
HALF_RTOL = 0.05  # relative to the largest update; fp16 has 11 bits, bf16 has 8
GAMMA = 0.5  # the scheduler's factor per step


class GivenScaler(torch.amp.GradScaler):
    """torch's scaler; also reports whether a step was taken, and tolerates a missing update."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> bool:
        """Takes the step if all gradients are finite; returns whether the step was taken."""
        state = self._per_optimizer_states[id(optimizer)]
        if getattr(state["stage"], "name", "") == "STEPPED":
            self._per_optimizer_states.clear()
        super().step(optimizer, *args, **kwargs)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return not any(float(value.item()) for value in found.values())

    def update(self, new_scale: Any = None) -> None:
        """Works also without a step before it, where torch raises; counts this as a good step."""
        states = self._per_optimizer_states.values()
        if not any(state["found_inf_per_device"] for state in states):
            new_scale = self.get_scale()
            if self.get_growth_interval() == 1:
                new_scale *= self.get_growth_factor()
        super().update(new_scale)


# --- draw ----------------------------------------------------------------------------------------


def _draw(draw: Draw, steps: int, settings: Values) -> list[Values]:
    """The same start on all ranks, private batches x/0, y/0, …, and `settings` for all ranks."""
    start = oracle.draw_parameters(draw.shared("start"), SIZES)
    inputs = []
    for rank in range(draw.world_size):
        rng, values = draw.private(rank), start | {"settings": settings, "steps": steps}
        for step in range(steps):
            batch = oracle.draw_batch(rng, BATCH, SIZES)
            values |= {f"x/{step}": batch["x"], f"y/{step}": batch["y"]}
        inputs.append(values)
    return inputs


def draw_fp16(draw: Draw) -> list[Values]:
    """Float16, and a loss so small that its gradients underflow without a large scale."""
    scale = float(2 ** draw.shared("scale").integers(15, 18))
    return _draw(draw, 5, {"scale": scale, "factor": TINY, "lr": LR / TINY, "dtype": "float16"})


def draw_update(draw: Draw) -> list[Values]:
    """The scale grows after every step."""
    scale = float(2 ** draw.shared("scale").integers(4, 9))
    return _draw(draw, 5, {"scale": scale, "interval": 1})


def draw_clip(draw: Draw) -> list[Values]:
    """Small and large gradients; max_norm lies between their norms, far below any scaled norm."""
    rng = draw.shared("clip")
    scale = float(2 ** rng.integers(6, 11))
    inputs = _draw(draw, 6, {"scale": scale})
    large = rng.permutation([True, True, True, False, False, False])
    for values in inputs:
        for step, is_large in enumerate(large):
            values[f"y/{step}"] *= np.float32(6.0 if is_large else 0.3)
    norms = np.array([_norm(_mean_gradients(inputs, step)) for step in range(6)])
    small_norm, large_norm = norms[~large].mean(), norms[large].mean()
    for values in inputs:
        values["settings"] = values["settings"] | {
            "max_norm": float(small_norm + 0.3 * (large_norm - small_norm))
        }
    return inputs


def draw_skips(draw: Draw) -> list[Values]:
    """In two of seven steps the loss of one rank overflows, in any precision."""
    rng, world_size = draw.shared("skips"), draw.world_size
    scale = float(2 ** rng.integers(9, 12))
    inputs = _draw(draw, 7, {"scale": scale, "scheduler": True, "clears": False})
    for step in rng.choice(np.arange(1, 6), 2, replace=False):
        inputs[int(rng.integers(world_size))][f"y/{step}"][0, 0] = 3e38
    return inputs


def draw_accumulates(draw: Draw) -> list[Values]:
    """Three steps of k batches each; the scale grows after every step."""
    rng = draw.shared("k")
    k, scale = int(rng.integers(2, 5)), float(2 ** rng.integers(4, 9))
    return _draw(draw, 3 * k, {"scale": scale, "interval": 1, "accumulate": k})


# --- observe -------------------------------------------------------------------------------------


def observe(train_amp: Any, inputs: Values, context: Context) -> Values:
    """Trains; the parameters, learning rate and scale at the end, and the losses."""
    settings, device = inputs["settings"], context.device
    model = wrap(oracle.mlp(inputs).to(device), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.get("lr", LR))
    scaler = GivenScaler(
        device.type, init_scale=settings["scale"], growth_interval=settings.get("interval", NEVER)
    )
    if settings.get("clears", True):
        # Only `judge_skips` tests for a missing zero_grad(). In all other cases the gradients are
        # cleared here. Otherwise the scale would decide whether that mistake shows: the gradients
        # left from the last step are unscaled, and the new ones are scaled.
        optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    scheduler = None
    if settings.get("scheduler"):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=GAMMA)
    batches = [
        (
            torch.from_numpy(inputs[f"x/{step}"]).to(device),
            torch.from_numpy(inputs[f"y/{step}"]).to(device),
        )
        for step in range(inputs["steps"])
    ]
    factor = settings.get("factor", 1.0)
    losses = train_amp(
        model,
        batches,
        lambda prediction, target: factor * oracle.mse(prediction, target),
        optimizer,
        scaler,
        dtype=torch.float16 if settings.get("dtype") else None,
        max_norm=settings.get("max_norm"),
        accumulate=settings.get("accumulate", 1),
        scheduler=scheduler,
    )
    answer: Values = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.parameters())}
    if settings.get("max_norm"):
        answer["two batches"] = [
            _raises(train_amp, inputs, batches[:2], device, limit) for limit in (None, 1e9)
        ]
    answer["scale"] = float(scaler.get_scale())
    answer["lr"] = float(optimizer.param_groups[0]["lr"])
    if losses is not None:
        answer["losses"] = np.array([float(loss) for loss in losses])
    return answer


def _raises(
    train_amp: Any, inputs: Values, batches: Any, device: torch.device, max_norm: float | None
) -> str:
    """The error that a step of two batches raises, as text; "" if none."""
    model = wrap(oracle.mlp(inputs).to(device), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = GivenScaler(device.type, init_scale=8.0, growth_interval=NEVER)
    try:
        train_amp(
            model,
            batches,
            oracle.mse,
            optimizer,
            scaler,
            dtype=None,
            max_norm=max_norm,
            accumulate=2,
            scheduler=None,
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def wrap(module: nn.Module, device: torch.device) -> DistributedDataParallel:
    """torch's DDP around a module."""
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=ids)


# --- oracle --------------------------------------------------------------------------------------


def _mean_gradients(
    inputs: Sequence[Values], step: int, parameters: list[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Gradients of the mean squared error, averaged over ranks, float64."""
    arrays = inputs[0] if parameters is None else {f"p{i}": p for i, p in enumerate(parameters)}
    local = [oracle.gradients(arrays, i[f"x/{step}"], i[f"y/{step}"]) for i in inputs]
    return [oracle.mean(grads) for grads in zip(*local, strict=True)]


def _norm(gradients: Sequence[np.ndarray]) -> float:
    return float(np.sqrt(sum((g**2).sum() for g in gradients)))


def _train(
    case: Case, *, max_norm: float | None = None, skip: Sequence[int] = (), gamma: float = 1.0
) -> list[np.ndarray]:
    """Final parameters of a single process; the steps in `skip` are left out."""
    accumulate = case.inputs[0]["settings"].get("accumulate", 1)
    parameters = [p.astype(np.float64) for p in oracle.parameters_of(case.inputs[0])]
    lr = LR
    for first in range(0, case.inputs[0]["steps"], accumulate):
        if first in skip:
            continue
        each = [_mean_gradients(case.inputs, first + i, parameters) for i in range(accumulate)]
        gradients = [oracle.mean(grads) for grads in zip(*each, strict=True)]
        if max_norm is not None and _norm(gradients) > max_norm:
            gradients = [g * max_norm / _norm(gradients) for g in gradients]
        parameters = [p - lr * g for p, g in zip(parameters, gradients, strict=True)]
        lr *= gamma
    return parameters


# --- judge ---------------------------------------------------------------------------------------


def _judge_parameters(
    case: Case, expected: list[np.ndarray], hint: str, *, rtol: float = 2e-3
) -> list[Finding]:
    """Compares the changes of all parameters with the changes in a single process."""
    findings: list[Finding] = []
    start = oracle.parameters_of(case.inputs[0])
    for rank, answer in enumerate(case.answers):
        for i, (value, before) in enumerate(zip(expected, start, strict=True)):
            if wrong := change_differs(
                rank, f"parameter {i}", answer.get(f"p{i}"), value, before, rtol, hint
            ):
                findings.append(wrong)
                break
    return findings


def change_differs(
    rank: int,
    what: str,
    got: Any,
    expected: np.ndarray,
    before: np.ndarray,
    rtol: float,
    hint: str,
) -> Finding | None:
    """`differs` for the change by training; the tolerance is relative to the largest change."""
    if isinstance(got, np.ndarray) and got.shape == before.shape and got.dtype.kind == "f":
        got = got.astype(np.float64) - before
    change = expected - before
    return differs(
        rank,
        f"change of {what} by training",
        got,
        change,
        rtol=rtol,
        atol=rtol * float(np.abs(change).max()) + 1e-6,
        hint=hint,
    )


def judge_fp16(case: Case) -> list[Finding]:
    """Weights equal those of training in float64, and the returned losses are unscaled."""
    steps = [
        [(i[f"x/{step}"], i[f"y/{step}"]) for i in case.inputs]
        for step in range(case.inputs[0]["steps"])
    ]
    expected, losses = oracle.train(case.inputs[0], steps, LR)
    findings = _judge_parameters(
        case,
        expected,
        "The gradients of this loss are below what fp16 can hold. scale the loss, backward through "
        "the scaled one, and let the scaler take the step.",
        rtol=HALF_RTOL,
    )
    for rank, answer in enumerate(case.answers):
        values = TINY * np.array([step[rank] for step in losses])
        if wrong := differs(
            rank,
            "losses",
            answer.get("losses"),
            values,
            rtol=HALF_RTOL,
            atol=0.0,
            hint="One number per step: this rank's loss before it is scaled.",
        ):
            findings.append(wrong)
    return findings


def judge_update(case: Case) -> list[Finding]:
    """One update of the scale per step, after the step."""
    findings = _judge_parameters(
        case,
        _train(case),
        "The scale grows after every step here. Gradients have to be divided by the scale that "
        "their loss was multiplied with: update() comes last.",
    )
    return findings + _judge_scale(case, 2.0 ** case.inputs[0]["steps"])


def _judge_scale(case: Case, factor: float) -> list[Finding]:
    expected = case.inputs[0]["settings"]["scale"] * factor
    return [
        Finding(
            f"the scale at the end: expected {expected:g}, got {answer.get('scale')}. "
            "Call update() once per step.",
            rank,
        )
        for rank, answer in enumerate(case.answers)
        if not same(answer.get("scale"), expected)
    ]


def judge_clip(case: Case) -> list[Finding]:
    """The norm of the unscaled gradients is clipped."""
    settings = case.inputs[0]["settings"]
    max_norm, scale = settings["max_norm"], settings["scale"]
    mistakes = (
        (
            max_norm / scale,
            "That is what comes out when gradients are clipped while they are still "
            "scaled: call scaler.unscale_(optimizer) first.",
        ),
        (None, "That is what comes out without any clipping."),
    )
    hint = "Unscale, then clip to max_norm, then step."
    for limit, reason in mistakes:
        if not _judge_parameters(case, _train(case, max_norm=limit), ""):
            hint = reason
    findings = _judge_parameters(case, _train(case, max_norm=max_norm), hint)
    for rank, answer in enumerate(case.answers):
        raised = answer.get("two batches")
        # If accumulate=2 fails without clipping, too, a different criterion reports the failure.
        if isinstance(raised, list) and len(raised) == 2 and raised[1] and not raised[0]:
            findings.append(
                Finding(
                    f"accumulate=2 with max_norm raised {raised[1]}: unscale and clip once per "
                    "step, after the backward of its last batch.",
                    rank,
                )
            )
    return findings


def judge_skips(case: Case) -> list[Finding]:
    """A step that overflows on one rank changes neither parameters nor learning rate."""
    bad = [
        step
        for step in range(case.inputs[0]["steps"])
        if any(np.abs(inputs[f"y/{step}"]).max() > 1e30 for inputs in case.inputs)
    ]
    taken = case.inputs[0]["steps"] - len(bad)
    findings = [
        Finding(
            f"learning rate at the end: expected {LR * GAMMA**taken:.6g} after {taken} steps "
            f"that were taken and {len(bad)} that were not, got {answer.get('lr')}. "
            "Call scheduler.step() if scaler.step(optimizer) returned True.",
            rank,
        )
        for rank, answer in enumerate(case.answers)
        if not _near(answer.get("lr"), LR * GAMMA**taken)
    ]
    findings += _judge_parameters(
        case,
        _train(case, skip=bad, gamma=GAMMA),
        f"{len(bad)} of {taken + len(bad)} steps overflowed on one rank. They must be left out, "
        "and their gradients must not reach the next step: zero_grad() before every step.",
    )
    return findings + _judge_scale(case, 0.5 ** len(bad))


def _near(got: Any, expected: float) -> bool:
    return isinstance(got, float) and abs(got - expected) <= 1e-6 * expected


def judge_accumulates(case: Case) -> list[Finding]:
    """k batches per step give their mean gradient, one unscale, one step and one update."""
    settings = case.inputs[0]["settings"]
    k, steps = settings["accumulate"], case.inputs[0]["steps"]
    findings = _judge_parameters(
        case,
        _train(case),
        f"accumulate={k}: divide each loss by {k}, scale it, backward; unscale, step and update "
        f"only after the {k}th. The scale must not change while gradients add up.",
    )
    for rank, answer in enumerate(case.answers):
        losses = answer.get("losses")
        if not isinstance(losses, np.ndarray) or losses.shape != (steps // k,):
            got = len(losses) if isinstance(losses, np.ndarray) and losses.ndim else losses
            findings.append(
                Finding(
                    f"accumulate={k}, {steps} batches: expected {steps // k} losses, one per step, "
                    f"got {got}.",
                    rank,
                )
            )
    return findings + _judge_scale(case, 2.0 ** (steps // k))
