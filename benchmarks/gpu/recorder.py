"""How a part writes its rows: each as soon as it is there, whatever becomes of the next one."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import harness
import torch

from gpu.rows import make_row
from minidist.profile.paired import quartiles

T = TypeVar("T")
_NO_MEMORY = ("OutOfMemoryError", "CUDA out of memory")


class NotHereError(Exception):
    """A measurement wants what this machine has not: a GPU, two of them, a package."""


class Recorder:
    """Writes the rows of one part.

    Args:
        part: its name.
        path: gets a line of JSON per event; None keeps rows in `rows` only.
        deadline_s: of `time.monotonic()`: when the part will be ended from outside.

    Attributes:
        rows: what was written.
    """

    def __init__(
        self, part: str, path: Path | None = None, *, deadline_s: float = float("inf")
    ) -> None:
        self.part, self.deadline_s = part, deadline_s
        self.rows: list[dict[str, Any]] = []
        self._file = None if path is None else path.open("a", encoding="utf-8")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def left_s(self) -> float:
        """Seconds until the part is ended."""
        return self.deadline_s - time.monotonic()

    # --- measurements -------------------------------------------------------------------------

    def measure(self, name: str, fn: Callable[[], T], *, needs_s: float = 0.0) -> T | None:
        """Call `fn`, which writes rows; what it raises becomes a row `name`, and the part goes on.

        Args:
            name: of what is measured.
            needs_s: about how long it takes; it is left out if the part ends before.

        Returns:
            What `fn` returns; None if it failed or was left out.

        Raises:
            Exception: the one of `fn`, where the GPU does not work any more after it (an illegal
                access, say): nothing else in this process could be measured.
        """
        if self.left_s < needs_s:
            reason = f"{max(0.0, self.left_s):.0f} s are left of the part, and it takes {needs_s:g}"
            self.fail(name, reason, status="timeout")
            return None
        self._write({"begin": name})
        status = None
        try:
            return fn()
        except NotHereError as error:
            self.skip(name, str(error))
        except Exception as error:
            status, reason = _explain(error)
            self.fail(name, reason, status=status)
            if not _works():
                raise
        finally:
            self._write({"end": name})
        if status is not None:
            # By now the traceback is gone, and with it what its frames held.
            free_memory()
        return None

    # --- rows ---------------------------------------------------------------------------------

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        low: float | None = None,
        high: float | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
        **detail: Any,
    ) -> None:
        """A measured number. Arguments as for `rows.make_row`."""
        goal = {"at_least": at_least, "at_most": at_most}
        self._row(name, value=float(value), unit=unit, low=low, high=high, **goal, detail=detail)

    def rate(
        self, name: str, seconds: Sequence[float], amount: float, unit: str, **detail: Any
    ) -> float:
        """`amount` per second, from seconds per round: the median and the quartiles. Returns it."""
        low, middle, high = quartiles([amount / each for each in seconds])
        self.figure(name, middle, unit, low=low, high=high, rounds=len(seconds), **detail)
        return middle

    def ratio(
        self,
        name: str,
        times: Mapping[str, Sequence[float]],
        top: str,
        bottom: str,
        *,
        factor: float = 1.0,
        unit: str = "ratio",
        at_least: float | None = None,
        at_most: float | None = None,
        **detail: Any,
    ) -> float:
        """factor * times[top] / times[bottom] within each round: the median, and the quartiles.

        Args:
            times: what `harness.paired` returned: name -> seconds per round.

        Returns:
            The median.
        """
        found = harness.row(name, times, top, bottom)
        self.figure(
            name,
            factor * found.ratio,
            unit,
            low=factor * found.low,
            high=factor * found.high,
            at_least=at_least,
            at_most=at_most,
            rounds=len(times[top]),
            seconds={top: found.ours, bottom: found.peer},
            **detail,
        )
        return factor * found.ratio

    def check(self, name: str, holds: bool, otherwise: str, **detail: Any) -> None:
        """Something that has to be so, whatever the machine; `otherwise` says what is instead."""
        if holds:
            self._row(name, value=1.0, unit="check", detail=detail)
        else:
            self._row(name, status="failed", reason=otherwise, detail=detail)

    def skip(self, name: str, reason: str) -> None:
        """It cannot be measured on this machine."""
        self._row(name, status="skipped", reason=reason)

    def fail(self, name: str, reason: str, status: str = "failed") -> None:
        """It should have been measured."""
        self._row(name, status=status, reason=reason)

    def _row(self, name: str, **columns: Any) -> None:
        row = make_row(self.part, name, **columns)
        self.rows.append(row)
        self._write(row)

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(event, allow_nan=False) + "\n")
            self._file.flush()


def free_memory() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _explain(error: Exception) -> tuple[str, str]:
    """Status and reason. A rank's error arrives as text, so that is what is looked at."""
    text = "".join(traceback.format_exception_only(error)).strip()
    status = "out of memory" if any(word in text for word in _NO_MEMORY) else "failed"
    where = traceback.extract_tb(error.__traceback__)[-1]
    # Of a rank's traceback, the lines that say what: where it was is indented.
    lines = [
        line.removesuffix("Traceback (most recent call last):").strip()
        for line in text.splitlines()
        if line and not line[0].isspace()
    ]
    return status, f"{' '.join(lines)[:600]} ({Path(where.filename).name}:{where.lineno})"


def _works() -> bool:
    """Whether this process can still use its GPU; an error in a kernel shows here at the latest."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True
