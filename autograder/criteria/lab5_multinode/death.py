"""Criteria for task 3 of lab 5: a process dies in the middle of a save; data reach the disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from autograder.criteria.common.answers import plain
from autograder.criteria.common.checkpoint_files import (
    die_while_saving,
    name_of,
    newest_in,
    state_of,
    working_with,
)
from autograder.criteria.criterion import Case, Context, Finding, Values

# --- ckpt_atomic: a process dies while it writes -------------------------------------------------


def observe_atomic(path: Any, inputs: Values, context: Context) -> Values:
    """Dies while it saves a new step, dies while it saves a step again, then saves normally."""
    if context.rank != 0:
        return {}
    first, second, third = inputs["steps"][:3]
    # The folder for temporary files does not exist, so a submission that writes there fails: from a
    # different disk, a move into the checkpoint folder would be a copy, not a rename.
    elsewhere = mock.patch.object(tempfile, "tempdir", "/on-another-disk")
    with working_with(path) as (module, folder), elsewhere:
        for step in (first, second):
            module.save_checkpoint(folder, step, state_of(inputs, step), keep=5)
        answer: Values = {}
        for what, step in (("new", third), ("again", second)):
            file = folder / name_of(step)
            before = file.read_bytes() if file.is_file() else None
            other = state_of(inputs, step + 1) | {"step": step}  # a state not saved before
            ended = die_while_saving(
                lambda step=step, state=other: module.save_checkpoint(folder, step, state, keep=5)
            )
            after = file.read_bytes() if file.is_file() else None
            answer[what] = {
                "ended": ended,
                "same": before == after,
                "exists": after is not None,
                "size": len(after or b""),
                "found": newest_in(module, folder, inputs),
            }
        module.save_checkpoint(folder, third, state_of(inputs, third), keep=5)
        answer["later"] = newest_in(module, folder, inputs)
        return answer


def judge_atomic(case: Case) -> list[Finding]:
    """A final name holds the old checkpoint or does not exist, never a part of a checkpoint."""
    given, answer = case.inputs[0], plain(case.answers[0])
    second, third = given["steps"][1:3]
    findings: list[Finding] = []
    for what, step, text in (
        ("new", third, f"the process died while it saved step {third}"),
        ("again", second, f"the process died while it saved step {second} once more"),
    ):
        seen = answer.get(what)
        if not isinstance(seen, dict) or seen.get("ended") != "killed":
            how = seen.get("ended") if isinstance(seen, dict) else None
            findings.append(
                Finding(
                    f"{text}: it was to die in the middle of a large write, but it "
                    f"{how or 'did not'}. Does save_checkpoint write the state to the folder it is "
                    "given?",
                    0,
                )
            )
        elif seen.get("same") is not True:
            left = (
                f"{name_of(step)} is there with {seen.get('size')} bytes, a part of a checkpoint"
                if seen.get("exists")
                else f"{name_of(step)} is gone"
            )
            findings.append(
                Finding(
                    f"{text}, and now {left}. Write to another name in the same folder, and rename "
                    "the file when it is complete: os.replace is all or nothing.",
                    0,
                )
            )
        elif seen.get("found") != [second, True]:
            findings.append(
                Finding(
                    f"{text}: afterwards load_newest should give step {second}, it gave "
                    f"{seen.get('found')}.",
                    0,
                )
            )
    if not findings and answer.get("later") != [third, True]:
        findings.append(
            Finding(
                f"after a death the next save of step {third} should work and be found; "
                f"load_newest gave {answer.get('later')}. What a dead process left behind must not "
                "be in the way.",
                0,
            )
        )
    return findings


# --- ckpt_durable: on the disk before it has its name --------------------------------------------


def observe_durable(path: Any, inputs: Values, context: Context) -> Values:
    """Logs in order which file was synced at which size, and which file was renamed."""
    if context.rank != 0:
        return {}
    log: list[list[Any]] = []
    real = {name: getattr(os, name) for name in ("fsync", "fdatasync", "sync", "rename", "replace")}

    def synced(name: str) -> Callable[[Any], None]:
        def call(file: Any) -> None:
            number = file if isinstance(file, int) else file.fileno()
            status = os.fstat(number)
            log.append(["sync", status.st_ino, status.st_size])
            real[name](file)

        return call

    def renamed(name: str) -> Callable[..., None]:
        def call(source: Any, target: Any, **more: Any) -> None:
            log.append(["rename", os.stat(source).st_ino, Path(os.fsdecode(target)).name])
            real[name](source, target, **more)

        return call

    def sync_all() -> None:
        log.append(["sync all", 0, 0])
        real["sync"]()

    with contextlib.ExitStack() as stack:
        for name in ("fsync", "fdatasync"):
            stack.enter_context(mock.patch.object(os, name, synced(name)))
        for name in ("rename", "replace"):
            stack.enter_context(mock.patch.object(os, name, renamed(name)))
        stack.enter_context(mock.patch.object(os, "sync", sync_all))
        module, folder = stack.enter_context(working_with(path))
        step = inputs["steps"][0]
        module.save_checkpoint(folder, step, state_of(inputs, step), keep=2)
        file = folder / name_of(step)
        status = file.stat() if file.is_file() else None
        return {
            "log": log,
            "file": [status.st_ino, status.st_size] if status else [],
            "name": name_of(step),
        }


def judge_durable(case: Case) -> list[Finding]:
    """The complete file was synced before the rename that gave the file its final name."""
    answer = plain(case.answers[0])
    file, log, name = answer.get("file"), answer.get("log"), name_of(case.inputs[0]["steps"][0])
    if not isinstance(file, list) or len(file) != 2 or not isinstance(log, list):
        return [Finding(f"there is no {name} after save_checkpoint.", 0)]
    sizes = []
    for kind, inode, what in log:
        if kind == "rename" and inode == file[0] and what == name:
            break
        if kind == "sync all":
            return []
        if kind == "sync" and inode == file[0]:
            sizes.append(what)
    if file[1] in sizes:
        return []
    if sizes:
        return [
            Finding(
                f"when the file was synced it had {sizes[-1]} of its {file[1]} bytes: the rest was "
                "in Python's own buffer. file.flush() comes before os.fsync(file.fileno()).",
                0,
            )
        ]
    return [
        Finding(
            "the file got its name before os.fsync was called on it. The kernel keeps written data "
            "in memory for a while: after a power cut the name may be there and the data not.",
            0,
        )
    ]
