"""nbgrader's exchange: collects submissions, and releases feedback.

nbgrader assumes that every submission came through its exchange. A submission from a folder, a zip
or an LMS has neither a time nor a secret, so `nbgrader release_feedback` would fail there, for the
whole class.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import hmac
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from nbgrader.exchange.default.release_feedback import ExchangeReleaseFeedback

from autograder.course.course import Course, CourseError
from autograder.files import write_whole
from autograder.gradebook.commands import NbGrader
from autograder.gradebook.database import TIMESTAMP
from autograder.gradebook.incoming import SECRET
from autograder.gradebook.roster import may_be_id
from autograder.submission.find import display_name

_AGAIN_S = 600.0  # wait before a failed collection is tried again
_ONE_BY_ONE = 4  # up to so many students are collected one by one, so that one cannot stop others


class ReleaseFeedback(ExchangeReleaseFeedback):
    """Releases everybody's feedback.

    A student fetches it by the secret of the submission, which nbgrader made when it was handed in
    through the exchange. Any other submission gets a secret that is made from the course's key.
    """

    def copy_files(self) -> None:
        """Completes the folders of the feedback pages, and releases them."""
        folders = [Path(name) for name in _folders(self.src_path)]
        key = Course.find().key() if folders else b""
        for folder in folders:
            for name, text in ((TIMESTAMP, ""), (SECRET, _secret(key, folder))):
                if not (folder / name).is_file():
                    (folder / name).write_text(text)
        super().copy_files()


def _folders(pattern: str) -> set[str]:
    return {os.path.dirname(page) for page in glob.glob(os.path.join(pattern, "*.html"))}


def _secret(key: bytes, folder: Path) -> str:
    student, lab = folder.parts[-2:]
    return hmac.new(key, f"feedback {student} {lab}".encode(), hashlib.sha256).hexdigest()


class Exchange:
    """The exchange of a course, by nbgrader's own commands.

    Raises:
        CourseError: the exchange, or the course's inbound/ in it, is not there.
    """

    def __init__(self, course: Course) -> None:
        from nbgrader.apps import NbGrader as App
        from nbgrader.coursedir import CourseDirectory
        from nbgrader.exchange.default import Exchange as Places

        self.course = course
        with contextlib.chdir(course.root):
            app = App()
            app.log.setLevel(logging.ERROR)
            app.load_config_file()
        directory = CourseDirectory(config=app.config)
        root = Path(Places(coursedir=directory, config=app.config).root) / directory.course_id
        self.inbound, self.outbound = root / "inbound", root / "feedback"
        if not os.access(self.inbound, os.R_OK | os.X_OK):
            raise CourseError(
                f"{self.inbound} cannot be read: `nbgrader release_assignment LAB` makes it; "
                "c.Exchange.root in nbgrader_config.py says where the exchange is"
            )
        self.submitted = course.nbgrader / "submitted"
        self._collected: dict[str, set[str]] = {}  # lab -> names of folders
        self._failed: dict[str, tuple[set[str], float]] = {}  # lab -> names, time of the next try

    def collect(self, lab: str, now: float) -> Iterator[str]:
        """Has nbgrader collect everybody's newest submission, if there is something new.

        Yields:
            What went wrong; a submission on which nbgrader fails does not stop the others.
        """
        there = {name for name in os.listdir(self.inbound) if f"+{lab}+" in name}
        done = self._collected.setdefault(lab, set())
        new, (failed, again_at) = there - done, self._failed.get(lab, (set(), now))
        if not new or (new == failed and now < again_at):
            return
        of: dict[str, set[str]] = {}
        for name in new:
            of.setdefault(name.partition(f"+{lab}+")[0], set()).add(name)
        with NbGrader(self.course) as nbgrader:
            if len(of) > _ONE_BY_ONE:
                with contextlib.suppress(CourseError):
                    yield from self._collect(nbgrader, lab)
                    done |= new
                    return
            for student, names in sorted(of.items()):
                try:
                    if not may_be_id(student):
                        raise CourseError("that is no name of a student")
                    only = f"--student={glob.escape(student)}"
                    yield from self._collect(nbgrader, lab, only)
                    done |= names
                except CourseError as error:
                    yield f"{display_name(student)} cannot be collected: {_last_line(error)}"
        self._failed[lab] = there - done, now + _AGAIN_S

    def _collect(self, nbgrader: NbGrader, lab: str, *only: str) -> Iterator[str]:
        """Yields what nbgrader says of a submission that claims to be of somebody else."""
        said = nbgrader.run("collect", lab, "--update", *only)
        yield from (line.strip() for line in said.splitlines() if "cheating attempt" in line)

    def release(self, lab: str, students: Collection[str]) -> None:
        """Has nbgrader release the feedback of these students; that of others stays where it is.

        Raises:
            CourseError: nbgrader failed.
        """
        everybody = [each.name for each in (self.course.nbgrader / "feedback").iterdir()]
        others = sorted(name for name in everybody if name not in students and "," not in name)
        but = f"--CourseDirectory.student_id_exclude={','.join(others)}"
        with NbGrader(self.course) as nbgrader:
            nbgrader.run("release_feedback", lab, but)

    def put_page(self, secret: str, lab: str, page: bytes) -> None:
        """Puts a page where a student fetches feedback; feedback will take its place."""
        from nbgrader.utils import notebook_hash

        if not self.outbound.is_dir():
            self.outbound.mkdir()
            # As nbgrader makes it: whoever knows a name may read the page.
            self.outbound.chmod(0o711)
        name = notebook_hash(secret=secret, notebook_id=lab)
        write_whole(self.outbound / f"{name}.html", page, mode=0o644)


def read_secret(notebook: Path) -> str:
    """The secret of a collected submission; empty if it has none."""
    path = notebook.with_name(SECRET)
    try:
        return path.read_text("utf-8") if path.is_file() and not path.is_symlink() else ""
    except (OSError, ValueError):
        return ""


def _last_line(error: CourseError) -> str:
    return (str(error).strip().splitlines() or ["nbgrader said nothing"])[-1]
