"""Opens a download of submissions, a zip or a folder, that may hold anything.

Nothing is written outside of the given folder, no link is followed, and a zip that unpacks to more
than a class can hand in is refused before it fills the disk.
"""

from __future__ import annotations

import os
import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from autograder.plain_text import listed
from autograder.submission.find import TOOLS_OWN, display_name

MAX_FILE_BYTES = 1 << 30
MAX_BYTES = 16 << 30
MAX_FILES = 100_000
MAX_RATIO = 100  # of a zip's content to its size; notebooks with pictures have less than 10
_SMALL_BYTES = 64 << 20  # below, the ratio does not matter
_PIECE_BYTES = 1 << 20
_SHOWN = 5
WORK = ".collecting-"  # prefix of our own folders, which may be in the download


class DownloadError(ValueError):
    """The download cannot be taken; the message says why, and nothing was taken."""


def open_download(path: Path, work: Path) -> Path:
    """The folder of a download: itself, or unpacked into the folder `work`, which is empty.

    Raises:
        DownloadError: it is neither zip nor folder, or holds something that is refused.
    """
    if path.is_dir():
        refuse_links(path)
        return path
    if not path.is_file():
        raise DownloadError(f"there is no file or folder {path}")
    unpack(path, work)
    return work


def refuse_links(folder: Path) -> None:
    """Raises a DownloadError if a folder holds a link, or anything but files and folders."""
    odd: list[str] = []
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != ".git"]
        for name in (*folders, *files):
            mode = os.lstat(os.path.join(where, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                odd.append(display_name(os.path.relpath(os.path.join(where, name), folder)))
    if odd:
        raise DownloadError(
            f"{folder}: symbolic links and special files are not taken: remove "
            f"{listed(odd, _SHOWN)}"
        )


def unpack(path: Path, into: Path) -> None:
    """Unpacks a zip.

    Raises:
        DownloadError: it cannot be read, or holds what is refused. `into` may then hold a part.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if not _is_tools(m.filename)]
            _check(path, members, into)
            for member in members:
                _write(archive, member, into / member.filename, path)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, UnicodeError) as error:
        raise DownloadError(f"{path} is no zip that can be read: {error}") from None
    except RuntimeError as error:  # a password
        raise DownloadError(f"{path} cannot be unpacked: {error}") from None
    except zlib.error as error:
        raise DownloadError(f"{path} is damaged: {error}") from None


def _is_tools(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return any(part in TOOLS_OWN for part in parts)


def _check(path: Path, members: list[zipfile.ZipInfo], into: Path) -> None:
    """Refuses names that lead elsewhere, links, and more than a class hands in."""
    if len(members) > MAX_FILES:
        raise DownloadError(f"{path} holds {len(members)} files; at most {MAX_FILES} are taken")
    for member in members:
        name = member.filename
        kind = stat.S_IFMT(member.external_attr >> 16)
        if name.startswith("/") or "\\" in name or ".." in name.split("/") or name[1:2] == ":":
            raise DownloadError(f"{path}: {display_name(name)!r} leads out of the zip")
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise DownloadError(f"{path}: {display_name(name)!r} is a symbolic link or no file")
        if member.file_size > MAX_FILE_BYTES:
            raise DownloadError(
                f"{path}: {display_name(name)!r} has {member.file_size >> 20} MiB unpacked; at "
                f"most {MAX_FILE_BYTES >> 20} MiB are taken"
            )
    size, packed = sum(m.file_size for m in members), max(1, path.stat().st_size)
    if size > MAX_BYTES or (size > _SMALL_BYTES and size > MAX_RATIO * packed):
        raise DownloadError(
            f"{path} has {size >> 20} MiB unpacked, {size // packed} times its size: at most "
            f"{MAX_BYTES >> 20} MiB and {MAX_RATIO} times are taken"
        )
    free = shutil.disk_usage(into).free
    if size > free:
        raise DownloadError(f"{path} has {size >> 20} MiB unpacked; {free >> 20} MiB are free")


def _write(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, path: Path) -> None:
    if member.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    left = member.file_size
    try:
        with archive.open(member) as source, target.open("xb") as file:
            while piece := source.read(_PIECE_BYTES):
                left -= len(piece)
                if left < 0:  # the size in the zip's table is false
                    raise DownloadError(f"{path}: {display_name(member.filename)!r} is too long")
                file.write(piece)
    except FileExistsError:
        name = display_name(member.filename)
        raise DownloadError(f"{path} holds {name!r} twice") from None
