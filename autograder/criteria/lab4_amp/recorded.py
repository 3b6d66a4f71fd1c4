"""Runs a student's training loop and records its steps: batches, parameters before and after, lr.

A loop is one function with many duties, and each criterion judges one of them. So the scaler, the
optimizer and the models here forgive what a different criterion charges:

- `GivenScaler` works without `scale`, `step` or `update`.
- Gradients are cleared after each step, so a forgotten `zero_grad()` shows only where a step is
  left out.
- Models are in float64, which autocast leaves alone, so autocast shows only where it is judged.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import described_numbers
from autograder.criteria.common.training import wrap
from autograder.criteria.criterion import Context, Values
from autograder.criteria.lab4_amp.formats import DTYPES

LR = 0.1
NEVER = 1_000_000
GROWTH, BACKOFF = 4.0, 0.125  # powers of two, so that scaling rounds nothing; torch's: 2 and 0.5
OLD = 1.0  # value of the gradients from before the first step, after they are unscaled
GAMMA = 0.5  # the scheduler's factor per step


class GivenScaler(torch.amp.GradScaler):
    """torch's scaler; also reports whether a step was taken, and forgives a forgotten call.

    Without `update`, the next step works all the same. Without `step`, `update` counts a good step.
    A loss that was not scaled gives gradients that are not divided, unless `strict` is set.
    """

    def __init__(self, device_type: str, *, strict: bool = False, **settings: Any) -> None:
        settings = {"growth_factor": GROWTH, "backoff_factor": BACKOFF} | settings
        super().__init__(device_type, **settings)
        self._lazy_init_scale_growth_tracker(torch.device(device_type))
        self._strict, self._scaled = strict, strict

    def scale(self, outputs: Any) -> Any:
        """The loss times the scale; notices whether backward starts from it."""
        scaled = super().scale(outputs)
        if isinstance(scaled, torch.Tensor) and scaled.requires_grad:
            scaled.register_hook(self._notice)
        return scaled

    def _notice(self, _: torch.Tensor) -> None:
        self._scaled = True

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides by the scale, or by 1 if no backward started from a scaled loss."""
        self._forget_last_step(optimizer)
        kept = self._scale
        if not self._scaled and kept is not None:
            self._scale = torch.ones_like(kept)
        try:
            super().unscale_(optimizer)
        finally:
            self._scale = kept

    def _forget_last_step(self, optimizer: torch.optim.Optimizer) -> None:
        stage = self._per_optimizer_states[id(optimizer)]["stage"]
        if getattr(stage, "name", "") == "STEPPED":
            self._per_optimizer_states.clear()

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Allows fp16 gradients, where torch raises: `Recorder` checks the parameters' dtype."""
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> bool:
        """Takes the step if all gradients are finite; returns whether the step was taken."""
        self._forget_last_step(optimizer)
        super().step(optimizer, *args, **kwargs)
        self._scaled = self._strict
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


class Recorder:
    """Notes for every step which batches the model saw, and the parameters before and after."""

    def __init__(
        self, model: nn.Module, optimizer: Any, scaler: GivenScaler, batches: Sequence[Any]
    ) -> None:
        self.batches, self.optimizer = batches, optimizer
        self.steps: list[Values] = []
        self.before: list[np.ndarray] = []
        self.after: list[np.ndarray] = []
        self._seen: list[int] = []
        self._in_step = False
        self._parameters = list(model.parameters())
        model.register_forward_pre_hook(self._see)
        self._dtypes = [p.dtype for p in self._parameters]
        optimizer.register_step_pre_hook(lambda *_: self._begin())
        optimizer.register_step_post_hook(lambda *_: self._taken())
        take = scaler.step

        def step(*args: Any, **kwargs: Any) -> bool:
            self._in_step, taken = True, len(self.after)
            try:
                return take(*args, **kwargs)
            finally:
                self._in_step = False
                if len(self.after) == taken:
                    self._close(taken=False)

        scaler.step = step  # type: ignore[method-assign]

    def _see(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        given = args[0] if args else None
        for number, (x, _) in enumerate(self.batches):
            if isinstance(given, torch.Tensor) and given.shape == x.shape and torch.equal(given, x):
                self._seen.append(number)
                return
        self._seen.append(-1)

    def _begin(self) -> None:
        for p, dtype in zip(self._parameters, self._dtypes, strict=True):
            if p.dtype != dtype:
                raise TypeError(
                    f"the parameters were {dtype} and have become {p.dtype}: they stay what they "
                    "are, and autocast rounds copies of them. Never call model.half()."
                )
        self.before.append(self._flat())

    def _flat(self) -> np.ndarray:
        return np.concatenate([p.detach().cpu().double().numpy().ravel() for p in self._parameters])

    def _taken(self) -> None:
        self.after.append(self._flat())
        self._close(taken=True)

    def _close(self, taken: bool) -> None:
        lr = float(self.optimizer.param_groups[0]["lr"])
        batches = list(dict.fromkeys(self._seen))
        self.steps.append({"batches": batches, "taken": taken, "lr": lr})
        self._seen = []


def halves(parts: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """What belongs to each of the optimizer's two groups; there is one part for each parameter."""
    return parts[: len(parts) // 2], parts[len(parts) // 2 :]


def run(train_amp: Any, inputs: Values, name: str, context: Context) -> Values:
    """Trains with the settings and the batches of the run `name`; what it did, as an answer."""
    settings, device = inputs["settings"][name], context.device
    half = settings.get("dtype")
    wide = torch.float32 if half else torch.float64
    module = oracle.mlp(inputs, wide).to(device)
    groups = [{"params": group} for group in halves(list(module.parameters()))]
    optimizer = torch.optim.SGD(groups, lr=settings.get("lr", LR))
    for p in module.parameters() if settings.get("old") else ():
        p.grad = torch.full_like(p, OLD * settings["scale"])
    scaler = GivenScaler(
        device.type,
        strict=bool(settings.get("strict")),
        init_scale=settings["scale"],
        growth_interval=settings.get("interval", NEVER),
    )
    batches = [
        tuple(torch.from_numpy(inputs[f"{k}/{name}/{n}"]).to(device, wide) for k in "xy")
        for n in range(settings["batches"])
    ]
    recorder = Recorder(module, optimizer, scaler, batches)
    if settings.get("clears", True):
        optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    scheduler = None
    if settings.get("scheduler"):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=GAMMA)
    factor = settings.get("factor", 1.0)
    losses = train_amp(
        wrap(module, context),
        batches,
        lambda prediction, target: factor * oracle.mse(prediction, target),
        optimizer,
        scaler,
        dtype=DTYPES[half] if half else None,
        max_norm=settings.get("max_norm"),
        accumulate=settings.get("accumulate", 1),
        scheduler=scheduler,
    )
    answer: Values = {
        f"{name}/steps": recorder.steps,
        f"{name}/scale": float(scaler.get_scale()),
        f"{name}/lr": float(optimizer.param_groups[0]["lr"]),
        f"{name}/losses": described_numbers(losses),
    }
    for what, vectors in (("before", recorder.before), ("after", recorder.after)):
        if vectors:
            answer[f"{name}/{what}"] = np.stack(vectors)
    return answer


def attempt(train_amp: Any, inputs: Values, name: str, context: Context) -> Values:
    """`run`, for a case in which an unrelated fault may raise: an error becomes text."""
    try:
        return run(train_amp, inputs, name, context)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if f.name == getattr(train_amp, "__name__", "")]
        place = f" (in {own[-1].name}: {own[-1].line})" if own else ""
        return {f"{name}/raised": f"{type(error).__name__}: {error}"[:300] + place}
