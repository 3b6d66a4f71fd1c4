"""Puts a finished release into its folder, and touches only what a release has written there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from autograder.course.course import RELEASED, CourseError
from autograder.files import write_whole

# What an earlier version of `autograder release` wrote, and what it kept.
_FOLDERS = ("autograder", "lib", "labs", "solutions", "notebooks")
_FILES = ("pyproject.toml", "environment.yml", "LICENSE", "nbgrader_config.py", "course.toml")
_FILES += ("Makefile", "README.md")
_KEPT = (".git", "work", ".venv", "build")


def earlier_files(folder: Path) -> list[str]:
    """The files of an earlier release in the folder, relative to it; none in a new one."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return []
    mark = folder / RELEASED
    if not folder.is_dir() or not mark.is_file():
        raise CourseError(f"{folder} is not empty, and no earlier release: name another folder")
    names = _listed(folder) or _of_earlier_version(folder)
    root = folder.resolve()
    # Anybody may have edited the list, so its names must not lead out of the folder.
    return [name for name in names if (root / name).parent.resolve().is_relative_to(root)]


def _listed(folder: Path) -> list[str]:
    """The list in the mark; empty if an earlier version wrote it."""
    return (folder / RELEASED).read_text("utf-8").splitlines()[1:]


def _of_earlier_version(folder: Path) -> list[str]:
    """The files that an earlier version wrote."""
    tops = [folder / name for name in _FOLDERS if not (folder / name).is_symlink()]
    files = [f for top in tops for f in top.rglob("*")] + [folder / name for name in _FILES]
    return [f.relative_to(folder).as_posix() for f in files if f.is_file()]


def _move_aside(folder: Path) -> None:
    """Moves unknown files aside; an earlier version would have removed them.

    Such a file may be one that we no longer write, or one of yours.
    """
    aside = folder / "build" / "before-release"
    for child in sorted(folder.iterdir()):
        if child.name not in (*_FOLDERS, *_FILES, *_KEPT, RELEASED):
            aside.mkdir(parents=True, exist_ok=True)
            shutil.move(child, aside / child.name)


def put_in_place(draft: Path, folder: Path, earlier: Sequence[str]) -> None:
    """Moves a finished release to its folder, and removes files that only an earlier one had."""
    files = sorted(f.relative_to(draft).as_posix() for f in draft.rglob("*") if f.is_file())
    ours = set(earlier)
    if others := [name for name in files if os.path.lexists(folder / name) and name not in ours]:
        raise CourseError(
            f"{folder} has files of yours where the release would write: {', '.join(others[:10])}; "
            "move them away"
        )
    folder.mkdir(exist_ok=True)
    if (folder / RELEASED).is_file() and not _listed(folder):
        _move_aside(folder)
    head = "Written by `autograder release`, which replaces these files and no others:"
    # Written before any file is moved, so that the next release knows the files of both.
    _write_mark(folder, [head, *sorted(ours.union(files))])
    for name in files:
        target = folder / name
        for above in reversed(target.relative_to(folder).parents[:-1]):
            (folder / above).mkdir(exist_ok=True)
            (folder / above).chmod(0o755)  # students read it, whatever the course's own umask is
        os.replace(draft / name, target)
        target.chmod(0o644)
    for name in sorted(ours.difference(files), reverse=True):
        (folder / name).unlink(missing_ok=True)
        for above in (folder / name).relative_to(folder).parents[:-1]:
            with contextlib.suppress(OSError):  # files that are not ours are in it
                (folder / above).rmdir()
    _write_mark(folder, [head, *files])
    folder.chmod(0o755)


def _write_mark(folder: Path, lines: Sequence[str]) -> None:
    write_whole(folder / RELEASED, "".join(f"{line}\n" for line in lines).encode(), mode=0o644)
