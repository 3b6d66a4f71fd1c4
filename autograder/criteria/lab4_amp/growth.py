"""Criteria for a loss scaler: how its scale grows and backs off, and that it can be saved.

Here an overflow happens on all ranks at once, in steps that the referee drew.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autograder.criteria.common.answers import item_of, read_number, returned, short, told
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
    """Good steps and overflows (on all ranks); some overflows come just before the scale grows.

    Two runs: the scale falls far below 1 in one, and grows far beyond 2**30 in the other. No
    setting is torch's default, and the two runs have no factor in common.
    """
    rng = draw.shared("steps")
    good, bad = [False], [True]
    growth, backoff = rng.permutation([1.5, 3.0, 4.0]), (float(rng.choice([0.25, 0.125])), 0.75)
    runs = []
    for number, exponent in enumerate((int(rng.integers(1, 4)), int(rng.integers(31, 34)))):
        interval = int(rng.integers(3, 6))
        steps = good * interval + good * (interval - 1) + bad + good * (interval - 1) + bad * 2
        steps += good * (2 * interval + int(rng.integers(0, interval)))
        steps += bad + good * (interval + 1)
        settings = {
            "init_scale": float(2**exponent),
            "growth_factor": float(growth[number]),
            "backoff_factor": float(backoff[number]),
            "growth_interval": interval,
        }
        runs.append({"settings": settings, "steps": bad * 4 + steps if number == 0 else steps})
    return [
        {"runs": runs}
        | draw_start(draw.private(rank))
        | {f"g/{i}": g for i, g in enumerate(draw_gradients(draw.shared(f"gradients {rank}")))}
        for rank in range(draw.world_size)
    ]


def observe_grows(scaler_class: Any, inputs: Values, context: Context) -> Values:
    """The scale after every update, in each run."""
    return {
        f"scales/{number}": run_steps(
            scaler_class(**one["settings"]), inputs, one["steps"], context
        )
        for number, one in enumerate(inputs["runs"])
    }


def run_steps(scaler: Any, inputs: Values, steps: Sequence[bool], context: Context) -> list[float]:
    """Runs steps with the gradients g/0, g/1, …, which are inf in overflowing steps.

    Returns:
        The scale after each step.
    """
    parameters = make_parameters(inputs, context)
    optimizer = make_optimizer(parameters)
    scales = []
    for number, overflow in enumerate(steps):
        set_gradients(parameters, inputs, "g", scaler)
        for p in parameters:
            if overflow and p.grad is not None:
                p.grad.fill_(torch.inf)
        if number % 3 == 1:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(read_number(scaler.get_scale(), "get_scale()"))
    return scales


def scales_of(settings: Values, steps: Sequence[bool], rule: str = "right") -> list[float]:
    """The scale after each step, by the right rule or with the mistake that `rule` names."""
    scale, streak, interval = settings["init_scale"], 0, settings["growth_interval"]
    if rule in ("one late", "one early"):
        interval += 1 if rule == "one late" else -1
    scales = []
    for overflow in steps:
        if overflow:
            if rule != "no backoff":
                scale *= 0.5 if rule == "halves" else settings["backoff_factor"]
            streak = streak if rule == "streak goes on" else 0
        else:
            streak += 1
            if rule == "every step" or (streak >= interval and rule != "never"):
                scale *= 2.0 if rule == "doubles" else settings["growth_factor"]
                streak = streak if rule == "streak not reset" else 0
        scales.append(scale)
    return scales


GROWTH_MISTAKES = {
    "never": "The scale never grew: after growth_interval good steps in a row it has to.",
    "every step": "The scale grew after every good step, not after growth_interval of them.",
    "no backoff": "The scale did not back off after an overflow.",
    "streak goes on": "Good steps count only if they come in a row: an overflow starts the count "
    "again from 0.",
    "streak not reset": "After the scale has grown the count starts again, from 0.",
    "one late": "The scale grew one step too late.",
    "one early": "The scale grew one step too early.",
    "halves": "An overflow multiplies the scale by backoff_factor, not by 1/2.",
    "doubles": "The scale grows by growth_factor, not by 2.",
}


def judge_grows(case: Case) -> Iterator[Finding]:
    """The scale backs off after an overflow, grows after growth_interval good steps in a row."""
    for rank, answer in enumerate(case.answers):
        runs = case.inputs[0]["runs"]
        all_got = [told(answer, f"scales/{number}") for number in range(len(runs))]
        for one, got in zip(runs, all_got, strict=True):
            settings, steps = one["settings"], one["steps"]
            expected = scales_of(settings, steps)
            place = _first_difference(got, expected)
            if place is None:
                continue
            reason = "".join(
                f" {reason}"
                for rule, reason in GROWTH_MISTAKES.items()
                if all(
                    _first_difference(other, scales_of(r["settings"], r["steps"], rule)) is None
                    for other, r in zip(all_got, runs, strict=True)
                )
            )
            kinds = "".join("x" if overflow else "." for overflow in steps[: place + 1])
            yield Finding(
                f"{_call(settings)}, after the steps {kinds} (x: overflow): expected the scale "
                f"{expected[place]:g}, got {short(item_of(got, place))}.{reason}",
                rank,
            )
            break


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
        # "own steps" are more good steps than the saved count, and too few to let the scale grow.
        | {"other": interval + 3, "own steps": [False] * (interval + 1)}
        | draw_start(draw.private(rank))
        | {f"g/{i}": g for i, g in enumerate(draw_gradients(draw.shared(f"gradients {rank}")))}
        for rank in range(draw.world_size)
    ]


PLAIN = {"float", "int", "bool", "NoneType"}  # None is for what no step has set yet


def _numbers_in(state: Any) -> Iterator[Any]:
    """The values of a state, including those in lists."""
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, list | tuple):
            yield from _numbers_in(value)
        else:
            yield value


def observe_state(scaler_class: Any, inputs: Values, context: Context) -> Values:
    """Scales of a scaler that continues, and of a scaler restored from the saved state."""
    scaler = scaler_class(**inputs["settings"])
    run_steps(scaler, inputs, inputs["before"], context)
    state = returned(scaler.state_dict(), "state_dict()")
    saved = read_number(scaler.get_scale(), "get_scale()")
    goes_on = run_steps(scaler, inputs, inputs["after"], context)
    kinds = {type(v).__name__ for v in _numbers_in(state)}
    file = io.BytesIO()
    torch.save(state, file)  # only now: later steps must not have changed the state
    reader = scaler_class()
    reader.load_state_dict(state)
    kept = copy.deepcopy(state)
    run_steps(reader, inputs, inputs["after"], context)
    answer: Values = {"saved": saved, "goes_on": goes_on, "loaded": [], "restored": []}
    answer |= {"kinds": sorted(kinds), "kept": kept == state}
    # Into a new scaler, and into one with settings and steps of its own.
    used = scaler_class(
        init_scale=3.0, growth_factor=1.5, backoff_factor=0.75, growth_interval=inputs["other"]
    )
    run_steps(used, inputs, inputs["own steps"], context)
    for restored in (scaler_class(), used):
        file.seek(0)
        restored.load_state_dict(torch.load(file, weights_only=True))
        answer["loaded"].append(read_number(restored.get_scale(), "get_scale()"))
        answer["restored"].append(run_steps(restored, inputs, inputs["after"], context))
    return answer


def judge_state(case: Case) -> Iterator[Finding]:
    """The restored scaler behaves like the saved scaler.

    Names in the state are free, and its numbers may be in lists.
    """
    for rank, answer in enumerate(case.answers):
        saved, goes_on = told(answer, "saved"), told(answer, "goes_on")
        if not isinstance(goes_on, list) or not all(isinstance(s, float) for s in goes_on):
            yield Finding("no scales came back.", rank)
            continue
        kinds = told(answer, "kinds")
        if not isinstance(kinds, list) or not set(map(str, kinds)) <= PLAIN:
            yield Finding(f"state_dict() holds {kinds}, expected plain numbers.", rank)
            continue
        if answer.get("kept") is not True:
            yield Finding(
                "steps of a scaler change the dict that was given to its load_state_dict: the next "
                "scaler that loads it would start from somewhere else.",
                rank,
            )
            continue
        for number, who in enumerate(("a new scaler", "a scaler that was used before")):
            loaded = item_of(told(answer, "loaded"), number)
            restored = item_of(told(answer, "restored"), number)
            if not isinstance(saved, float) or saved != loaded:
                hint = ""
                if loaded == goes_on[-1]:
                    hint = (
                        " Steps after state_dict() have changed the dict that it returned: it has "
                        "to be a new one."
                    )
                yield Finding(
                    f"scale when saved: {short(saved)}, after load_state_dict into {who}: "
                    f"{short(loaded)}.{hint}",
                    rank,
                )
                break
            if (place := _first_difference(restored, goes_on)) is not None:
                hint = "The count of good steps and the three settings belong to the state as well."
                if number:  # into a new one it was restored rightly
                    hint = (
                        "Into a new scaler it is restored rightly; load_state_dict has to replace "
                        "the settings and the count of good steps that a used one has."
                    )
                yield Finding(
                    f"restored into {who}, step {place + 1} after that leaves the scale at "
                    f"{short(item_of(restored, place))}; that of the scaler that was saved is "
                    f"{goes_on[place]:g}. {hint}",
                    rank,
                )
                break
