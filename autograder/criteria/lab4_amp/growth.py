"""Criteria for a loss scaler: how its scale grows and backs off, and that it can be saved.

Here an overflow happens on all ranks at once, in steps that the referee drew.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab4_amp.scaler import (
    draw_gradients,
    draw_start,
    make_optimizer,
    make_parameters,
    set_gradients,
)

# --- grows ---------------------------------------------------------------------------------------


def draw_grows(draw: Draw) -> list[Values]:
    """Good steps and overflows (on all ranks); some overflows come just before the scale grows."""
    rng = draw.shared("steps")
    interval = int(rng.integers(3, 6))
    good, bad = [False], [True]
    steps = good * interval + good * (interval - 1) + bad + good * (interval - 1) + bad * 2
    steps += good * (2 * interval + int(rng.integers(0, interval))) + bad + good * (interval + 1)
    settings = {
        "init_scale": float(2 ** rng.integers(8, 14)),
        "growth_factor": float(rng.choice([2.0, 1.5, 4.0])),
        "backoff_factor": float(rng.choice([0.5, 0.25, 0.75])),
        "growth_interval": interval,
    }
    return [
        {"settings": settings, "steps": steps}
        | draw_start(draw.private(rank))
        | {f"g/{i}": g for i, g in enumerate(draw_gradients(draw.shared(f"gradients {rank}")))}
        for rank in range(draw.world_size)
    ]


def observe_grows(scaler_class: Any, inputs: Values, context: Context) -> Values:
    """The scale after every update."""
    scaler = scaler_class(**inputs["settings"])
    return {"scales": run_steps(scaler, inputs, inputs["steps"], context)}


def run_steps(scaler: Any, inputs: Values, steps: Sequence[bool], context: Context) -> list[float]:
    """Runs steps with the gradients g/0, g/1, …, with an inf in overflowing steps.

    Returns:
        The scale after each step.
    """
    parameters = make_parameters(inputs, context)
    optimizer = make_optimizer(parameters)
    scales = []
    for overflow in steps:
        set_gradients(parameters, inputs, "g", scaler)
        first = parameters[0].grad
        if overflow and first is not None:
            first[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        scales.append(float(scaler.get_scale()))
    return scales


def scales_of(settings: Values, steps: Sequence[bool], rule: str = "right") -> list[float]:
    """The scale after each step, by the right rule or with the mistake that `rule` names."""
    scale, streak, interval = settings["init_scale"], 0, settings["growth_interval"]
    if rule == "one late":
        interval += 1
    scales = []
    for overflow in steps:
        if overflow:
            if rule != "no backoff":
                scale *= settings["backoff_factor"]
            streak = streak if rule == "streak goes on" else 0
        else:
            streak += 1
            if rule == "every step" or (streak >= interval and rule != "never"):
                scale *= settings["growth_factor"]
                streak = streak if rule == "streak not reset" else 0
        scales.append(scale)
    return scales


GROWTH_MISTAKES = {
    "never": "The scale never grew: after growth_interval good steps in a row it has to.",
    "every step": "The scale grew after every good step, not after growth_interval of them.",
    "no backoff": "The scale did not back off after an overflow.",
    "streak goes on": "An overflow starts the count of good steps again, from 0.",
    "streak not reset": "After the scale has grown the count starts again, from 0.",
    "one late": "The scale grew one step too late.",
}


def judge_grows(case: Case) -> Iterator[Finding]:
    """The scale backs off after an overflow, grows after growth_interval good steps in a row."""
    settings, steps = case.inputs[0]["settings"], case.inputs[0]["steps"]
    expected = scales_of(settings, steps)
    hint = ""
    for rank, answer in enumerate(case.answers):
        got = answer.get("scales")
        place = _first_difference(got, expected)
        if place is None:
            continue
        for rule, reason in GROWTH_MISTAKES.items():
            if _first_difference(got, scales_of(settings, steps, rule)) is None:
                hint = " " + reason
        seen = got[place] if isinstance(got, list) and place < len(got) else None
        kinds = "".join("x" if overflow else "." for overflow in steps[: place + 1])
        yield Finding(
            f"{_call(settings)}, after the steps {kinds} (x: overflow): expected the scale "
            f"{expected[place]:g}, got {seen}.{hint}",
            rank,
        )


def _call(settings: Values) -> str:
    return "LossScaler(" + ", ".join(f"{k}={v:g}" for k, v in settings.items()) + ")"


def _first_difference(got: Any, expected: Sequence[float]) -> int | None:
    """The first index at which a list of scales is wrong, or None."""
    for place, value in enumerate(expected):
        if not isinstance(got, list) or place >= len(got):
            return place
        if not isinstance(got[place], float) or not abs(got[place] - value) <= 1e-5 * value:
            return place
    return None


# --- state ---------------------------------------------------------------------------------------


def draw_state(draw: Draw) -> list[Values]:
    """Steps before the save that end in the middle of the count of good steps, and steps after."""
    rng = draw.shared("steps")
    interval = int(rng.integers(4, 6))
    before = [False] * (interval + int(rng.integers(2, interval)))
    after = [False] * interval + [True] + [False] * (interval + 1)
    settings = {
        "init_scale": float(2 ** rng.integers(8, 12)),
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": interval,
    }
    return [
        {"settings": settings, "before": before, "after": after}
        | draw_start(draw.private(rank))
        | {f"g/{i}": g for i, g in enumerate(draw_gradients(draw.shared(f"gradients {rank}")))}
        for rank in range(draw.world_size)
    ]


def observe_state(scaler_class: Any, inputs: Values, context: Context) -> Values:
    """Scales of a scaler that continues, and of a scaler restored from the saved state."""
    scaler = scaler_class(**inputs["settings"])
    run_steps(scaler, inputs, inputs["before"], context)
    state, saved = scaler.state_dict(), float(scaler.get_scale())
    goes_on = run_steps(scaler, inputs, inputs["after"], context)
    file = io.BytesIO()
    torch.save(state, file)  # only now: later steps must not have changed the state
    file.seek(0)
    restored = scaler_class()
    restored.load_state_dict(torch.load(file, weights_only=True))
    return {
        "saved": saved,
        "loaded": float(restored.get_scale()),
        "goes_on": goes_on,
        "restored": run_steps(restored, inputs, inputs["after"], context),
    }


def judge_state(case: Case) -> Iterator[Finding]:
    """The restored scaler behaves like the saved scaler."""
    for rank, answer in enumerate(case.answers):
        saved, loaded = answer.get("saved"), answer.get("loaded")
        if not isinstance(saved, float) or saved != loaded:
            yield Finding(f"scale when saved: {saved}, after load_state_dict: {loaded}.", rank)
            continue
        goes_on, restored = answer.get("goes_on"), answer.get("restored")
        if not isinstance(goes_on, list) or not all(isinstance(s, float) for s in goes_on):
            yield Finding("no scales came back.", rank)
        elif (place := _first_difference(restored, goes_on)) is not None:
            yield Finding(
                f"{place + 1} steps after it was restored the scale is {_at(restored, place)}; the "
                f"scaler that was saved has {goes_on[place]:g}. The count of good steps and the "
                "three settings belong to the state as well.",
                rank,
            )


def _at(values: Any, place: int) -> Any:
    return values[place] if isinstance(values, list) and place < len(values) else None
