"""Criteria for task 3 of bonus_elastic, saving: one writer, whole files, no more than `keep`.

Deaths are real: separate processes save, and are killed around every call that changes a file, and
in the middle of a write.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from autograder.criteria.common.answers import item_of, plain
from autograder.criteria.common.checkpoint_files import is_state, rising_steps, state_of
from autograder.criteria.common.deaths import deaths, run_to_its_end
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.not_started import is_not_started
from minidist.errors import LaunchError
from minidist.launch import run

LARGE_NUMEL = 60_000  # 240 kB of float32
SAVE_DEADLINE_S = 120.0
OTHER_SECOND_S = 1.1  # after this wait, a file that stores its time of writing has other bytes
HOLD_S = 2.0  # the writer is delayed at most this long, to see which ranks do not wait for it


def name_of(step: int) -> str:
    """The file name of a step, as the lab's text specifies it."""
    return f"step-{step:08d}.pt"


def _names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder of this rank, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        yield Path(folder)


# --- elastic_atomic ------------------------------------------------------------------------------

# (was the step saved before?, keep, is the step saved again after a death, before a later step?)
SAVES = ((False, 3, True), (True, 3, True), (False, 1, False))
# The last one saves so little that it stays in a file's buffer until that is flushed.
SMALL_NUMEL = 20


def draw_atomic(draw: Draw) -> list[Values]:
    """Three steps and a large tensor, for rank 0."""
    rng = draw.shared()
    weight = rng.integers(-8000, 8000, LARGE_NUMEL).astype(np.float32)
    inputs: Values = {"steps": rising_steps(rng, 3), "weight": weight}
    return [inputs] + [{} for _ in range(draw.world_size - 1)]


def observe_atomic(save_together: Any, inputs: Values, context: Context) -> Values:
    """What is left after deaths at all points of a save: of a new step, an old one, with keep=1."""
    if context.rank != 0:
        return {}
    one = inputs["steps"][0]
    with own_folder() as folder:
        before = folder / "before"
        _alone(_save, save_together, str(before), one, _state(inputs, one, False))
        answer: Values = {"first": _names_in(before)}
        if answer["first"] != [name_of(one)]:
            return answer
        (answer["left"],) = _alone(_die, save_together, str(folder), inputs)
        return answer


def _state(inputs: Values, step: int, later: bool) -> Values:
    """The state of a step; the second save of a step has a different state."""
    return state_of(inputs | {"weight": inputs["weight"] + later}, step)


ELSEWHERE = "on-another-disk"  # a folder that is not there


def _alone(function: Any, save_together: Any, *args: Any) -> list[Any]:
    """Runs `function(save_together, …)` in a separate job of one rank; returns its result."""
    try:
        return run(function, 1, save_together, *args, deadline_s=SAVE_DEADLINE_S)
    except LaunchError as error:
        text = str(error)
        if is_not_started(text):
            raise NotImplementedError from None
        last = text.strip().splitlines()[-1]
        if ELSEWHERE in last:
            raise RuntimeError(
                "save_together asks `tempfile` for a file where that puts its files, outside of "
                "`folder`: from another disk a move is a copy. Make the file in `folder` itself."
            ) from None
        raise RuntimeError(f"save_together in a job of one rank: {last}") from None


def _save(save_together: Any, folder: str, step: int, state: Any, keep: int = 3) -> None:
    """Saves in a group of one rank; the folder of `tempfile` does not exist."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tempfile.tempdir = str(Path(folder, ELSEWHERE))
    save_together(folder, step, state, keep=keep)


def _die(save_together: Any, folder: str, inputs: Values) -> list[list[Values]]:
    """Per save of SAVES and death in it: its moment, the files left, and the next saves' files."""
    before, place = (Path(folder, name) for name in ("before", "now"))
    one, two, three = inputs["steps"]
    small = inputs | {"weight": inputs["weight"][:SMALL_NUMEL]}
    left: list[list[Values]] = []
    for number, (again, keep, repeated) in enumerate(SAVES):
        step = one if again else two
        given = small if number == len(SAVES) - 1 else inputs
        state, last = _state(given, step, True), _state(given, three, True)
        later = [(step, state)] * repeated + [(three, last)]
        known = _Known(save_together, {step: state, three: last}, before, Path(folder, "full"))
        if again and known.files[one] == (before / name_of(one)).read_bytes():
            raise RuntimeError(f"step {one} was saved once more, and the old file is still there")

        def save(step: int = step, state: Any = state, keep: int = keep) -> None:
            _save(save_together, str(place), step, state, keep)

        left.append([])
        for death in deaths(save, before, place):
            names = sorted(p.name for p in place.glob("step-*.pt"))
            seen: Values = {"when": death.when, "names": names, "parts": known.parts_in(place)}
            seen["saved"] = [
                run_to_its_end(partial(_save, save_together, str(place), then, that, keep))
                for then, that in later
            ]
            seen["later"] = sorted(p.name for p in place.glob("step-*.pt"))
            seen["later_parts"] = known.parts_in(place)
            left[-1].append(seen)
    return left


class _Known:
    """Recognises whole files, by those that undisturbed processes have saved.

    The format is free, and only `load_together` can read a file. But most files have the same
    bytes when the same state is saved again.

    Attributes:
        files: the content of each step's file.
    """

    def __init__(
        self, save_together: Any, states: dict[int, Values], before: Path, place: Path
    ) -> None:
        self.save_together, self.states = save_together, states
        self.before, self.place = before, place
        self.repeats: dict[int, bool] = {}
        self.files = {step: self._write(step) for step in states}

    def _write(self, step: int) -> bytes:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.before, self.place)
        file = self.place / name_of(step)
        save = partial(_save, self.save_together, str(self.place), step, self.states[step])
        if not run_to_its_end(save) or not file.is_file():
            raise RuntimeError(f"save_together of step {step} did not come to its end")
        return file.read_bytes()

    def parts_in(self, folder: Path) -> list[str]:
        """The files with a step's name that are not whole, in words."""
        steps = {name_of(step): step for step in self.states}
        parts = []
        for file in sorted(folder.glob("step-*.pt")):
            content, step, old = file.read_bytes(), steps.get(file.name), self.before / file.name
            if old.is_file() and content == old.read_bytes():
                continue
            if step is None:
                parts.append(f"{file.name}, of {len(content)} bytes,")
            elif not self._is_whole(content, step):
                whole = len(self.files[step])
                parts.append(f"{file.name}, of {len(content)} bytes (a whole one has {whole}),")
        return parts

    def _is_whole(self, content: bytes, step: int) -> bool:
        """Whether this is the content of a whole file with the state of the step."""
        if content == self.files[step]:
            return True
        if step not in self.repeats:
            # A file may store when or by whom it was written: then its bytes differ each time.
            time.sleep(OTHER_SECOND_S)
            self.repeats[step] = self._write(step) == self.files[step]
        if self.repeats[step]:
            return False
        if _loads(self.files[step], self.states[step]):
            return _loads(content, self.states[step])
        return len(content) == len(self.files[step])


def _loads(content: bytes, state: Values) -> bool:
    """Whether torch.load reads this state from the content."""
    try:
        got = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # whatever is wrong with the file
        return False
    return is_state(got, state)


def judge_atomic(case: Case) -> list[Finding]:
    """A file with a step's name is always whole, and the newest whole file stays.

    The format is free. An incomplete file may have any other name, in the folder or below.
    """
    given, answer = case.inputs[0], plain(case.answers[0])
    one, two, three = given["steps"]
    if answer.get("first") != [name_of(one)]:
        return [
            Finding(
                f"after save_together of step {one}: expected {[name_of(one)]} and nothing "
                f"else, got {answer.get('first')}.",
                0,
            )
        ]
    for number, (again, keep, repeated) in enumerate(SAVES):
        step = one if again else two
        later = [step] * repeated + [three]
        right = [name_of(s) for s in sorted({one, step, three})][-keep:]
        seen = item_of(answer.get("left"), number)
        if not isinstance(seen, list) or not seen:
            return [Finding(f"no file was written while step {step} was saved.", 0)]
        for left in seen:
            left = left if isinstance(left, dict) else {}
            if problem := _left_behind(left, given, step, later, right):
                what = f"step {step}{' once more' * again}, keep={keep}"
                return [Finding(f"a process died while it saved {what}, {problem}", 0)]
    return []


def _left_behind(left: Values, given: Values, step: int, then: list[int], right: list[str]) -> str:
    """What is wrong after one death, and when it came; "" if nothing is.

    Args:
        step: what was being saved; then: what new processes saved afterwards, one after the other.
        right: the names that should be there in the end.
    """
    when, names, parts = left.get("when"), left.get("names"), left.get("parts")
    if not when or not isinstance(names, list) or not isinstance(parts, list):
        return "or was to die: it did not end in time."
    if parts:
        return (
            f"{when}: {parts[0]} is there, and is not what was saved under that name. Write to a "
            "name of another form in the same folder, and os.replace when all of it is there and "
            "the file is closed."
        )
    old = name_of(given["steps"][0])
    if old not in names and (name_of(step) not in names or len(right) > 1):
        return (
            f"{when}: now {old} is gone. What is there has to stay until the new file has its name."
        )
    later, saved = left.get("later"), left.get("saved")
    there = set(later) if isinstance(later, list) else set()
    new = f"when new processes save {' and then '.join(f'step {s}' for s in then)}"
    steps = {name_of(s) for s in (*given["steps"][::2], step)}
    if not set(right) <= there <= steps:  # `elastic_keep` counts how many are left
        return (
            f"{when}: {new}, there should be {right}, there is {later}. What a death "
            "leaves behind must not get in the way, nor count as a checkpoint."
        )
    if saved != [True] * len(then):
        return (
            f"{when}: {new}, save_together raises an error or hangs. What a death leaves behind "
            "must not get in the way."
        )
    if spoilt := left.get("later_parts"):
        return (
            f"{when}: {new}, {item_of(spoilt, 0)} is there, and is not what was saved under that "
            "name. What a death leaves behind must not get into the next file."
        )
    return ""


# --- elastic_writer ------------------------------------------------------------------------------


def draw_writer(draw: Draw) -> list[Values]:
    """Two steps, and a different state on every rank."""
    rng = draw.shared()
    steps = rising_steps(rng, 2)
    return [
        {"steps": steps, "weight": draw.private(rank).normal(size=50).astype(np.float32)}
        for rank in range(draw.world_size)
    ]


def observe_writer(save_together: Any, inputs: Values, context: Context) -> Values:
    """Which ranks write, and whether the file is there when `save_together` returns."""
    one, two = inputs["steps"]
    with own_folder() as folder:
        # 1. Every rank has its own folder, so the files show which ranks write.
        save_together(folder, one, state_of(inputs, one), keep=3)
        answer: Values = {"files": _names_in(folder)}

        # 2. One folder for all ranks. The writer is delayed until all other ranks have returned
        # without waiting for the writer, or until HOLD_S are over.
        shared: list[Any] = [str(folder)]
        dist.broadcast_object_list(shared, src=0)
        place = Path(shared[0])
        dist.barrier()
        hold = _held_back(place, context.world_size) if context.rank == 0 else None
        with hold or contextlib.nullcontext():
            save_together(place, two, state_of(inputs, two), keep=3)
        answer["there"] = (place / name_of(two)).is_file()
        (place / f"left-{context.rank}").touch()
        dist.barrier()  # rank 0 removes the shared folder after this
    return answer


@contextlib.contextmanager
def _held_back(place: Path, world_size: int) -> Iterator[None]:
    """Delays every rename of a file until the other ranks have returned, at most HOLD_S."""

    def wait() -> None:
        end_s = time.monotonic() + HOLD_S
        while time.monotonic() < end_s and len(list(place.glob("left-*"))) < world_size - 1:
            time.sleep(0.02)

    def slowly(function: Any) -> Any:
        def rename(*args: Any, **options: Any) -> Any:
            wait()
            return function(*args, **options)

        return rename

    with (
        mock.patch.object(os, "replace", slowly(os.replace)),
        mock.patch.object(os, "rename", slowly(os.rename)),
    ):
        yield


def judge_writer(case: Case) -> Iterator[Finding]:
    """Only rank 0 writes, and no rank returns before the file is there.

    The others may wait in any collective.
    """
    one, two = (name_of(step) for step in case.inputs[0]["steps"])
    for rank, answer in enumerate(map(plain, case.answers)):
        files = answer.get("files")
        if rank == 0 and files != [one]:
            yield Finding(f"rank 0's folder: expected {[one]}, got {files}.", rank)
        elif rank > 0 and files != []:
            yield Finding(
                f"this rank wrote {files}: all ranks have the same state, so rank 0 writes it. "
                "Two writers of one file spoil it.",
                rank,
            )
        elif answer.get("there") is not True:
            yield Finding(
                f"save_together has returned and {two} is not there: a rank that goes on may end, "
                "or look for it. All ranks wait until rank 0 has written.",
                rank,
            )


# --- elastic_keep --------------------------------------------------------------------------------

OTHERS = ("best.pt", "notes.txt", "upload.tmp")  # files that save_together has not made


def draw_keep(draw: Draw) -> list[Values]:
    """Six steps, and how many checkpoints to keep."""
    rng = draw.shared()
    values = {
        "steps": rising_steps(rng, 6),
        "keep": int(rng.choice([2, 4])),  # not the default
        "weight": rng.normal(size=50).astype(np.float32),
    }
    return [dict(values) for _ in range(draw.world_size)]


def observe_keep(save_together: Any, inputs: Values, context: Context) -> Values:
    """The names in the folder after every save but the first two; the last step is saved twice.

    The first two checkpoints are copied into the folder, as if an earlier job had made them.
    """
    seen, keep = [], inputs["keep"]
    with own_folder() as folder:
        for name in OTHERS:
            (folder / name).write_text("somebody else's")
        for number, step in enumerate(inputs["steps"][:2]):
            with own_folder() as other:
                save_together(other, step, state_of(inputs, step), keep=keep)
                shutil.copytree(other, folder, dirs_exist_ok=True)
            late = time.time() + 1e6 - 100 * number  # as after a copy: the older file looks newer
            if (folder / name_of(step)).is_file():
                os.utime(folder / name_of(step), (late, late))
        for step in [*inputs["steps"][2:], inputs["steps"][-1]]:
            save_together(folder, step, state_of(inputs, step), keep=keep)
            seen.append(_names_in(folder))
    return {"seen": seen}


def judge_keep(case: Case) -> Iterator[Finding]:
    """The highest steps are left, and all files that are not checkpoints.

    Rank 0 may delete before or after the others go on.
    """
    given, seen = case.inputs[0], plain(case.answers[0]).get("seen")
    for number, step in enumerate([*given["steps"][2:], given["steps"][-1]]):
        kept = given["steps"][: number + 3][-given["keep"] :]
        wanted = sorted([*OTHERS, *(name_of(s) for s in kept)])
        got = item_of(seen, number)
        if got != wanted:
            again = " once more" * (number + 2 == len(given["steps"]))
            yield Finding(
                f"after step {step}{again}, keep={given['keep']}: expected {wanted}, got {got}. "
                f"(Steps {given['steps'][0]} and {given['steps'][1]} were there before, as if "
                "copied from an earlier job: their files look newer than they are.)",
                0,
            )
            return
