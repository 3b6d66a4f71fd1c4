"""A box made by bubblewrap: namespaces, and a file system of read-only mounts (an allow-list)."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

SCRATCH = ("/tmp", "/dev/shm")  # where student code may write, in memory
_GUARD_BYTES = 1 << 20


class Mounts:
    """Builds bwrap's mount arguments; they take effect in the order of the calls."""

    def __init__(self) -> None:
        self.args: list[str] = []
        self._seen: list[Path] = []
        self._tops: list[Path] = []

    def bind(self, path: Path, source: Path | None = None) -> None:
        """Shows `source` (default: the same path) read-only at `path`, if it exists."""
        if source is None and any(path.is_relative_to(seen) for seen in self._seen):
            return
        self._guard(path)
        self._seen.append(path)
        self.args += ["--ro-bind-try", str(source or path), str(path)]

    def package(self, folder: Path, hidden: Collection[tuple[str, ...]]) -> None:
        """Shows a package without the hidden modules.

        Each hidden module is a tuple of names below the package. Hidden modules are left out and
        not covered by an empty folder: Python would import that as a namespace package. Their
        compiled files in __pycache__ are left out too.
        """
        if not hidden:
            self.bind(folder)
            return
        self._guard(folder)
        self.args += ["--perms", "0755", "--tmpfs", str(folder)]
        absent = {names[0] for names in hidden if len(names) == 1}
        for child in sorted(folder.iterdir()):
            stem = child.name.partition(".")[0]
            if child.name == "__pycache__":
                for compiled in sorted(child.iterdir()):
                    if compiled.name.partition(".")[0] not in absent:
                        self._put(compiled)
            elif stem and stem not in absent:
                below = {names[1:] for names in hidden if names[0] == stem and len(names) > 1}
                if below and child.is_dir():
                    self.package(child, below)
                else:
                    self._put(child)
        self.args += ["--remount-ro", str(folder)]

    def hide(self, path: Path) -> None:
        """Covers a file or folder, in case one of the mounts above shows it."""
        for place in {path.absolute(), path.resolve()}:
            if not any(place.is_relative_to(seen) for seen in self._seen):
                continue
            if place.is_dir():
                self.args += ["--perms", "0755", "--tmpfs", str(place)]
                self.args += ["--remount-ro", str(place)]
            elif place.exists():
                self.args += ["--ro-bind", "/dev/null", str(place)]

    def symlink(self, target: str, path: str) -> None:
        self.args += ["--symlink", target, path]

    def device(self, path: Path) -> None:
        self.args += ["--dev-bind", str(path), str(path)]

    def kernel(self) -> None:
        """Adds a /proc and a /dev for the box's own processes."""
        self.args += ["--proc", "/proc", "--dev", "/dev"]

    def folder(self, path: str) -> None:
        """Adds a private folder below a scratch folder."""
        self.args += ["--perms", "0700", "--dir", path]

    def scratch(self, path: str, size: int) -> None:
        """Adds a folder in memory that student code may write to."""
        self.args += ["--perms", "1777", "--size", str(size), "--tmpfs", path]

    def seal(self) -> None:
        """Makes the parent folders of the mounts read-only; nothing can be mounted afterwards.

        /proc becomes read-only too. Otherwise, if the grader is root, the box's user could write
        sysctls although it has no capabilities, because the kernel checks only the outer uid.
        Writing core_pattern would be a way out of the box.
        """
        for place in (*map(str, self._tops), "/proc", "/dev", "/"):
            self.args += ["--remount-ro", place]

    def _put(self, path: Path) -> None:
        # "try": a process outside that imports may replace a compiled file at this moment.
        self.args += ["--ro-bind-try", str(path), str(path)]

    def _guard(self, path: Path) -> None:
        """Protects mount points below a scratch folder from student code.

        The parent folders of such a mount point would be part of the writable /tmp, and student
        code could rename and replace them. So the topmost parent folder becomes a mount too.
        """
        for scratch in SCRATCH:
            if path.is_relative_to(scratch):
                top = Path(scratch, path.relative_to(scratch).parts[0])
                if top != path and top not in self._tops:
                    self.args += [
                        "--perms",
                        "0755",
                        "--size",
                        str(_GUARD_BYTES),
                        "--tmpfs",
                        str(top),
                    ]
                    self._tops.append(top)


def command(bwrap: str, mounts: Mounts, env: Mapping[str, str], work: str) -> list[str]:
    """Start of the command line of a program in the box; its working folder is `work`."""
    namespaces = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-net"]
    namespaces += ["--unshare-uts", "--unshare-cgroup-try", "--uid", "1000", "--gid", "1000"]
    if disables_userns(bwrap):
        namespaces += ["--disable-userns"]
    variables = [part for name, value in env.items() for part in ("--setenv", name, value)]
    prefix = [
        bwrap,
        *namespaces,
        "--clearenv",
        *variables,
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    ]
    prefix += ["--hostname", "box", *mounts.args]
    return [*prefix, "--chdir", work, "--"]


@functools.cache
def disables_userns(bwrap: str) -> bool:
    """Whether this bwrap can forbid new user namespaces in the box (0.8 and newer can)."""
    done = subprocess.run([bwrap, "--help"], capture_output=True, timeout=30, check=False)
    return b"--disable-userns" in done.stdout + done.stderr
