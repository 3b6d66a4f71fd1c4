"""Rows, and the file that they are written to after every part. No torch.

A row is a dict with these keys:

    part, name      which part measured what
    status          "ok", or why there is no value: see `STATUSES`
    reason          of any other status than "ok": one or two lines; else None
    value, unit     a median, as a rule; None without a measurement. Units: "ratio", "s", "bytes",
                    "FLOP/s", "bytes/s", "share" (0 to 1), "check" (1.0: it holds), …
    low, high       quartiles, where there were rounds
    goal            {"at_least": x} or {"at_most": x}, or None
    met             whether the value meets it; None without a goal or a value
    detail          whatever else is worth knowing, JSON
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
FORMAT = 1
STATUSES = ("ok", "failed", "out of memory", "timeout", "skipped")
# A row without a value for one of these is nobody's fault.
HARMLESS = ("ok", "skipped")
KEYS = (
    "part",
    "name",
    "status",
    "reason",
    "value",
    "unit",
    "low",
    "high",
    "goal",
    "met",
    "detail",
)

Row = dict[str, Any]
_PYTHON_FOLDER = re.compile(r"/[^\s\"']*/(?:site-packages|dist-packages|lib/python3\.\d+)/")


def make_row(
    part: str,
    name: str,
    *,
    status: str = "ok",
    reason: str | None = None,
    value: float | None = None,
    unit: str | None = None,
    low: float | None = None,
    high: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    detail: Mapping[str, Any] | None = None,
) -> Row:
    """A row that is well formed.

    Raises:
        ValueError: it would not be: as `check_row`, or two goals.
    """
    if at_least is not None and at_most is not None:
        raise ValueError(f"{part}, {name}: one goal, got at_least and at_most")
    goal = met = None
    if at_least is not None:
        goal, met = {"at_least": at_least}, None if value is None else value >= at_least
    elif at_most is not None:
        goal, met = {"at_most": at_most}, None if value is None else value <= at_most
    row: Row = {
        "part": part,
        "name": name,
        "status": status,
        "reason": without_folders(reason),
        "value": value,
        "unit": unit,
        "low": low,
        "high": high,
        "goal": goal,
        "met": met,
        "detail": dict(detail or {}),
    }
    check_row(row)
    return row


def check_row(row: Mapping[str, Any]) -> None:
    """Hold a row against the module's description.

    Raises:
        ValueError: it names the row and what is wrong with it.
    """
    where = f"row {row.get('part')!r}, {row.get('name')!r}"
    if tuple(row) != KEYS:
        raise ValueError(f"{where}: expected the keys {KEYS}, got {tuple(row)}")
    if row["status"] not in STATUSES:
        raise ValueError(f"{where}: status is one of {STATUSES}, got {row['status']!r}")
    measured = row["status"] == "ok"
    if measured == bool(row["reason"]):
        raise ValueError(f"{where}: a reason if and only if the status is not ok")
    if measured != (row["value"] is not None) or measured != (row["unit"] is not None):
        raise ValueError(f"{where}: a value and a unit if and only if the status is ok")
    for key in ("value", "low", "high"):
        number = row[key]
        if number is not None and not (isinstance(number, int | float) and math.isfinite(number)):
            raise ValueError(f"{where}: {key} must be a finite number, got {number!r}")
    try:
        json.dumps(row["detail"], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: detail is no JSON: {error}") from None


def without_folders(text: str | None) -> str | None:
    """A reason without the places where the course and Python lie on this machine.

    >>> without_folders(f'File "{ROOT}/lib/x.py": No module, File "/opt/lib/python3.12/os.py"')
    'File "lib/x.py": No module, File "os.py"'
    """
    if text is None:
        return None
    return _PYTHON_FOLDER.sub("", text.replace(f"{ROOT}{os.sep}", ""))


class Results:
    """The JSON file of one machine and commit, part by part.

    Args:
        path: of the file; it is first written by `save`.
        head: what the file begins with: date, commit, machine, …

    Attributes:
        parts: name -> {"status", "reason", "seconds", "date"}, in the order in which they ran.
        rows: of all parts.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        self.head = {"format": FORMAT, **head}
        self.parts: dict[str, dict[str, Any]] = {}
        self.rows: list[Row] = []

    @classmethod
    def open(cls, path: Path, head: Mapping[str, Any]) -> Results:
        """A new file, or one to go on with: what is in it stays, if it is of the same machine.

        Raises:
            ValueError: the file is none of ours, or was measured elsewhere or with other code.
        """
        new = cls(path, head)
        if not path.exists():
            return new
        try:
            old = json.loads(path.read_text("utf-8"))
            for row in old["rows"]:
                check_row(row)
            if not isinstance(old["parts"], dict):
                raise ValueError("'parts' is no object")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no file of results: {error}") from None
        for key, value in new.head.items():
            if key != "date" and old.get(key) != value:
                raise ValueError(
                    f"{path} has {key} {old.get(key)!r}, but here it is {value!r}: "
                    "rows of both do not belong into one file; name another one"
                )
        new.head["date"] = old["date"]
        new.parts, new.rows = old["parts"], old["rows"]
        return new

    def is_done(self, part: str) -> bool:
        """Whether the part has run to its end."""
        return self.parts.get(part, {}).get("status") == "ok"

    def replace(
        self,
        part: str,
        rows: Iterable[Row],
        *,
        status: str,
        reason: str | None,
        seconds: float,
        date: str,
    ) -> None:
        """Put a part's rows in the place of those that it had before, and save."""
        self.rows = [row for row in self.rows if row["part"] != part] + list(rows)
        self.parts.pop(part, None)
        self.parts[part] = {
            "status": status,
            "reason": without_folders(reason),
            "seconds": round(seconds, 1),
            "date": date,
        }
        self.save()

    def save(self) -> None:
        """Write the file, a row per line. Whoever reads it sees the old file or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f" {json.dumps(key)}: {_dump(value)}" for key, value in self.head.items()]
        lines.append(
            f' "parts": {_block(f"{json.dumps(k)}: {_dump(v)}" for k, v in self.parts.items())}'
        )
        rows = _block(map(_dump, self.rows)).replace("{\n", "[\n", 1)
        lines.append(f' "rows": {rows[:-1]}]')
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
        os.replace(partial, self.path)

    def problems(self) -> list[str]:
        """Parts and rows that ought to have been measured and were not, one line each."""
        found = [
            f"{name}: {part['status']}: {part['reason']}"
            for name, part in self.parts.items()
            if part["status"] not in HARMLESS
        ]
        return found + [
            f"{row['part']}: {row['name']}: {row['status']}: {row['reason']}"
            for row in self.rows
            if row["status"] not in HARMLESS
        ]


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _block(lines: Iterable[str]) -> str:
    return "{\n" + ",\n".join(f"  {line}" for line in lines) + "\n }"


def table(rows: Iterable[Row]) -> str:
    """The rows as aligned text, part by part."""
    rows, part = list(rows), None
    width = min(90, max((len(row["name"]) for row in rows), default=0))
    lines: list[str] = []
    for row in rows:
        if row["part"] != part:
            part = row["part"]
            lines.append(f"\n{part}")
        lines.append(f"  {row['name']:{width}} {_outcome(row)}".rstrip())
    return "\n".join(lines).lstrip("\n")


def _outcome(row: Row) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason'].splitlines()[-1][:100]}"
    text = f"{quantity(row['value'], row['unit']):>14}"
    if row["low"] is not None and row["high"] is not None:
        ends = quantity(row["low"], row["unit"]), quantity(row["high"], row["unit"])
        text += f"  {ends[0]} … {ends[1]}"
    if row["goal"]:
        (kind, goal), *_ = row["goal"].items()
        sign = "≥" if kind == "at_least" else "≤"
        text += f"  goal {sign} {quantity(goal, row['unit'])} {'met' if row['met'] else 'not met'}"
    return text


def quantity(value: float, unit: str) -> str:
    """A value for people.

    >>> quantity(3 << 30, "bytes"), quantity(0.00123, "s"), quantity(4.5e14, "FLOP/s")
    ('3.00 GiB', '1.23 ms', '450 TFLOP/s')
    >>> quantity(0.412, "share"), quantity(1.0, "check"), quantity(1.0, "ratio")
    ('41.2%', 'holds', '1.000')
    """
    if unit == "check":
        return "holds"
    if unit == "ratio":
        return f"{value:.3f}"
    if unit == "share":
        return f"{value:.1%}"
    steps: dict[str, tuple[tuple[float, str], ...]] = {
        "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
        "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")),
        "FLOP/s": ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")),
        "bytes/s": ((1e9, "GB/s"), (1e6, "MB/s")),
    }
    for factor, name in steps.get(unit, ()):
        if abs(value) >= factor:
            return (
                f"{value / factor:.2f} {name}"
                if unit == "bytes"
                else f"{value / factor:.3g} {name}"
            )
    return f"{value:.4g} {unit}"
