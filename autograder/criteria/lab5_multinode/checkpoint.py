"""Criteria for task 3 of lab 5: a checkpoint loads as it was saved, and the last k are kept."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autograder.criteria.common.answers import item_of, plain
from autograder.criteria.common.checkpoint_files import (
    MANY,
    describe,
    load_file,
    name_of,
    newest_in,
    one_file,
    others_in,
    rank_zero_only,
    save,
    state_of,
    step_text,
    steps_in,
    working_with,
)
from autograder.criteria.common.deaths import deaths
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs, integer

# --- ckpt_roundtrip ------------------------------------------------------------------------------

PLAIN = (bool, int, float, str, type(None))


def draw_roundtrip(draw: Draw) -> list[Values]:
    """A nested state with several dtypes, and steps of one, two and three digits."""
    rng = draw.shared()
    inputs: Values = {
        "steps": [int(rng.integers(2, 9)), int(rng.integers(10, 99)), int(rng.integers(100, 999))],
        "weight": rng.normal(size=(7, 3)).astype(np.float32),
        "moment": rng.normal(size=5),
        "counts": rng.integers(-9, 9, size=(2, 2)),
        "word": f"w{int(rng.integers(10**6))}",
    }
    return rank_zero_only(draw, inputs)


def observe_roundtrip(path: Any, inputs: Values, context: Context) -> Values:
    """Loads from a missing folder, saves three steps, reverses file times, loads from a copy."""
    if context.rank != 0:
        return {}
    with working_with(path) as (module, folder):
        place = folder / "deep" / "er"
        answer: Values = {"missing": repr(module.load_newest(place)), "returned": []}
        for step in inputs["steps"]:
            state = _state(inputs, step)
            # The folder is text here, as in a script; elsewhere it is a Path.
            returned = save(module, str(place), step, state)
            right = (place / name_of(step)).resolve()
            answer["returned"].append(Path(str(returned)).resolve() == right)
        now = time.time()
        for age, step in enumerate(inputs["steps"]):  # as after a copy: oldest time for the newest
            file = place / name_of(step)
            if file.is_file():
                os.utime(file, (now - 100 * age, now - 100 * age))
        # Step 0 with an empty state, in a new folder: nothing of the saves above may come back.
        start = folder / "start"
        module.save_checkpoint(start, 0, {}, keep=MANY)
        answer["start"] = repr(module.load_newest(start))
        answer["files"] = sorted(p.name for p in place.iterdir() if p.name.endswith(".ckpt"))
        answer["beside"] = others_in(place)
        elsewhere = folder / "elsewhere"  # a checkpoint is one file, so only that is copied
        elsewhere.mkdir()
        for file in place.glob("step-*.ckpt"):
            shutil.copy2(file, elsewhere)
        found = module.load_newest(elsewhere)
        if found is None:
            return answer | {"step": -1}
        answer["step"] = integer(found[0], "step from load_newest")
        answer["type"] = type(found[0]).__name__
        answer["told"] = {}
        for place, value in _leaves(found[1]):
            if isinstance(value, torch.Tensor):
                answer[place] = value.double().numpy()
                answer["told"][place] = str(value.dtype)
            else:
                answer["told"][place] = value if type(value) in PLAIN else type(value).__name__
        return answer


def _state(inputs: Values, step: int) -> Values:
    """The state that is saved for a step, with every kind of value that a state may hold."""
    return {
        "model": {"weight": torch.from_numpy(inputs["weight"]) * step},
        "half": torch.full((2,), float(step), dtype=torch.bfloat16),
        "optimizer": {
            "state": {0: {"moment": torch.from_numpy(inputs["moment"])}},
            "groups": [{"lr": 0.1 * step, "betas": (0.9, step)}],
        },
        "counts": torch.from_numpy(inputs["counts"]),
        "losses": [1.5, step],
        "word": inputs["word"],
        "nothing": None,
        "step": -step,  # a key of the state, not the checkpoint's step
    }


def _leaves(value: Any, place: str = "state") -> Iterator[tuple[str, Any]]:
    """Each value in a nested state, with its place; of a list or tuple also the type."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        yield f"type of {place}", type(value).__name__
        items = enumerate(value)
    else:
        yield place, value
        return
    for key, item in items:
        yield from _leaves(item, f"{place}[{key!r}]")


def judge_roundtrip(case: Case) -> Iterator[Finding]:
    """load_newest returns None for a missing folder, later the exact state of the highest step.

    The format of the file is free; the path may be text or a Path.
    """
    given, answer = case.inputs[0], plain(case.answers[0])
    if answer.get("missing") != "None":
        yield Finding(
            f"load_newest of a folder that does not exist: expected None, "
            f"got {answer.get('missing')}.",
            0,
        )
    if answer.get("returned") != [True] * len(given["steps"]):
        yield Finding("save_checkpoint: expected that it returns the path of its file.", 0)
    names = [name_of(step) for step in given["steps"]]
    if answer.get("files") != names:
        got = answer.get("files")
        yield Finding(f"files after three saves with keep={MANY}: expected {names}, got {got}.", 0)
    if answer.get("start") != "(0, {})":
        yield Finding(
            "an empty dict was saved for step 0, after larger states: expected load_newest to give "
            f"(0, {{}}), got {str(answer.get('start'))[:200]}.",
            0,
        )
    last = given["steps"][-1]
    if (got := answer.get("step")) != last:
        why = "The highest step is the newest; a file's time changes when it is copied."
        if got == -1:
            why = "All files step-….ckpt had been copied into a new folder before. " + one_file(
                answer.get("beside")
            )
        yield Finding(
            f"saved {given['steps']}: expected load_newest to give step {last}, got "
            f"{step_text(got) if isinstance(got, int) else got}. {why}",
            0,
        )
        return
    if answer.get("type") != "int":
        yield Finding(f"the step from load_newest: expected an int, got {answer.get('type')}.", 0)
    if difference := _first_difference(case.answers[0], _state(given, last)):
        yield difference


def _first_difference(answer: Values, state: Values) -> Finding | None:
    """The first item of a state that did not come back as it was saved."""
    told = plain(answer).get("told")
    told = told if isinstance(told, dict) else {}
    for place, value in _leaves(state):
        is_tensor = isinstance(value, torch.Tensor)
        right = str(value.dtype) if is_tensor else value
        if place not in told:
            return Finding(f"{place} was saved, and load_newest gives no such item.", 0)
        if (got := told[place]) != right:
            return Finding(f"{place} was saved as {right!r}, load_newest gives {got!r:.100}.", 0)
        if is_tensor:
            what, numbers = f"{place} from load_newest", value.double().numpy()
            if wrong := differs(0, what, answer.get(place), numbers, rtol=0.0, atol=0.0):
                return wrong
    return None


# --- ckpt_damage ---------------------------------------------------------------------------------

DAMAGE = (
    "one bit differs",
    "the last byte is missing",
    "the second half is missing",
    "it is empty",
    "it holds different bytes",
    "zeros in the middle",
    "two bytes have changed places",
)
ENDS = 48  # bytes at the beginning and at the end of a file, where a header or a checksum may be


def observe_damage(path: Any, inputs: Values, context: Context) -> Values:
    """What load_newest finds when the newest, the two newest, or all checkpoints are damaged."""
    if context.rank != 0:
        return {}
    steps = inputs["steps"][:3]
    with working_with(path) as (module, folder):
        for step in steps:
            save(module, folder, step, state_of(inputs, step))
        answer: Values = {"whole": newest_in(module, folder, inputs), "found": []}
        newest = folder / name_of(steps[-1])
        whole = (newest.read_bytes() if newest.is_file() else b"") or b"?" * 100
        for data in _damaged(whole, inputs):
            newest.write_bytes(data)
            try:
                answer["found"].append(newest_in(module, folder, inputs))
            except Exception as error:
                answer["found"].append(describe(error, path)[:300])
        (folder / name_of(steps[1])).write_bytes(whole[: len(whole) // 3])
        answer["two"] = newest_in(module, folder, inputs)
        (folder / name_of(steps[0])).write_bytes(b"")
        answer["all"] = newest_in(module, folder, inputs)
        # Leftovers of a process that died are no checkpoints either.
        (folder / name_of(steps[0])).unlink()
        save(module, folder, steps[0], state_of(inputs, steps[0]))
        for name in (f"{name_of(steps[-1] + 1)}.tmp", f"tmp-{steps[-1] + 1}", "notes.txt"):
            (folder / name).write_bytes(whole[:1000])
        answer["leftovers"] = newest_in(module, folder, inputs)
        # Far behind the beginning of a large file, one bit differs.
        large = state_of(inputs, steps[-1])
        large["model"]["weight"] = large["model"]["weight"].repeat(20)
        save(module, folder, steps[-1], large)
        data = bytearray(newest.read_bytes())
        data[int(0.9 * len(data))] ^= 4
        newest.write_bytes(data)
        answer["large"] = newest_in(module, folder, inputs)
        return answer


def _damaged(whole: bytes, inputs: Values) -> Iterator[bytes]:
    """`whole` in every damaged form; one bit differs at drawn places and near both ends."""
    drawn = (int(place * len(whole)) for place in inputs["places"])
    for place in (*drawn, *range(ENDS), *range(-ENDS, 0)):
        data = bytearray(whole)
        data[place % len(data)] ^= 4
        yield bytes(data)
    yield whole[:-1]
    yield whole[: len(whole) // 2]
    yield b""
    yield random.Random(inputs["noise"]).randbytes(len(whole))
    data = bytearray(whole)
    middle = int(len(data) * inputs["places"][0])
    data[middle : middle + 500] = bytes(len(data[middle : middle + 500]))
    yield bytes(data)
    data = bytearray(whole)  # two bytes swapped: the sum of all bytes stays the same
    at = next((i for i in range(middle, len(data)) if data[i] != data[i - 1]), 0)
    data[at - 1], data[at] = data[at], data[at - 1]
    yield bytes(data)


def judge_damage(case: Case) -> list[Finding]:
    """load_newest returns the newest undamaged checkpoint, never a state that was not saved."""
    given, answer = case.inputs[0], plain(case.answers[0])
    first, second, third = given["steps"][:3]
    if answer.get("whole") != [third, True]:
        return [
            Finding(f"nothing is damaged yet: expected step {third}, got {answer.get('whole')}.", 0)
        ]
    kinds = [DAMAGE[0]] * (len(given["places"]) + 2 * ENDS) + list(DAMAGE[1:])
    found = answer.get("found")
    found = found if isinstance(found, list) else []
    for number, kind in enumerate(kinds):
        got = found[number] if number < len(found) else None
        # The flipped bit may carry no information. Then the newest state is right, too.
        if got not in ([second, True], [third, True]):
            return [Finding(_explain(got, f"of the newest checkpoint {kind}", second), 0)]
    for key, step, what in (
        ("two", first, "the two newest checkpoints are damaged"),
        ("all", -1, "all checkpoints are damaged"),
        ("leftovers", first, "beside one whole checkpoint there are files of other names"),
        ("large", first, "of the newest checkpoint, of 5 MB, one bit differs near its end"),
    ):
        if answer.get(key) != [step, True]:
            return [Finding(_explain(answer.get(key), what, step), 0)]
    return []


def _explain(got: Any, what: str, expected: int) -> str:
    text = f"{what}: expected load_newest to give {step_text(expected)}, got "
    if not isinstance(got, list) or len(got) != 2:
        return f"{text}{got}."
    if got[1] is not True:
        return (
            f"{text}step {got[0]} with numbers that were not saved. torch.load does not notice: "
            "save a checksum of all of the data with them (hashlib; a sum of bytes notices no "
            "change of places), and compare it before you use them."
        )
    return f"{text}{step_text(got[0])}."


# --- ckpt_keep -----------------------------------------------------------------------------------


def observe_keep(path: Any, inputs: Values, context: Context) -> Values:
    """Which checkpoints exist after each save, and after deaths everywhere in a save."""
    if context.rank != 0:
        return {}
    with working_with(path) as (module, folder):
        answer: Values = {}
        for keep in (1, 3):
            place = folder / f"keep{keep}"
            place.mkdir()
            (place / "notes.txt").write_text("mine")
            (place / "best.ckpt").write_text("mine too")
            (place / "upload.tmp").write_text("on its way")
            other_run = place / "other" / name_of(inputs["steps"][0])
            other_run.parent.mkdir()
            other_run.write_text("of a different run")
            (place / f"{name_of(99_999_999)}.tmp").write_text("what a death has left")
            seen = []
            for step in inputs["steps"]:
                module = load_file(path)  # a new job: it has the files, but no memory
                for age, file in enumerate(sorted(place.glob("step-*.ckpt"))):
                    late = time.time() + 1e6 - 100 * age  # the oldest gets the newest time
                    os.utime(file, (late, late))
                module.save_checkpoint(place, step, state_of(inputs, step), keep=keep)
                seen.append(sorted(p.name for p in place.glob("step-*.ckpt")))
            for again in (inputs["steps"][-1], inputs["steps"][0] - 1):
                module.save_checkpoint(place, again, state_of(inputs, again), keep=keep)
                seen.append(sorted(p.name for p in place.glob("step-*.ckpt")))
            answer[f"keep{keep}"] = seen
            mine = [place / name for name in ("best.ckpt", "notes.txt", "upload.tmp")]
            answer[f"others{keep}"] = [p.name for p in (*mine, other_run) if not p.exists()]
        answer["deaths"] = [_deaths(path, folder, inputs, keep) for keep in (1, 2)]
        return answer


def _deaths(path: Any, folder: Path, inputs: Values, keep: int) -> list[Any]:
    """Per death in a save that deletes a checkpoint: when, steps left, steps after another save."""
    module, steps = load_file(path), inputs["steps"][: keep + 2]
    before, place = folder / f"full{keep}", folder / "now"
    for step in steps[:keep]:
        save(module, before, step, state_of(inputs, step), keep=keep)

    def save_now(step: int) -> None:
        module.save_checkpoint(place, step, state_of(inputs, step), keep=keep)

    seen: list[Any] = []
    for death in deaths(lambda: save_now(steps[keep]), before, place):
        there, later = steps_in(place), None
        if steps[keep] in there:  # else ckpt_atomic judges the next save
            module = load_file(path)
            save_now(steps[keep + 1])
            later = steps_in(place)
        seen.append([death.when, there, later])
    return seen


def judge_keep(case: Case) -> list[Finding]:
    """The last k are kept; older ones are deleted, but not before the new one is complete."""
    given, answer = case.inputs[0], plain(case.answers[0])
    steps = given["steps"]
    for keep in (1, 3):
        seen = answer.get(f"keep{keep}")
        saves = [*steps, steps[-1], steps[0] - 1]  # the last one is older than all that are kept
        for number in range(len(saves)):
            right = [name_of(s) for s in sorted(set(saves[: number + 1]))[-keep:]]
            got, new = item_of(seen, number), name_of(saves[number])
            if got != right:
                what = f"keep={keep}, after the saves {saves[: number + 1]}: expected {right}"
                missing = new in right and isinstance(got, list) and new not in got
                why = f" The last of these saves made no {new}." if missing else ""
                return [Finding(f"{what}, got {got}.{why}", 0)]
        if (gone := answer.get(f"others{keep}")) != []:
            return [
                Finding(
                    f"files were deleted that are no step-….ckpt of this folder, {gone}: keep away "
                    "from what is not yours.",
                    0,
                )
            ]
    seen = answer.get("deaths")
    for keep in (1, 2):
        deaths_seen = item_of(seen, keep - 1)
        for left in deaths_seen if isinstance(deaths_seen, list) else [None]:
            if problem := _lost(left, steps, keep):
                return [Finding(f"keep={keep}, and the process died {problem}", 0)]
    return []


def _lost(left: Any, steps: list[int], keep: int) -> str:
    """What is wrong after a death in the save of step number `keep`; "" if nothing is."""
    when, there, later = left if isinstance(left, list) and len(left) == 3 else ("?", None, None)
    if not isinstance(there, list) or not when:
        return "in a save: or rather, it was to die, but did not end in time."
    new = steps[keep] in there
    if gone := [s for s in (steps[1:keep] if new else steps[:keep]) if s not in there]:
        return (
            f"{when}: the checkpoint of step {gone[0]} is gone, and that of step {steps[keep]} "
            f"{'is' if new else 'is not'} there. Delete old ones only when the new one has its "
            "name, and none of the newest."
        )
    right = steps[2 : keep + 2]
    if new and later != right:
        return f"{when}: after the next save the steps {right} should be left, not {later}."
    return ""
