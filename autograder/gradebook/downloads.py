"""Reads the downloads of learning platforms: who handed in what, and when.

Canvas        lovelaceada_LATE_12_345_lab1.ipynb: name, user's id, file's id, the file's name;
              a download has everybody's last files, and no time
Moodle        Ada Lovelace_12_assignsubmission_file_/lab1.ipynb, or the same without a folder:
              name, number in this assignment; no time
Gradescope    submission_12/lab1.ipynb; submission_metadata.yml names submitters and time
Brightspace   12-345 - Ada Lovelace - Nov 5, 2026 1105 PM/lab1.ipynb: everything handed in
nbgrader      ada/lab1_ddp/, or the exchange's ada+lab1_ddp+TIME+…/, with timestamp.txt
folders       lab1-ada/, as GitHub Classroom's checkouts, whose commits are looked at, or ada/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any

import yaml

from autograder.course.times import parse_time
from autograder.gradebook.database import TIMESTAMP
from autograder.gradebook.handed_in import HandedIn, Owner, files_below, git, unzipped
from autograder.gradebook.unpack import WORK, DownloadError
from autograder.submission.find import TOOLS_OWN, display_name

METADATA = "submission_metadata.yml"
_CANVAS = re.compile(
    r"(?P<name>.+?)_(?P<late>LATE_)?(?P<user>\d+)_"
    r"(?:(?P<order>\d+)_(?P<file>.+)|(?P<page>(?:text|link|media)\.html))",
    re.IGNORECASE,
)
_MOODLE = re.compile(
    r"(?P<name>.+)_(?P<number>\d+)_assign(?:submission|feedback)_(?P<kind>file|[a-z]+)_?"
    r"(?P<file>.*)"
)
_BRIGHTSPACE = re.compile(r"(?P<number>\d+)-\d+ - (?P<name>.+) - (?P<time>[^-]+)")
_EXCHANGE = re.compile(r"(?P<name>[^+]+)\+(?P<lab>[^+]+)\+(?P<time>[^+]+)(?:\+.*)?")
_BRIGHTSPACE_TIMES = ("%b %d %Y %I%M %p", "%d %b %Y %I%M %p", "%b %d %Y %H%M", "%d %b %Y %H%M")
_MAX_METADATA_BYTES = 64 << 20
_MAX_COMMITS = 100
_SHOWN = 5


@dataclass(frozen=True)
class Download:
    """A download: its system, what was handed in, and what belongs to nobody."""

    system: str
    handed_in: list[HandedIn]
    others: list[str]


def read_download(folder: Path, lab: str, zone: tzinfo, work: Path) -> Download:
    """Reads an unpacked download; a zip that a student handed in is unpacked in `work`.

    Args:
        zone: of times without an offset.

    Raises:
        DownloadError: it is of no known system, or a time or the metadata cannot be read.
    """
    inside = _entries(folder)
    while len(inside) == 1 and inside[0].is_dir() and _goes_on(inside, lab):
        inside = _entries(inside[0])
    for system, known, read in _SYSTEMS:
        if known(inside, lab):
            others: list[str] = []
            found = list(read(inside, lab, zone, others))
            handed_in = [unzipped(each, work, others) for each in found]
            if handed_in:
                return Download(system, handed_in, others)
    names = ", ".join(display_name(path.name) for path in inside[:_SHOWN]) or "nothing"
    raise DownloadError(
        f"{folder} is no download of Canvas, Moodle, Gradescope or Brightspace, no folder of "
        f"checkouts, and not nbgrader's: it holds {names}"
    )


def _entries(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.name not in TOOLS_OWN and not path.name.startswith(WORK)
    )


def _goes_on(inside: list[Path], lab: str) -> bool:
    """Whether the only folder contains the download, and is not a student's."""
    systems, within = _SYSTEMS[:-1], _entries(inside[0])
    if any(known(inside, lab) for _, known, _ in systems) or (inside[0] / ".git").exists():
        return False
    if any(known(within, lab) for _, known, _ in systems):
        return True
    notebook = any(path.suffix.casefold() == ".ipynb" for path in within)
    return not notebook and any(path.is_dir() for path in within)


# --- one system after the other ------------------------------------------------------------------


def _is_canvas(inside: list[Path], lab: str) -> bool:
    return any(_CANVAS.fullmatch(path.name) and path.is_file() for path in inside)


def _canvas(inside: list[Path], lab: str, zone: tzinfo, others: list[str]) -> Iterator[HandedIn]:
    of: dict[tuple[str, str, bool], dict[str, tuple[int, Path]]] = {}
    for path in inside:
        if (found := _CANVAS.fullmatch(path.name)) is None or path.is_dir():
            others.append(path.name)
            continue
        files = of.setdefault((found["name"], found["user"], bool(found["late"])), {})
        # A file that is handed in again gets a number: lab1-1.ipynb.
        file = re.sub(r"-\d+(?=\.\w+$)", "", found["file"] or found["page"])
        new = (int(found["order"] or 0), path)
        files[file] = max(files.get(file, new), new)
    for (name, user, late), files in of.items():
        yield HandedIn(
            source=f"{name}{' LATE' if late else ''} {user}",
            owners=(Owner(f"{name} ({user})", frozenset({f"LMS {user}"}), (name,), user),),
            files={file: path for file, (_, path) in files.items()},
            late=late,
            order=max(order for order, _ in files.values()),
        )


def _is_moodle(inside: list[Path], lab: str) -> bool:
    return any(_MOODLE.fullmatch(path.name) for path in inside)


def _moodle(inside: list[Path], lab: str, zone: tzinfo, others: list[str]) -> Iterator[HandedIn]:
    of: dict[tuple[str, str], dict[str, Path]] = {}
    for path in inside:
        if (found := _MOODLE.fullmatch(path.name)) is None or "_assignfeedback_" in path.name:
            others.append(path.name)
            continue
        files = of.setdefault((found["name"], found["number"]), {})
        files |= files_below(path) if path.is_dir() else {found["file"]: path}
    for (name, number), files in of.items():
        # If groups hand in, each member's name follows the group's name.
        names = (name, *_after(name, [name for name, _ in of], 2))
        keys = frozenset({f"LMS participant {number}"})
        owner = Owner(f"{name} ({number})", keys, names, number)
        yield HandedIn(source=f"{name} {number}", owners=(owner,), files=files)


def _after(name: str, all_names: Sequence[str], least: float) -> tuple[str, ...]:
    """The parts of a name after its hyphens, the longest first, if enough names share the start.

    Args:
        least: how many names must have the same start; not needed if there is only one name.
    """
    starts = [match.end() for match in re.finditer("-", name)]
    return tuple(
        name[at:].strip()
        for at in starts
        if len(all_names) == 1 or sum(each.startswith(name[:at]) for each in all_names) >= least
    )


def _is_gradescope(inside: list[Path], lab: str) -> bool:
    return any(path.name == METADATA for path in inside)


def _gradescope(
    inside: list[Path], lab: str, zone: tzinfo, others: list[str]
) -> Iterator[HandedIn]:
    path = next(path for path in inside if path.name == METADATA)
    if path.stat().st_size > _MAX_METADATA_BYTES:
        raise DownloadError(f"{path}: more than {_MAX_METADATA_BYTES >> 20} MiB")
    try:
        about = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DownloadError(f"{path} cannot be read: {str(error)[:300]}") from None
    for folder in inside:
        if not folder.is_dir():
            others += [folder.name] if folder.name != METADATA else []
            continue
        of = about.get(folder.name) if isinstance(about, dict) else None
        try:
            owners = tuple(_submitter(each) for each in of[":submitters"])  # type: ignore[index]
            when = of[":created_at"]  # type: ignore[index]
        except (TypeError, KeyError, AttributeError):
            raise DownloadError(
                f"{path}: expected :submitters and :created_at of {display_name(folder.name)}"
            ) from None
        if isinstance(when, datetime):
            when = when.replace(tzinfo=when.tzinfo or UTC).astimezone(UTC)
        else:
            when = _time(str(when), zone, folder.name)
        files = files_below(folder)
        yield HandedIn(source=folder.name, owners=owners, files=files, when=when)


def _submitter(about: Mapping[str, Any]) -> Owner:
    name, keys = str(about.get(":name") or ""), (about.get(":sid"), about.get(":email"))
    known = frozenset(str(key) for key in keys if key)
    return Owner(name or ", ".join(sorted(known)), known, (name,) if name else ())


def _is_brightspace(inside: list[Path], lab: str) -> bool:
    return any(_BRIGHTSPACE.fullmatch(path.name) and path.is_dir() for path in inside)


def _brightspace(
    inside: list[Path], lab: str, zone: tzinfo, others: list[str]
) -> Iterator[HandedIn]:
    for folder in inside:
        if (found := _BRIGHTSPACE.fullmatch(folder.name)) is None or not folder.is_dir():
            others += [folder.name] if folder.name != "index.html" else []
            continue
        plain = " ".join(found["time"].replace(":", "").replace(",", " ").split())
        for form in (*_BRIGHTSPACE_TIMES, *(f.replace("%b", "%B") for f in _BRIGHTSPACE_TIMES)):
            try:
                when = datetime.strptime(plain, form).replace(tzinfo=zone).astimezone(UTC)
                break
            except ValueError:
                continue
        else:
            raise DownloadError(
                f"{display_name(folder.name)}: expected a time such as Nov 5, 2026 1105 PM, got "
                f"{display_name(found['time'])!r}"
            )
        yield HandedIn(
            source=folder.name,
            owners=(Owner(found["name"], names=(found["name"],)),),
            files=files_below(folder),
            when=when,
        )


def _is_nbgrader(inside: list[Path], lab: str) -> bool:
    return any(
        ((path / lab).is_dir() and not (path / ".git").exists()) or _of_exchange(path, lab)
        for path in inside
    )


def _of_exchange(path: Path, lab: str) -> re.Match[str] | None:
    found = _EXCHANGE.fullmatch(path.name)
    return found if found is not None and found["lab"] == lab and path.is_dir() else None


def _nbgrader(inside: list[Path], lab: str, zone: tzinfo, others: list[str]) -> Iterator[HandedIn]:
    for path in inside:
        found = _of_exchange(path, lab)
        name, folder = (found["name"], path) if found else (path.name, path / lab)
        if not folder.is_dir():
            others.append(path.name)
            continue
        files = files_below(folder)
        said = files.pop(TIMESTAMP, None)
        text = said.read_text("utf-8", "replace")[:200] if said else ""
        when = _time(text, UTC, path.name) if text.strip() else None
        owner = Owner(name, frozenset({name}), (name,))
        yield HandedIn(source=path.name, owners=(owner,), files=files, when=when)


def _is_folders(inside: list[Path], lab: str) -> bool:
    return any(path.is_dir() for path in inside)


def _folders(inside: list[Path], lab: str, zone: tzinfo, others: list[str]) -> Iterator[HandedIn]:
    folders = [path.name for path in inside if path.is_dir()]
    for folder in inside:
        if not folder.is_dir():
            others.append(folder.name)
            continue
        # GitHub Classroom puts the assignment's name before the user's; both may have hyphens.
        names = (folder.name, *_after(folder.name, folders, len(folders) / 2))
        owner = Owner(folder.name, names=names)
        if not (folder / ".git").exists() or not git(folder, "rev-list", "-1", "--all"):
            yield HandedIn(source=folder.name, owners=(owner,), files=files_below(folder))
            continue
        log = git(folder, "log", f"-{_MAX_COMMITS}", "--format=%H %cI", "--", "*.ipynb").decode()
        for order, line in enumerate(reversed(log.splitlines())):
            commit, _, time = line.partition(" ")
            listed = git(folder, "ls-tree", "-r", "-z", "--name-only", commit).decode(
                "utf-8", "replace"
            )
            yield HandedIn(
                source=f"{folder.name} {commit[:7]}",
                owners=(owner,),
                files={name: Path(name) for name in listed.split("\0") if name},
                when=parse_time(time),
                order=order,
                commit=(folder, commit),
            )
        if not log.strip():
            yield HandedIn(source=folder.name, owners=(owner,), files=files_below(folder))


def _time(text: str, zone: tzinfo, where: str) -> datetime:
    try:
        return parse_time(text, zone)
    except ValueError as error:
        raise DownloadError(f"{display_name(where)}: {error}") from None


_Known = Callable[[list[Path], str], bool]
_Read = Callable[[list[Path], str, tzinfo, list[str]], Iterator[HandedIn]]
_SYSTEMS: tuple[tuple[str, _Known, _Read], ...] = (
    ("Gradescope", _is_gradescope, _gradescope),
    ("Brightspace", _is_brightspace, _brightspace),
    ("Moodle", _is_moodle, _moodle),
    ("Canvas", _is_canvas, _canvas),
    ("nbgrader", _is_nbgrader, _nbgrader),
    ("folders", _is_folders, _folders),
)
