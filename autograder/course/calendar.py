"""The term's calendar, the table [calendar] of `course.toml`.

    [calendar]
    timezone = "Europe/Berlin"        of times without an offset; default: UTC
    bonus_zero.used = false           no part of this course: never handed out, withholds nothing

    [calendar.lab1_ddp]
    release = 2026-10-12 08:00:00     from then on `autograder release` hands it out
    due = 2026-10-26                  a date alone: the end of that day; in other keys, its start
    solutions = 2026-11-09            from then on `autograder release` shows its solution
    late_per_day = 10                 points off for each begun day after `due`
    late_at_most = 50                 maximum of points off
    late_grace_minutes = 15           not late before this has passed

Every key may be left out. A lab that is not here has no due date, and is handed out at once. One
student's due date is moved with `autograder extend STUDENT LAB DATE`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, tzinfo
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

from autograder.course.times import parse_time
from autograder.course.values import OptionsError

DAY_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class LabDates:
    """The dates of one lab, in UTC, and what handing in late costs.

    Attributes:
        used: whether the lab is part of the course.
        late_per_day: None if the course says nothing about it; nbgrader's own policy then holds.
    """

    used: bool = True
    release: datetime | None = None
    due: datetime | None = None
    solutions: datetime | None = None
    late_per_day: float | None = None
    late_at_most: float = math.inf
    late_grace_s: float = 0.0

    def penalty(self, score: float, seconds_late: float) -> float:
        """The points to take off from a score; never more than the score itself."""
        if self.late_per_day is None or seconds_late <= self.late_grace_s:
            return 0.0
        days = math.ceil(seconds_late / DAY_S)
        return max(0.0, min(score, self.late_at_most, days * self.late_per_day))

    def is_released(self, now: datetime) -> bool:
        """Whether students may have the lab."""
        return self.used and (self.release is None or self.release <= now)

    def is_over(self, now: datetime) -> bool:
        """Whether students may have its solution."""
        return self.solutions is not None and self.solutions <= now


@dataclass(frozen=True)
class Calendar:
    """The dates of all labs that the course names, and the zone of times without an offset."""

    labs: Mapping[str, LabDates] = field(default_factory=dict)
    zone: tzinfo = UTC

    def of(self, lab: str) -> LabDates:
        """The dates of a lab; nothing but defaults if the course does not name it."""
        return self.labs.get(lab, LabDates())


_DATES = ("release", "due", "solutions")
_NUMBERS = ("late_per_day", "late_at_most", "late_grace_minutes")


def read_calendar(entries: Mapping[str, Any], labs: Sequence[str], where: str) -> Calendar:
    """Reads the table.

    Raises:
        OptionsError: a lab, key or value is wrong; the message names it.
    """
    zone = _zone(entries.get("timezone", "UTC"), f"{where}: timezone")
    found = {}
    for name, table in entries.items():
        if name == "timezone":
            continue
        place = f"{where}: {name}"
        if name not in labs:
            raise OptionsError(f"{place}: no such lab; there are: {', '.join(labs)}")
        if not isinstance(table, dict):
            raise OptionsError(f"{place}: expected a table, got {table!r}")
        found[name] = _dates(table, zone, place)
    return Calendar(found, zone)


def _dates(table: Mapping[str, Any], zone: tzinfo, where: str) -> LabDates:
    values: dict[str, Any] = {}
    for name, value in table.items():
        place = f"{where}: {name}"
        if name in _DATES:
            values[name] = read_date(value, zone, place, ends_day=name == "due")
        elif name in _NUMBERS:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value >= 0):
                raise OptionsError(f"{place}: expected a number from 0 up, got {value!r}")
            values[name] = float(value)
        elif name == "used":
            if not isinstance(value, bool):
                raise OptionsError(f"{place}: expected true or false, got {value!r}")
            values[name] = value
        else:
            keys = ", ".join(("used", *_DATES, *_NUMBERS))
            raise OptionsError(f"{place}: no such key; there are: {keys}")
    values["late_grace_s"] = 60 * values.pop("late_grace_minutes", 0.0)
    dates = LabDates(**values)
    if "late_per_day" not in values and ("late_at_most" in values or dates.late_grace_s):
        raise OptionsError(f"{where}: late_per_day is missing, so nothing is taken off")
    if dates.late_per_day is not None and dates.due is None:
        raise OptionsError(f"{where}: late_per_day without due, so nobody is ever late")
    known = [(name, values[name]) for name in _DATES if name in values]
    for (first, earlier), (second, later) in pairwise(known):
        if earlier > later:
            raise OptionsError(f"{where}: {second} is before {first}")
    return dates


def read_date(value: Any, zone: tzinfo, where: str, *, ends_day: bool) -> datetime:
    """A point in time, in UTC, from TOML's dates and times or from a text.

    Args:
        ends_day: a date alone is the end of the day, and not its start.

    Raises:
        OptionsError: it is neither a date nor a time.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # reported below
            value = date.fromisoformat(value) if len(value) == 10 else parse_time(value, zone)
    if isinstance(value, datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=zone)
        return aware.astimezone(UTC)
    if isinstance(value, date):
        day = value + timedelta(days=1) if ends_day else value
        return datetime(day.year, day.month, day.day, tzinfo=zone).astimezone(UTC)
    raise OptionsError(
        f"{where}: expected a date such as 2026-10-26 or a time such as 2026-10-26 23:59:00 or "
        f"2026-10-26T23:59:00+01:00, got {value!r}"
    )


def _zone(name: Any, where: str) -> tzinfo:
    try:
        return UTC if name == "UTC" else ZoneInfo(name)
    except (LookupError, ValueError, OSError, TypeError, AttributeError):
        raise OptionsError(
            f'{where}: expected a name such as "Europe/Berlin", got {name!r}'
        ) from None


def say_time(time: datetime, zone: tzinfo) -> str:
    """A time for a person, in a zone.

    >>> say_time(datetime(2026, 10, 27, tzinfo=UTC), UTC)
    '2026-10-27 00:00 UTC'
    """
    return time.astimezone(zone).strftime("%Y-%m-%d %H:%M %Z")
