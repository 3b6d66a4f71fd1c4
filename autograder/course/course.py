"""Where a course's files are, and its secret key."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from autograder.course.calendar import Calendar
from autograder.course.course_toml import Options, OptionsError, read_options
from autograder.course.slurm_options import SlurmOptions
from autograder.criteria import get_lab
from autograder.criteria.criterion import Lab

KEY_BYTES = 32
RELEASED = ".released-by-autograder"  # a file that marks what `autograder release` has written
# Grades, answers, and what `nbgrader zip_collect` unpacks.
_PRIVATE = ("build", "solutions", "tests/zoo", "downloaded")


class CourseError(Exception):
    """The course's folder, key or options are wrong; the message says how to fix this."""


@dataclass(frozen=True)
class Course:
    """A course's folder: the one with `nbgrader_config.py`."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> Course:
        """The course in $AUTOGRADER_COURSE, else in `start` (default: here) or a folder above.

        The last resort is the checkout that this module lies in.

        Raises:
            CourseError: none of these folders has both nbgrader_config.py and labs/.
        """
        chosen = os.environ.get("AUTOGRADER_COURSE")
        here = Path(chosen).resolve() if chosen else (start or Path.cwd()).resolve()
        beside = Path(__file__).resolve().parents[2]  # a checkout, installed editable
        for folder in (here, *([] if chosen else [*here.parents, beside])):
            if (folder / "nbgrader_config.py").is_file() and (folder / "labs").is_dir():
                return cls(folder)
        raise CourseError(
            f"{here} is not in a course (a folder with nbgrader_config.py and labs/); "
            "change to it or set AUTOGRADER_COURSE"
        )

    @property
    def build(self) -> Path:
        """The folder for everything that grading writes."""
        return self.root / "build"

    @property
    def key_path(self) -> Path:
        """Path of the secret key, from which every draw is made."""
        return self.build / "course.key"

    @property
    def journal_path(self) -> Path:
        """Path of the append-only record of every verdict."""
        return self.build / "journal.jsonl"

    @property
    def nbgrader(self) -> Path:
        """nbgrader's own folder: submissions, gradebook and feedback."""
        return self.build / "nbgrader"

    def feedback_page(self, lab: str, student: str) -> Path:
        """Path of the page that nbgrader makes."""
        return self.nbgrader / "feedback" / student / lab / f"{lab}.html"

    def master(self, lab: str) -> NotebookNode:
        """The notebook that students were given.

        Raises:
            CourseError: the notebook is missing, or older than the current points.
        """
        path = self.root / "labs" / lab / f"{lab}.ipynb"
        if not path.is_file():
            raise CourseError(f"{path} is missing: run `make build`")
        notebook = nbformat.read(path, as_version=4)
        worth = {c.name: c.listed_points for c in self.lab(lab).criteria}
        for cell in notebook.cells:
            options = cell.metadata.get("nbgrader", {})
            name, points = options.get("grade_id"), options.get("points")
            if cell.cell_type == "code" and name in worth and points not in (None, worth[name]):
                raise CourseError(
                    f"{path}: {name} is worth {points:g}, but {worth[name]:g} is set for the "
                    "course: run `make build`"
                )
        return notebook

    def lab(self, name: str) -> Lab:
        """A lab with the points and limits that `course.toml` sets for it.

        Raises:
            ValueError: there is no such lab.
            CourseError: `course.toml` is invalid.
        """
        return self._options.apply(get_lab(name))

    @property
    def slurm(self) -> SlurmOptions:
        """The options for Slurm jobs in `course.toml`.

        Raises:
            CourseError: `course.toml` is invalid.
        """
        return self._options.slurm

    @property
    def calendar(self) -> Calendar:
        """When labs are handed out and due, as `course.toml` says.

        Raises:
            CourseError: `course.toml` is invalid.
        """
        return self._options.calendar

    @cached_property
    def _options(self) -> Options:
        try:
            return read_options(self.root)
        except OptionsError as error:
            raise CourseError(str(error)) from None

    def make_private(self) -> None:
        """Makes answers and grades unreadable to others on this machine, except in a release.

        On a Hub, every student could read the course's folder. Skips folders of a different owner.
        """
        for name in self.readable_by_others():
            with contextlib.suppress(OSError):
                (self.root / name).chmod(0o700)

    def readable_by_others(self) -> list[str]:
        """The folders with answers or grades that others may enter; none in a release."""
        if (self.root / RELEASED).is_file():
            return []
        folders = [name for name in _PRIVATE if (self.root / name).is_dir()]
        return [name for name in folders if (self.root / name).stat().st_mode & 0o077]

    def make_key(self) -> bool:
        """Makes the course key, readable by its owner only; False if the key already exists."""
        self.build.mkdir(exist_ok=True)
        self.make_private()
        try:
            descriptor = os.open(self.key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
        return True

    def key(self) -> bytes:
        """The course key.

        Raises:
            CourseError: the key is missing, others can read it, or it is damaged.
        """
        try:
            mode = self.key_path.stat().st_mode
            key = bytes.fromhex(self.key_path.read_text().strip())
        except FileNotFoundError:
            raise CourseError(f"{self.key_path} is missing: run `autograder init`") from None
        except ValueError:
            raise CourseError(
                f"{self.key_path} is damaged: expected {KEY_BYTES} bytes in hex"
            ) from None
        if stat.S_IMODE(mode) & 0o077:
            raise CourseError(f"{self.key_path} can be read by others: chmod 600 {self.key_path}")
        if len(key) != KEY_BYTES:
            raise CourseError(f"{self.key_path}: expected {KEY_BYTES} bytes, got {len(key)}")
        return key
