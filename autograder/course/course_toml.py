"""The settings of a course, in one file: `course.toml` in the course's folder.

    [points.lab1_ddp]        points of criteria; criteria not named here keep their lab's points
    ddp_scaling = 10
    wrap_model = 0           checked and shown, and worth nothing

    [limits.lab5_multinode]  limits of one submission; those not named keep their lab's limits
    wall_s = 1200            all names: `Limits` in autograder/criteria/limits.py
    box_memory_bytes = "12 GiB"

    [gates.lab1_ddp]         what a lab gives at most to whoever misses its idea; 100 is no gate
    averaging = 60           all names: `gates` in the lab's criteria

    [calendar.lab1_ddp]      when it is handed out and due, and what handing in late costs
    due = 2026-10-26         all keys: autograder/course/calendar.py

    [slurm]                  for `grade --executor slurm`; see autograder/course/slurm_options.py
    partition = "gpu"

After a change of points, run `make build`, which writes the points into the notebooks. Grading
again then runs no submission a second time.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autograder.course.calendar import Calendar, read_calendar
from autograder.course.slurm_options import SlurmOptions, read_slurm
from autograder.course.values import OptionsError, whole_number
from autograder.criteria import get_lab, lab_names
from autograder.criteria.criterion import Lab
from autograder.criteria.limits import Limits

NAME = "course.toml"
_SECTIONS = ("points", "limits", "gates", "calendar", "slurm")


@dataclass(frozen=True)
class Options:
    """The settings in `course.toml`.

    Attributes:
        points: lab -> criterion -> points.
        limits: lab -> name of a limit -> value.
        gates: lab -> idea -> points at most without it.
        slurm: options for Slurm jobs.
        calendar: when labs are handed out and due.
    """

    points: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    gates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    calendar: Calendar = field(default_factory=Calendar)

    def apply(self, lab: Lab) -> Lab:
        """The lab with the course's points, limits and gates."""
        points, limits = self.points.get(lab.name, {}), self.limits.get(lab.name, {})
        caps = self.gates.get(lab.name, {})
        if not points and not limits and not caps:
            return lab
        criteria = tuple(
            dataclasses.replace(c, points=points[c.name]) if c.name in points else c
            for c in lab.criteria
        )
        changed = dataclasses.replace(lab.limits, **limits)
        gates = tuple(
            dataclasses.replace(g, at_most=caps.get(g.idea, g.at_most)) for g in lab.gates
        )
        return dataclasses.replace(lab, criteria=criteria, limits=changed, gates=gates)


def read_options(root: Path) -> Options:
    """Reads the settings in the folder `root`; returns defaults if there is no file.

    Raises:
        OptionsError: the file is not TOML, names a table, lab, criterion, limit or key that does
            not exist, or has an invalid value.
    """
    path = root / NAME
    try:
        found = tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        return Options()
    except (OSError, ValueError) as error:
        raise OptionsError(f"{path}: cannot be read: {error}") from None
    if unknown := sorted(set(found) - set(_SECTIONS)):
        raise OptionsError(
            f"{path}: expected tables [points.LAB], [limits.LAB], [gates.LAB], "
            f"[calendar.LAB], [slurm]; got {unknown[0]!r}"
        )
    points: dict[str, dict[str, float]] = {}
    limits: dict[str, dict[str, int]] = {}
    gates: dict[str, dict[str, float]] = {}
    slurm = read_slurm(_table(found.pop("slurm", {}), f"{path}: slurm"), f"{path}: [slurm]")
    calendar = read_calendar(
        _table(found.pop("calendar", {}), f"{path}: calendar"), lab_names(), f"{path}: [calendar]"
    )
    for section in found:
        for name, table in _table(found[section], f"{path}: {section}").items():
            where = f"{path}: [{section}.{name}]"
            if name not in lab_names():
                raise OptionsError(f"{where}: no such lab; there are: {', '.join(lab_names())}")
            entries = _table(table, where)
            if section == "points":
                names = [criterion.name for criterion in get_lab(name).criteria]
                points[name] = _points(entries, names, "criterion", where)
                if Options(points).apply(get_lab(name)).max_score <= 0:
                    raise OptionsError(
                        f"{where}: with these points nothing in {name} is worth anything"
                    )
            elif section == "gates":
                ideas = [gate.idea for gate in get_lab(name).gates]
                gates[name] = _points(entries, ideas, "gate", where)
            else:
                limits[name] = _limits(entries, where)
    return Options(points, limits, gates, slurm, calendar)


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise OptionsError(f"{where}: expected a table, got {value!r}")
    return value


def _points(entries: dict[str, Any], names: list[str], what: str, where: str) -> dict[str, float]:
    for name, value in entries.items():
        if name not in names:
            raise OptionsError(f"{where}: {name}: no such {what}; there are: {', '.join(names)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value >= 0):
            raise OptionsError(f"{where}: {name}: expected points from 0 up, got {value!r}")
    return {name: float(value) for name, value in entries.items()}


def _limits(entries: dict[str, Any], where: str) -> dict[str, int]:
    names = [each.name for each in dataclasses.fields(Limits)]
    found = {}
    for name, value in entries.items():
        if name not in names:
            raise OptionsError(f"{where}: {name}: no such limit; there are: {', '.join(names)}")
        size = name.endswith("_bytes")
        found[name] = whole_number(value, f"{where}: {name}", or_size=size)
    return found
