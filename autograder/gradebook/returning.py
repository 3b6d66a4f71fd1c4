"""Gives feedback back: beside a student's notebook, in a folder, or through nbgrader's exchange."""

from __future__ import annotations

import html
import os
import secrets
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from autograder.course.course import Course
from autograder.gradebook.exchange import Exchange, read_secret
from autograder.gradebook.incoming import Incoming

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body {{ font: 1.1rem/1.6 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto;
padding: 0 1rem; color-scheme: light dark }}</style>
<h1>{title}</h1>
<p>{text}</p>
</html>
"""


@dataclass(frozen=True)
class Beside:
    """Pages in a folder: `LAB.feedback.html`, and `LAB.waiting.html` while the student has to wait.

    Attributes:
        inside: the folder that is watched; no link below it is followed.
        elsewhere: a folder for STUDENT/LAB.feedback.html; None for beside the notebook.
    """

    course: Course
    lab: str
    inside: Path
    elsewhere: Path | None = None

    def give_back(self, incoming: Collection[Incoming]) -> dict[str, str]:
        """Hands out the feedback pages; returns student -> why that failed."""
        failed = {}
        for each in incoming:
            try:
                page = self.course.feedback_page(self.lab, each.student).read_bytes()
                self._write(each, f"{self.lab}.feedback.html", page)
                self._write(each, f"{self.lab}.waiting.html", None)
            except OSError as error:
                failed[each.student] = f"{error.filename or each.source}: {error.strerror}"
        return failed

    def tell(self, incoming: Incoming, text: str) -> None:
        """Tells a student why there is no feedback yet.

        Raises:
            OSError: this could not be written.
        """
        self._write(incoming, f"{self.lab}.waiting.html", waiting_page(self.lab, text))

    def _write(self, incoming: Incoming, name: str, content: bytes | None) -> None:
        """Writes a file whole, or removes it.

        Students can write to the folder, so no link in it is followed. Whoever may read the
        notebook may read the page.
        """
        top, below = self.inside, incoming.source.parent
        if self.elsewhere is not None:
            top, below = self.elsewhere, self.elsewhere / incoming.student
            below.mkdir(parents=True, exist_ok=True)
        folder = _open_below(top, below)
        try:
            if content is None:
                _unlink(name, folder)
                return
            of = os.stat(incoming.source, follow_symlinks=False)
            draft = f".writing-{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with open(os.open(draft, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(content)
                    if os.geteuid() == 0:
                        os.fchown(file.fileno(), of.st_uid, of.st_gid)
                    readable = stat.S_IMODE(of.st_mode) & 0o044 if stat.S_ISREG(of.st_mode) else 0
                    os.fchmod(file.fileno(), 0o600 | readable)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                _unlink(draft, folder)
                raise
        finally:
            os.close(folder)


@dataclass(frozen=True)
class ToExchange:
    """nbgrader's exchange, from which a student fetches feedback by the submission's secret."""

    course: Course
    lab: str
    exchange: Exchange

    def give_back(self, incoming: Collection[Incoming]) -> dict[str, str]:
        self.exchange.release(self.lab, {each.student for each in incoming})
        return {}

    def tell(self, incoming: Incoming, text: str) -> None:
        if secret := read_secret(incoming.source):
            self.exchange.put_page(secret, self.lab, waiting_page(self.lab, text))


Outbox = Beside | ToExchange  # where students find what they are told


def waiting_page(lab: str, text: str) -> bytes:
    """A page that says why there is no feedback yet."""
    return _PAGE.format(title=f"{lab}: not graded yet", text=html.escape(text)).encode()


def _open_below(top: Path, folder: Path) -> int:
    """A descriptor of a folder, reached from `top` without following a link.

    Raises:
        OSError: a part of the path is a link, or no folder.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    here = os.open(top, flags)
    for part in folder.relative_to(top).parts:
        try:
            inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=here)
        except OSError as error:
            error.filename = str(folder)
            raise
        finally:
            os.close(here)
        here = inner
    return here


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
