"""What the criteria of lab 5's task 3 share: the student's file, states, and what a folder holds.

Only rank 0 works here, and it loads the student's file anew.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from autograder.criteria.criterion import Draw, Values, integer
from autograder.criteria.not_started import is_not_started

MANY = 40  # to keep: more than any test saves, so that nothing is deleted. ckpt_keep keeps fewer.
LATE_S = 1.0  # after this time, a missing file is looked for once more
NUMEL = 60_000  # 240 kB of float32: more than `deaths.WRITE_LIMIT_BYTES`


def name_of(step: int) -> str:
    """The file name of a step, as the lab's text prescribes it."""
    return f"step-{step:08d}.ckpt"


# --- the student's file --------------------------------------------------------------------------


def load_file(path: Any) -> ModuleType:
    """Loads the file as a new module, even if it was imported before.

    Raises:
        FileNotFoundError: the file does not exist.
        NotImplementedError: something in the file has not been written yet.
        AttributeError: a function is missing in the file.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: expected a file in {Path.cwd()}; run the cell above")
    spec = importlib.util.spec_from_file_location("lab5_checkpointing", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    for name in ("save_checkpoint", "load_newest"):
        if not callable(getattr(module, name, None)):
            raise AttributeError(f"{file} has no function {name}")
    return module


@contextlib.contextmanager
def working_with(path: Any) -> Iterator[tuple[ModuleType, Path]]:
    """Yields the student's module and an empty folder; errors name a line of the student's file."""
    with (
        tempfile.TemporaryDirectory(prefix="ckpt-") as folder,
        contextlib.redirect_stdout(io.StringIO()),  # hides prints about damaged files
    ):
        try:
            yield load_file(path), Path(folder)
        except (Exception, SystemExit) as error:
            if is_not_started(error):
                raise NotImplementedError from error
            told, name = describe(error, path), type(error).__name__
            if not told.endswith(")"):
                raise
            # A report begins with the name of the error's type, so the new type keeps the name.
            raise type(name, (RuntimeError,), {})(told.removeprefix(f"{name}: ")) from error


def describe(error: BaseException, path: Any) -> str:
    """The error, and the innermost line of the student's file that led to it, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if Path(frame.filename).name == Path(path).name]
    text = f"{type(error).__name__}: {error}"
    return f"{text} ({path}, line {lines[-1].lineno}: {lines[-1].line})" if lines else f"{text}."


def save(module: ModuleType, folder: Any, step: int, state: Any, *, keep: int = MANY) -> Any:
    """Saves with the student's function; returns what that returns.

    Raises:
        FileNotFoundError: the file is not there when the function returns.
    """
    returned = module.save_checkpoint(folder, step, state, keep=keep)
    file = Path(folder) / name_of(step)
    if not file.is_file():
        there = sorted(p.name for p in file.parent.glob("*"))
        time.sleep(LATE_S)
        late = f"; {LATE_S:g} s later it was there" if file.is_file() else ""
        raise FileNotFoundError(
            f"save_checkpoint(…, {step}, …, keep={keep}) has returned, and there was no "
            f"{file.name} in its folder, but {there}{late}"
        )
    return returned


def rank_zero_only(draw: Draw, inputs: Values) -> list[Values]:
    return [inputs] + [{} for _ in range(draw.world_size - 1)]


def rising_steps(rng: np.random.Generator, count: int) -> list[int]:
    """Increasing step numbers; the first has one digit, later ones have more."""
    first = int(rng.integers(3, 9))
    return [first, *(int(s) for s in first + np.cumsum(rng.integers(2, 60, count - 1)))]


def state_of(inputs: Values, step: int) -> dict[str, Any]:
    """A state that differs for each draw and step."""
    weight = torch.from_numpy(inputs["weight"]) + step
    return {"model": {"weight": weight}, "at": step, "note": f"step {step}"}


def is_state_of(got: Any, inputs: Values, step: int) -> bool:
    return is_state(got, state_of(inputs, step))


def is_state(got: Any, expected: dict[str, Any]) -> bool:
    """Whether what was loaded is what was saved."""
    try:
        same = torch.equal(got["model"]["weight"], expected["model"]["weight"])
        return bool(same and all(got[key] == expected[key] for key in ("at", "note")))
    except Exception:  # `got` may be anything
        return False


def step_and_state(function: str, found: Any) -> tuple[int, Any]:
    """Reads a pair that `function` has returned.

    Raises:
        TypeError: it is no pair, or its step is no integer.
    """
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise TypeError(f"{function}: expected (step, state) or None, got {type(found).__name__}")
    return integer(found[0], f"step from {function}"), found[1]


def newest_in(module: ModuleType, folder: Path, inputs: Values) -> list[Any]:
    """What load_newest returns, as [step, or -1 for None; whether the state is right]."""
    if (found := module.load_newest(folder)) is None:
        return [-1, True]
    step, state = step_and_state("load_newest", found)
    return [step, is_state_of(state, inputs, step)]


def draw_weights(draw: Draw) -> list[Values]:
    """A large tensor and five steps."""
    rng = draw.shared()
    weight = rng.integers(-8000, 8000, NUMEL).astype(np.float32)
    inputs: Values = {"steps": rising_steps(rng, 5), "weight": weight}
    inputs["places"] = [float(x) for x in rng.uniform(0.05, 0.95, 4)]
    inputs["noise"] = int(rng.integers(2**31))
    return rank_zero_only(draw, inputs)


def steps_in(folder: Path) -> list[int]:
    """The steps whose names are in the folder, whatever is in the files."""
    names = sorted(p.name for p in folder.glob("step-*.ckpt"))
    return [int(n[5:13]) for n in names if len(n) == 18 and n[5:13].isdigit()]


def others_in(folder: Path) -> list[str]:
    """The names in the folder that are no step-….ckpt."""
    return sorted({p.name for p in folder.glob("*")} - {p.name for p in folder.glob("step-*.ckpt")})


def one_file(others: Any) -> str:
    """A sentence about the files that saves left beside theirs (`others_in`); "" if none."""
    if not isinstance(others, list) or not others:
        return ""
    return (
        f"save_checkpoint leaves {others[0]!r:.80} beside its file: a checkpoint is one file, and "
        "all that load_newest needs is in it."
    )


def is_whole(module: ModuleType, file: Path, states: list[dict[str, Any]]) -> bool:
    """Whether load_newest reads one of `states` from the file, in a folder without other files."""
    with tempfile.TemporaryDirectory(prefix="alone-") as alone:
        shutil.copy2(file, alone)
        try:
            found = module.load_newest(Path(alone))
            return name_of(found[0]) == file.name and any(is_state(found[1], s) for s in states)
        except Exception:  # load_newest should not raise; ckpt_damage judges that
            return False


def step_text(step: int) -> str:
    """A step number as text for a message; -1 means that there is no step."""
    return "none" if step < 0 else str(step)
