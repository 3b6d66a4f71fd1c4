"""What was handed in at one time: who, when, and files on disk, in a zip or in a commit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from autograder.gradebook.unpack import MAX_FILE_BYTES, DownloadError, unpack
from autograder.submission.find import TOOLS_OWN, display_name

# Runs nothing that a checkout's configuration names, and accepts a checkout of any owner.
_GIT = ("git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=")
_GIT += ("-c", "protocol.allow=never", "-c", "log.showSignature=false", "-c", "core.pager=cat")


@dataclass(frozen=True)
class Owner:
    """A person or a group as a download names it.

    Attributes:
        label: for people to read.
        keys: addresses and ids, each of which means one person.
        names: other names; the first that the class list knows counts.
        number: the download's number of the person; a different number is a different person.
    """

    label: str
    keys: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    number: str = ""


@dataclass(frozen=True, kw_only=True)
class HandedIn:
    """What was handed in at one time.

    Attributes:
        owners: several for a group.
        files: name -> file, or name in the commit.
        when: in UTC, if the download says it; late: whether the download says so.
        order: without times, the attempt with the higher number was handed in later.
        commit: (checkout, commit) that the files are in; None for files on disk.
    """

    source: str
    owners: tuple[Owner, ...]
    files: Mapping[str, Path]
    when: datetime | None = None
    late: bool = False
    order: int = 0
    commit: tuple[Path, str] | None = None

    @property
    def has_notebook(self) -> bool:
        """Whether a notebook is in it."""
        return any(name.casefold().endswith(".ipynb") for name in self.files)

    def read(self, name: str) -> bytes:
        """The content of a file."""
        if self.commit is not None:
            checkout, commit = self.commit
            return git(checkout, "cat-file", "blob", f"{commit}:{self.files[name].as_posix()}")
        if self.files[name].stat().st_size > MAX_FILE_BYTES:
            raise DownloadError(f"{self.files[name]} has more than {MAX_FILE_BYTES >> 20} MiB")
        return self.files[name].read_bytes()


def files_below(folder: Path) -> dict[str, Path]:
    """Relative name -> file, for all files in a folder but those of tools."""
    found = {}
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in TOOLS_OWN)
        paths = [Path(where, name) for name in sorted(files) if name not in TOOLS_OWN]
        found |= {str(path.relative_to(folder)): path for path in paths}
    return found


def unzipped(handed: HandedIn, work: Path, others: list[str]) -> HandedIn:
    """The attempt with the content of its zips, if no notebook is beside them."""
    zips = [path for path in handed.files.values() if path.suffix.casefold() == ".zip"]
    if handed.has_notebook or handed.commit is not None or not zips:
        return handed
    files = dict(handed.files)
    for path in zips:
        into = work / f"inside-{len(list(work.iterdir()))}"
        into.mkdir()
        try:
            unpack(path, into)
        except DownloadError as error:  # one student's zip must not stop the class
            others.append(f"{display_name(handed.source)}: {error}")
            continue
        files |= files_below(into)
    return replace(handed, files=files)


def git(checkout: Path, *arguments: str) -> bytes:
    """What git says of a checkout.

    Raises:
        DownloadError: git is not there, or fails.
    """
    environment = os.environ | {"GIT_DIR": str(checkout / ".git"), "GIT_NO_LAZY_FETCH": "1"}
    try:
        done = subprocess.run(
            [*_GIT, *arguments], env=environment, capture_output=True, check=True, timeout=120
        )
    except FileNotFoundError:
        raise DownloadError("git is needed to read checkouts, and is not installed") from None
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", b"") or b"").decode("utf-8", "replace").strip()
        raise DownloadError(f"{checkout}: git failed: {said[:300] or error}") from None
    return done.stdout
