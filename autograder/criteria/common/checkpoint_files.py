"""What the criteria of lab 5's task 3 share: the student's file, states, and a death while saving.

Only rank 0 works here, and it loads the student's file anew. The death is real: a forked process
saves under a limit on the size of its files, and the kernel kills it in the middle of a write.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from autograder.criteria.criterion import Draw, Values, integer

DEATH_DEADLINE_S = 15.0
NUMEL = 60_000  # 240 kB of float32
WRITE_LIMIT_BYTES = 100_000


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
            if isinstance(error, FileNotFoundError | AttributeError) and error.__cause__ is None:
                lines = []
            else:
                frames = traceback.extract_tb(error.__traceback__)
                lines = [f for f in frames if Path(f.filename).name == Path(path).name]
            if isinstance(error, NotImplementedError):
                raise NotImplementedError(f"{path}: not written yet") from error
            if not lines:
                raise
            place = f"{path}, line {lines[-1].lineno}: {lines[-1].line}"
            raise RuntimeError(f"{type(error).__name__}: {error} ({place})") from error


def rank_zero_only(draw: Draw, inputs: Values) -> list[Values]:
    return [inputs] + [{} for _ in range(draw.world_size - 1)]


def rising_steps(rng: np.random.Generator, count: int) -> list[int]:
    """Increasing step numbers; the first has one digit, later ones have more."""
    first = int(rng.integers(3, 9))
    return [first, *(int(s) for s in first + np.cumsum(rng.integers(2, 60, count - 1)))]


def state_of(inputs: Values, step: int) -> dict[str, Any]:
    """A state that no different draw or step has."""
    weight = torch.from_numpy(inputs["weight"]) + step
    return {"model": {"weight": weight}, "step": step, "note": f"step {step}"}


def is_state_of(got: Any, inputs: Values, step: int) -> bool:
    expected = state_of(inputs, step)
    try:
        same = torch.equal(got["model"]["weight"], expected["model"]["weight"])
        return bool(same and got["step"] == step and got["note"] == expected["note"])
    except Exception:  # `got` may be anything
        return False


def newest_in(module: ModuleType, folder: Path, inputs: Values) -> list[Any]:
    """What load_newest returns, as [step, or -1 for None; whether the state is right]."""
    found = module.load_newest(folder)
    if found is None:
        return [-1, True]
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise TypeError(f"load_newest: expected (step, state) or None, got {type(found).__name__}")
    step = integer(found[0], "step from load_newest")
    return [step, is_state_of(found[1], inputs, step)]


# --- death ---------------------------------------------------------------------------------------


def draw_weights(draw: Draw) -> list[Values]:
    """A large tensor and five steps."""
    rng = draw.shared()
    weight = rng.integers(-8000, 8000, NUMEL).astype(np.float32)
    inputs: Values = {"steps": rising_steps(rng, 5), "weight": weight}
    inputs["places"] = [float(x) for x in rng.uniform(0.05, 0.95, 4)]
    inputs["noise"] = int(rng.integers(2**31))
    return rank_zero_only(draw, inputs)


def die_while_saving(save: Callable[[], Any]) -> str:
    """Runs `save` in a forked process that the kernel kills when a file grows too large.

    Returns:
        how the process ended: "killed" (by that limit), "ended" or "hung".
    """
    pid = os.fork()
    if pid == 0:
        try:
            silent = open(os.devnull, "w")  # noqa: SIM115  the process ends with it
            sys.stdout = sys.stderr = silent
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(DEATH_DEADLINE_S))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (WRITE_LIMIT_BYTES, hard))
            save()
        finally:
            os._exit(0)
    end_s = time.monotonic() + DEATH_DEADLINE_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ
            return "killed" if killed else "ended"
        if time.monotonic() > end_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hung"
        time.sleep(0.01)


def step_text(step: int) -> str:
    """A step number as text for a message; -1 means that there is no step."""
    return "none" if step < 0 else str(step)
