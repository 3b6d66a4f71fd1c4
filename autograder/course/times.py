"""Reads a time that a person, a mail program, git or nbgrader has written; guesses nothing.

    2026-12-05T12:00:00-08:00        ISO 8601, with T or a space, with any offset, Z or UTC
    2026-12-05 12:00:00 -0800        git's --date=iso; `date --iso-8601=seconds` and `date -R`, too
    Sat, 5 Dec 2026 12:00:00 -0800   RFC 2822
    Sat Dec 5 12:00:00 2026 -0800    git's own format
    1796500800 -0800                 git's --date=raw; --date=unix
    2026-12-05 12:00:00 Europe/Rome  nbgrader's own, with a name of the time zone data base

An ISO time without an offset is UTC, as in nbgrader. A date such as 05/12/2026 could be two days,
and a zone such as CET or IST is several zones: both are refused.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from email.utils import parsedate_to_datetime
from zoneinfo import ZoneInfo

from dateutil.parser import isoparse

READ = (
    "2026-12-05T12:00:00-08:00 (ISO 8601), Sat, 5 Dec 2026 12:00:00 -0800 (RFC 2822), and what "
    "git writes"
)
MAX_CHARS = 100
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d|\d{8})[T ](\d\d(?::?\d\d(?::?\d\d(?:[.,]\d{1,9})?)?)?)\s*(\S.*)?"
)
_OFFSET = re.compile(r"([+-])(\d\d)(?::?(\d\d))?")
_GIT = re.compile(  # and `date`, whose zone is before the year
    r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun) (\w{3})\s+(\d{1,2}) (\d\d:\d\d:\d\d)"
    r"(?: (\S+))? (\d{4})(?: (\S+))?"
)
_UNIX = re.compile(r"@?(\d{9,11})(?: (\S+))?")
# RFC 2822, 4.3, gives each of these names one meaning; email.utils reads other names as UTC.
_NAMED = {"UTC": 0, "UT": 0, "GMT": 0, "Z": 0, "EST": -5, "EDT": -4, "CST": -6, "CDT": -5}
_NAMED |= {"MST": -7, "MDT": -6, "PST": -8, "PDT": -7}
_MAX_OFFSET = timedelta(hours=14)


def parse_time(text: str, zone: tzinfo = UTC) -> datetime:
    """The instant that a text names, in UTC.

    Args:
        zone: of a time without an offset.

    Raises:
        ValueError: the text is in none of the formats above, or no such time exists.
    """
    plain = text.strip()
    try:
        if len(plain) > MAX_CHARS:
            raise ValueError("too long")
        return _parse(plain, zone).astimezone(UTC)
    except (ValueError, OverflowError, TypeError, LookupError, OSError):
        raise ValueError(f"expected a time, got {plain[:MAX_CHARS]!r}; read are {READ}") from None


def _parse(text: str, zone: tzinfo) -> datetime:
    if found := _ISO.fullmatch(text):
        date, time, where = found.groups()
        naive = isoparse(f"{date}T{time.replace(',', '.')}" if "-" in date else date + "T" + time)
        return naive.replace(tzinfo=_zone(where) if where else zone)
    if found := _GIT.fullmatch(text):
        weekday, month, day, time, before, year, after = found.groups()
        if (before is None) == (after is None):  # git writes no zone for --date=local
            raise ValueError("no offset")
        where = before or after
        return _mail(f"{weekday}, {day} {month} {year} {time}", _zone(where))
    if found := _UNIX.fullmatch(text):
        seconds, where = found.groups()
        if where:
            _zone(where)  # git names the author's offset; the instant does not depend on it
        return datetime.fromtimestamp(int(seconds), UTC)
    words, _, where = text.rpartition(" ")
    return _mail(words, _zone(where))


def _mail(text: str, where: tzinfo) -> datetime:
    """A date of RFC 2822; a wrong day of the week is an error."""
    read = parsedate_to_datetime(f"{text} -0000")
    weekday = text.partition(",")[0] if "," in text else ""
    if weekday and weekday != read.strftime("%a"):
        raise ValueError(f"{text} is no {weekday}")
    if not re.fullmatch(r"(?:\w{3}, ?)?\d{1,2} \w{3} \d{4} \d\d:\d\d(?::\d\d)?", text):
        raise ValueError(text)
    return read.replace(tzinfo=where)


def _zone(name: str) -> tzinfo:
    """The time zone of an offset or a name."""
    if found := _OFFSET.fullmatch(name):
        sign, hours, minutes = found.groups()
        offset = timedelta(hours=int(hours), minutes=int(minutes or 0))
        if offset > _MAX_OFFSET or int(minutes or 0) >= 60:
            raise ValueError(name)
        return timezone(-offset if sign == "-" else offset)
    if name in _NAMED:
        return timezone(timedelta(hours=_NAMED[name]))
    if "/" in name:
        return ZoneInfo(name)
    raise ValueError(name)


def as_utc(time: datetime) -> str:
    """The text of a time in UTC, in the form that nbgrader reads and writes."""
    return f"{time.astimezone(UTC).replace(tzinfo=None).isoformat(' ')} UTC"
