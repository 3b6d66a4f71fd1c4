"""Criteria for task 3 of lab 5: a process dies while it saves; data reach the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from autograder.criteria.common.answers import item_of, plain
from autograder.criteria.common.checkpoint_files import (
    MANY,
    describe,
    is_whole,
    load_file,
    name_of,
    newest_in,
    one_file,
    others_in,
    save,
    state_of,
    steps_in,
    working_with,
)
from autograder.criteria.common.deaths import Death, deaths
from autograder.criteria.criterion import Case, Context, Finding, Values, integer

# --- ckpt_atomic: a process dies while it saves --------------------------------------------------


_ELSEWHERE = "/on-another-disk"


def observe_atomic(path: Any, inputs: Values, context: Context) -> Values:
    """What is left after deaths at all points of a save, of a new step and of a saved one."""
    if context.rank != 0:
        return {}
    first, second, third = inputs["steps"][:3]
    # The folder for temporary files does not exist, so a submission that writes there fails: from a
    # different disk, a move into the checkpoint folder would be a copy, not a rename.
    elsewhere = mock.patch.object(tempfile, "tempdir", _ELSEWHERE)
    with working_with(path) as (module, folder):
        before, place = folder / "before", folder / "now"
        for step in (first, second):
            save(module, before, step, state_of(inputs, step))
        try:
            with elsewhere:
                module.save_checkpoint(folder / "first", first, state_of(inputs, first), keep=MANY)
        except FileNotFoundError as error:
            if _ELSEWHERE not in str(error):
                raise
            return {"elsewhere": describe(error, path)}

        file = before / name_of(first)
        alone = is_whole(module, file, [state_of(inputs, first)])
        answer: Values = {"beside": [] if alone else others_in(before)}
        place.mkdir(exist_ok=True)
        around = {p.name for p in folder.iterdir()}
        for what, step in (("new", third), ("again", second)):
            state = state_of(inputs, step + 1) | {"at": step}  # a state not saved before

            def save_now(step: int = step, state: Values = state) -> None:
                with elsewhere:
                    module.save_checkpoint(place, step, state, keep=MANY)

            answer[what] = []
            for death in deaths(save_now, before, place):
                outside = [p.name for p in folder.iterdir() if p.name not in around]
                left = _after(death, place, before, {step: state}, path, inputs)
                left["outside"] = outside
                answer[what].append(left)
                if left.get("failed"):
                    break
        return answer


def _after(
    death: Death,
    place: Path,
    before: Path,
    saved: dict[int, Values],
    path: Any,
    inputs: Values,
) -> Values:
    """What a death has left, what a new process loads from it, and what the next save makes of it.

    The next save is of the same step, but of fewer bytes: leftover bytes would spoil the file.

    Args:
        before: the folder as it was before the save; saved: step -> state of the save that died.
    """
    module = load_file(path)  # a new job: it has the files, but no memory
    steps = inputs["steps"]
    old = {p.name: p.read_bytes() for p in before.iterdir() if p.is_file()}
    parts = []
    left_steps = steps_in(place)
    for step in left_steps:
        file = place / name_of(step)
        states = [saved[step]] if step in saved else []
        if file.read_bytes() != old.get(file.name) and not is_whole(module, file, states):
            parts.append([file.name, file.stat().st_size])
    left: Values = {"ended": death.ended, "when": death.when, "parts": parts}
    names = sorted(p.name for p in place.glob("step-*.ckpt"))
    left["like"] = [n for n in names if n not in map(name_of, left_steps)]
    left["steps"] = left_steps
    try:
        found = module.load_newest(place)
        left["found"] = -1 if found is None else integer(found[0], "step from load_newest")
        weight = torch.from_numpy(inputs["weight"][::2].copy())
        shorter = {step: state | {"model": {"weight": weight}} for step, state in saved.items()}
        for step, state in (*shorter.items(), (steps[3], state_of(inputs, steps[3]))):
            module.save_checkpoint(place, step, state, keep=MANY)
    except Exception as error:
        left["failed"] = describe(error, path)[:600]
        return left
    left["later"] = newest_in(module, place, inputs)
    files = {place / name_of(step): state for step, state in shorter.items()}
    left["saved"] = all(f.is_file() and is_whole(module, f, [s]) for f, s in files.items())
    left["files"] = sorted(p.name for p in place.glob("step-*.ckpt"))
    return left


def judge_atomic(case: Case) -> Iterator[Finding]:
    """A final name always holds a whole checkpoint; leftovers of a death disturb no load or save.

    An incomplete file may lie in a subfolder; the file may be renamed or linked to its name.
    """
    given, answer = case.inputs[0], plain(case.answers[0])
    if elsewhere := answer.get("elsewhere"):
        yield Finding(
            "save_checkpoint writes to the machine's folder for temporary files, which is not "
            f"there: {elsewhere} From another disk a file that is moved gets copied, and "
            "a death leaves half of the copy. Write nothing outside of the given folder.",
            0,
        )
        return
    if beside := one_file(answer.get("beside")):
        alone = f"{name_of(given['steps'][0])}, copied alone into a new folder, is no checkpoint"
        yield Finding(f"{alone} for load_newest, before any process has died. {beside}", 0)
        return
    for what, again in (("new", ""), ("again", " once more")):
        step = given["steps"][2 if what == "new" else 1]
        seen = answer.get(what)
        if not isinstance(seen, list) or not seen:
            yield Finding(
                "a process was to die while it saved, but it made no file in the folder that "
                "save_checkpoint was given.",
                0,
            )
            return
        for left in seen:
            left = left if isinstance(left, dict) else {}
            if problem := _problem(left, given["steps"], step, what):
                text = f"a process that saved step {step}{again} died {left.get('when')}"
                yield Finding(f"{text}: {problem}", 0)
                return


def _problem(left: Values, steps: list[int], step: int, what: str) -> str:
    """What is wrong after one death; "" if all is as it should be."""
    there, parts = left.get("steps"), left.get("parts")
    if left.get("ended") != "killed" or not isinstance(there, list) or not isinstance(parts, list):
        return "it did not end in time."
    if parts:
        return (
            f"{parts[0][0]} is there with {parts[0][1]} bytes, and load_newest does not read from "
            "it what was saved under that name. Write to a name of another form in the same "
            "folder, and rename the file when it is complete: os.replace is all or nothing."
        )
    if left.get("like") != []:
        return (
            f"{left.get('like')} is there, which is not complete: what is not complete has a name "
            "of another form, no step-….ckpt."
        )
    if what == "again" and step not in there:
        return (
            f"now {name_of(step)} is gone. os.replace puts the new file in the place of the old "
            "one; there is nothing to delete before."
        )
    if left.get("outside") != []:
        return (
            f"beside the folder it left {left.get('outside')}. From another disk a file that is "
            "moved gets copied: write nothing outside of the given folder."
        )
    if failed := left.get("failed"):
        return (
            f"a new process that loads the newest checkpoint and saves it again gets {failed} "
            "What a dead process has left behind must not be in the way."
        )
    kept = [s for s in steps[:2] if s in there] + ([step] if step in there else [])
    if left.get("found") != max(kept, default=-1):
        return f"step {max(kept, default=-1)} is whole, load_newest gave {left.get('found')}."
    wanted = sorted({*kept, step, steps[3]})
    if left.get("files") != [name_of(s) for s in wanted] or left.get("later") != [steps[3], True]:
        return (
            f"after the next saves, of steps {step} and {steps[3]} with keep={MANY}, there should "
            f"be {[name_of(s) for s in wanted]}, there is {left.get('files')}. What a dead process "
            "has left behind must not be taken for a checkpoint."
        )
    if left.get("saved") is not True:
        return (
            f"a new process saved step {step} again, and {name_of(step)} does not hold what was "
            "saved. What a dead process has left behind must not get into the next file."
        )
    return ""


# --- ckpt_durable: the data are on the disk before the file has its name -------------------------


def observe_durable(path: Any, inputs: Values, context: Context) -> Values:
    """Logs in order which file was synced with which content, and which file was renamed.

    In the last save the disk is full, and fsync is the first call that fails.
    """
    if context.rank != 0:
        return {}
    log: list[list[Any]] = []
    full: OSError | None = None
    before: list[list[int]] = []  # the steps in the folder, at each fsync that fails
    real = {name: getattr(os, name) for name in ("fsync", "fdatasync", "sync", "rename", "replace")}

    def synced(name: str) -> Callable[[Any], None]:
        def call(file: Any) -> None:
            number = file if isinstance(file, int) else file.fileno()
            status = os.fstat(number)
            log.append(["sync", status.st_ino, status.st_size, _sum_of(f"/proc/self/fd/{number}")])
            if full and stat.S_ISREG(status.st_mode):
                before.append(steps_in(folder))
                raise full
            real[name](file)

        return call

    def renamed(name: str) -> Callable[..., None]:
        def call(source: Any, target: Any, **more: Any) -> None:
            log.append(["rename", os.stat(source).st_ino, Path(os.fsdecode(target)).name, 0])
            real[name](source, target, **more)

        return call

    def sync_all() -> None:
        log.append(["sync all", 0, 0, 0])
        real["sync"]()

    with contextlib.ExitStack() as stack:
        for name in ("fsync", "fdatasync"):
            stack.enter_context(mock.patch.object(os, name, synced(name)))
        for name in ("rename", "replace"):
            stack.enter_context(mock.patch.object(os, name, renamed(name)))
        stack.enter_context(mock.patch.object(os, "sync", sync_all))
        module, folder = stack.enter_context(working_with(path))
        # A large state bypasses Python's buffer. A small one stays in it until the flush.
        large = state_of(inputs, inputs["steps"][0])
        files = []
        for step, state in zip(inputs["steps"], (large, {"at": 1}), strict=False):
            module.save_checkpoint(folder, step, state, keep=2)
            file = folder / name_of(step)
            status = file.stat() if file.is_file() else None
            files.append([status.st_ino, status.st_size, _sum_of(file)] if status else [])
        step, answer = inputs["steps"][2], {"log": list(log), "files": files}
        full, told = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), False
        log.clear()
        try:
            module.save_checkpoint(folder, step, large, keep=2)
        except Exception:
            told = True
        named = any(kind == "rename" and what == name_of(step) for kind, _, what, _ in log)
        gone = bool(before) and bool(set(before[0]) - set(steps_in(folder)))
        return answer | {"full": [bool(before), told, named, gone]}


def _sum_of(file: str | Path) -> int:
    """A checksum of the file's content; 0 if it is unreadable, as /proc/self/fd is off Linux."""
    try:
        return zlib.crc32(Path(file).read_bytes())
    except OSError:
        return 0


def judge_durable(case: Case) -> Iterator[Finding]:
    """The complete file was synced before the rename that gave the file its final name.

    The folder may be synced or not, and os.sync may replace os.fsync.
    """
    answer = plain(case.answers[0])
    for number, step in enumerate(case.inputs[0]["steps"][:2]):
        file = item_of(answer.get("files"), number)
        if problem := _not_durable(file, answer.get("log"), name_of(step)):
            yield problem
            return
    failed, told, named, gone = (item_of(answer.get("full"), number) for number in range(4))
    if failed is not True or (told is True and named is False and gone is False):
        return
    if named is False and told is True:
        yield Finding(
            "the disk was full while the new checkpoint was written, and an older one was "
            "deleted, though the new one has no name yet: delete none before that.",
            0,
        )
        return
    did = "nobody was told" if named is False else "the file got its name all the same"
    yield Finding(
        f"the disk was full, which os.fsync said (OSError: {os.strerror(errno.ENOSPC)}), and "
        f"{did}. Let its error out of save_checkpoint: the file is not on the disk.",
        0,
    )


def _not_durable(file: Any, log: Any, name: str) -> Finding | None:
    """What is wrong with the order of the calls for one file, [inode, size, checksum]."""
    if not isinstance(file, list) or len(file) != 3 or not isinstance(log, list):
        return Finding(f"there is no {name} after save_checkpoint.", 0)
    sizes, sums = [], set()
    for kind, inode, what, content in log:
        if kind == "rename" and inode == file[0] and what == name:
            break
        if kind == "sync all":
            return None
        if kind == "sync" and inode == file[0]:
            sizes.append(what)
            sums.add(content)
    if file[1] in sizes and sums & {0, file[2]}:
        return None
    if file[1] in sizes:
        return Finding(
            "after the file was synced, something in it was written anew: after a power cut "
            "that may be missing. os.fsync comes when the file is complete.",
            0,
        )
    if sizes:
        return Finding(
            f"when the file was synced it had {sizes[-1]} of its {file[1]} bytes: the rest was "
            "in Python's own buffer. file.flush() comes before os.fsync(file.fileno()).",
            0,
        )
    return Finding(
        "the file got its name before os.fsync was called on it. The kernel keeps written data "
        "in memory for a while: after a power cut the name may be there and the data not.",
        0,
    )
