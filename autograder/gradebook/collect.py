"""`autograder collect`: a download of a learning platform becomes STUDENT/LAB/LAB.ipynb.

If somebody in the download is not in the class list, nothing is written and all such people are
named. Only an equal id, address or name is a match; similar names are only proposed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath

from nbgrader.api import Student

from autograder.course.calendar import say_time
from autograder.course.course import Course
from autograder.course.times import as_utc
from autograder.gradebook.class_list import ClassList
from autograder.gradebook.database import (
    TIMESTAMP,
    Person,
    gradebook_path,
    in_gradebook,
    open_gradebook,
)
from autograder.gradebook.downloads import Download, read_download
from autograder.gradebook.handed_in import HandedIn
from autograder.gradebook.late import due_date, read_extensions
from autograder.gradebook.roster import Roster
from autograder.gradebook.unpack import WORK, DownloadError, open_download
from autograder.submission.find import Found, display_name, find_submissions

_SHOWN = 5  # files that are kept, to name them, if there is no notebook


@dataclass
class Collected:
    """What was collected, one line of text per thing.

    Attributes:
        taken: student -> what was taken; missing: students who handed in nothing.
        attempts: student -> everything handed in, oldest first, with a mark at what was taken.
        others: what belongs to nobody.
    """

    system: str
    folder: Path
    taken: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    attempts: dict[str, list[str]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def collect(
    course: Course,
    lab: str,
    download: Path,
    into: Path,
    *,
    roster: Roster | None = None,
    said: Mapping[str, str] | None = None,
) -> Collected:
    """Takes everybody's last notebook before the deadline, or the last if none was in time.

    Args:
        roster: the class; default: nbgrader's gradebook.
        said: name in the download -> student, or "" for nobody, where the class list does not tell.

    Raises:
        DownloadError: the download cannot be read, or somebody in it is not in the class list or
            could be several people; nothing was written.
        ValueError: several notebooks of a student could be meant; nothing was written.
    """
    into.parent.mkdir(parents=True, exist_ok=True)
    # On the file system of the target: moving needs no room there, so it cannot fail half-way.
    with tempfile.TemporaryDirectory(dir=into.parent, prefix=WORK) as folder:
        work, staged = Path(folder) / "unpacked", Path(folder) / "staged"
        work.mkdir()
        staged.mkdir()
        opened = open_download(download, work)
        found = read_download(opened, lab, course.calendar.zone, Path(folder))
        people = list(roster.people) if roster else _in_gradebook(course)
        whose = _by_student(found, people, said or {})
        done = Collected(found.system, into, others=[display_name(name) for name in found.others])
        deadlines = _Deadlines(course, lab)
        for student, attempts in sorted(whose.items()):
            chosen = deadlines.choose(student, attempts)
            _stage(chosen, lab, staged / student / lab)
            time = deadlines.time_of(student, chosen)
            if time is not None:
                (staged / student / lab / TIMESTAMP).write_text(as_utc(time))
            done.attempts[student] = [
                f"{'*' if each is chosen else ' '} {deadlines.describe(student, each)}"
                for each in attempts
            ]
            done.taken[student] = deadlines.describe(student, chosen)
        _keep_one(staged, lab, done)
        _move(staged, into)
        done.missing = sorted({person.id for person in people} - set(whose))
    return done


def _in_gradebook(course: Course) -> list[Person]:
    if not gradebook_path(course).is_file():
        return []
    with open_gradebook(course) as book:
        return [in_gradebook(each) for each in book.db.query(Student)]


def _by_student(
    download: Download, people: Sequence[Person], said: Mapping[str, str]
) -> dict[str, list[HandedIn]]:
    """Student -> everything handed in, oldest first."""
    if not people and download.system != "nbgrader":
        raise DownloadError(
            "nobody is known to be in the class: put it into the gradebook with `autograder "
            "roster FILE.csv`, or say --roster FILE.csv"
        )
    who = ClassList(people, said)
    whose: dict[str, list[HandedIn]] = {}
    for handed in download.handed_in:
        students = [name for owner in handed.owners for name in who.find(owner)]
        for student in dict.fromkeys(students):
            whose.setdefault(student, []).append(handed)
    unused = [name for name in said if name not in who.used]
    who.problems |= dict.fromkeys(f"{name!r} of --as is not in the download" for name in unused)
    if who.problems:
        raise DownloadError(
            "\n  ".join(
                [
                    "nothing was collected. Say --as 'NAME=STUDENT' for each of these, or "
                    "--as 'NAME=' to leave it out:",
                    *who.problems,
                ]
            )
        )
    for attempts in whose.values():
        attempts.sort(key=lambda h: (h.when or datetime.min.replace(tzinfo=UTC), h.order))
    return whose


# --- which of several ----------------------------------------------------------------------------


class _Deadlines:
    """Each student's deadline, and which of several attempts counts."""

    def __init__(self, course: Course, lab: str) -> None:
        self.due, self.zone = due_date(course, lab), course.calendar.zone
        self.extensions = read_extensions(course).get(lab, {})
        self.grace = timedelta(seconds=course.calendar.of(lab).late_grace_s)

    def of(self, student: str) -> datetime | None:
        until = self.extensions.get(student, self.due)
        return until + self.grace if until is not None else None

    def is_late(self, student: str, handed: HandedIn) -> bool:
        deadline = self.of(student)
        if handed.when is None or deadline is None:
            return handed.late
        return handed.when > deadline

    def choose(self, student: str, attempts: Sequence[HandedIn]) -> HandedIn:
        """The last attempt with a notebook in time, else the last with one, else the last."""
        return max(
            enumerate(attempts),
            key=lambda each: (
                each[1].has_notebook,
                not self.is_late(student, each[1]),
                each[0],
            ),
        )[1]

    def time_of(self, student: str, handed: HandedIn) -> datetime | None:
        """When it was handed in; the earliest late time if only a late mark is known."""
        if handed.when is None and handed.late and self.due is not None:
            return self.due + self.grace + timedelta(seconds=1)
        return handed.when

    def describe(self, student: str, handed: HandedIn) -> str:
        """Source, time and lateness for a person."""
        time = self.time_of(student, handed)
        parts = [display_name(handed.source)]
        if time is not None:
            parts.append(say_time(time, self.zone))
        if self.is_late(student, handed):
            parts.append("late" if handed.when else "late; its time is not in the download")
        return ", ".join(parts)


# --- files --------------------------------------------------------------------------------------


def _stage(handed: HandedIn, lab: str, folder: Path) -> None:
    """Writes the notebooks of an attempt; if there is none, some of its other files."""
    folder.mkdir(parents=True)
    notebooks = [n for n in handed.files if n.casefold().endswith(".ipynb")]
    called = [n for n in notebooks if PurePosixPath(n).stem.casefold() == lab.casefold()]
    depth = min((len(PurePosixPath(n).parts) for n in called), default=0)
    wanted = [n for n in called if len(PurePosixPath(n).parts) == depth] or notebooks
    for name in wanted or list(handed.files)[:_SHOWN]:
        short = PurePosixPath(name).name
        target = folder / (short if not (folder / short).exists() else name.replace("/", "-"))
        target.write_bytes(handed.read(name))


def _keep_one(staged: Path, lab: str, done: Collected) -> None:
    """Renames each student's notebook to LAB.ipynb, deletes others, and says who has none."""
    found = find_submissions([staged], lab) if any(staged.glob("*/*/*.ipynb")) else Found([], {})
    whose = {
        submission.path.parent.parent.name: submission.path for submission in found.submissions
    }
    why = {path.name: reason for path, reason in found.left_out.items()}
    if unclear := [student for student, path in whose.items() if not path.exists()]:
        raise DownloadError(
            f"several notebooks, none of which says that it is of {lab}: {', '.join(unclear)}"
        )
    for student in done.taken:
        notebook, folder = whose.get(student), staged / student / lab
        if notebook is None:
            done.taken[student] += f": NOTHING TO GRADE: {why.get(student, 'no notebook')}"
        elif notebook.name != f"{lab}.ipynb":
            done.taken[student] += f", {display_name(notebook.name)}"
            notebook = notebook.rename(folder / f"{lab}.ipynb")
        for other in folder.glob("*.ipynb"):
            if notebook is not None and other != notebook:
                other.unlink()


def _move(staged: Path, into: Path) -> None:
    """Puts what is complete in its place; other files that are there stay."""
    into.mkdir(mode=0o700, exist_ok=True)
    for folder in sorted(staged.glob("*/*")):
        target = into / folder.relative_to(staged)
        target.mkdir(parents=True, exist_ok=True)
        (target / TIMESTAMP).unlink(missing_ok=True)  # of what was handed in before
        for path in folder.iterdir():
            path.replace(target / path.name)
