"""A box made by a container engine (Podman, Docker), for machines where bubblewrap cannot make one.

The container has the same content as bubblewrap's box: an empty image with read-only mounts of the
same allow-list, no network, no capabilities, and /tmp and /dev/shm in memory. Two things are
different. The engine itself bounds memory and processes. And a container does not end with the
command that started it: `Container.kill` ends it, and starting a box again under the same name
first removes the previous container.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shlex
import shutil
import subprocess
import tarfile
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autograder.criteria.limits import Limits

_WITHIN_S = 60.0
_NPROC = 32768
_FILE = "container"  # file with engine and container name, in the box's folder outside the box
# Variables that the engine's command gets from the grader's environment; none enters the box.
_OUTSIDE = (
    "CONTAINER_HOST",
    "DBUS_SESSION_BUS_ADDRESS",
    "DOCKER_CONFIG",
    "DOCKER_CONTEXT",
    "DOCKER_HOST",
    "HOME",
    "PATH",
    "TMPDIR",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_RUNTIME_DIR",
)
# A container of this name may still exist: the kernel's front kills only the command that started
# the container.
_ANEW = '{remove} >/dev/null 2>&1; exec "$@"'
ENTER = 'umask 077; mkdir /tmp/home /tmp/work && cd /tmp/work && umask 022 && exec "$@"'


@dataclass(frozen=True)
class Container:
    """One box's container, which may be started several times, one after the other."""

    engine: str
    name: str

    def take_reason(self) -> str:
        """Always empty: the engine does not report what it refused."""
        return ""

    @property
    def removal(self) -> list[str]:
        """A command that kills and removes the container at once."""
        at_once = ["--time", "0"] if _is_podman(self.engine) else []  # Docker's default
        return [self.engine, "rm", "--force", *at_once, self.name]

    def kill(self) -> None:
        """Kills everything in the container and removes it."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                self.removal,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_WITHIN_S,
                check=False,
            )

    def remove(self) -> bool:
        """The same as `kill`; always True."""
        self.kill()
        return True


def remove_left(folder: Path) -> None:
    """Kills the containers of a killed grader that worked in this folder."""
    for file in folder.glob(f"*/.box/{_FILE}"):
        lines = file.read_text().splitlines()
        if len(lines) == 2:  # else the grader was killed before the container existed
            Container(*lines).kill()


class ContainerMounts:
    """Builds the engine's mount arguments; has the methods of `bubblewrap.Mounts`."""

    def __init__(self, staging: Path) -> None:
        self.args: list[str] = []
        self.links: dict[str, str] = {}
        self._staging, self._seen = staging, list[Path]()

    def bind(self, path: Path, source: Path | None = None) -> None:
        """Shows `source` (default: the same path) read-only at `path`, if it exists."""
        if source is None and any(path.is_relative_to(seen) for seen in self._seen):
            return
        self._seen.append(path)
        if (source or path).exists():
            self._mount(source or path, path)

    def package(self, folder: Path, hidden: Collection[tuple[str, ...]]) -> None:
        """Shows a copy of a package without the hidden modules.

        Each hidden module is a tuple of names below the package. A copy is needed because engines
        cannot mount modules one by one into an empty folder.
        """
        if not hidden:
            self.bind(folder)
            return
        copy = self._staging / f"package-{len(self._seen)}"

        def left_out(place: str, names: list[str]) -> Iterable[str]:
            parts = Path(place).relative_to(folder).parts
            if parts and parts[-1] == "__pycache__":
                parts = parts[:-1]
            # Another process writes NAME.pyc.NUMBER, and renames it while this one copies.
            return [n for n in names if (*parts, n.partition(".")[0]) in hidden or ".pyc." in n]

        shutil.copytree(folder, copy, ignore=left_out)
        self.bind(folder, copy)

    def hide(self, path: Path) -> None:
        """Covers a file or folder, in case one of the mounts above shows it."""
        for place in {path.absolute(), path.resolve()}:
            if not any(place.is_relative_to(seen) for seen in self._seen) or not place.exists():
                continue
            empty = self._staging / "empty"
            if place.is_dir():
                empty.mkdir(exist_ok=True)
            self._mount(empty if place.is_dir() else Path(os.devnull), place)

    def symlink(self, target: str, path: str) -> None:
        """Adds a symbolic link to the image."""
        self.links[path] = target

    def device(self, path: Path) -> None:
        self.args += ["--device", str(path)]

    def kernel(self) -> None:
        """Does nothing: the engine provides /proc and /dev."""

    def folder(self, path: str) -> None:
        """Does nothing: `ENTER` makes the private folders when the box starts."""

    def scratch(self, path: str, size: int) -> None:
        """Adds a folder in memory that student code may write to."""
        if path == "/dev/shm":
            self.args += ["--shm-size", str(size)]
        else:
            self.args += ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,size={size},mode=1777"]

    def seal(self) -> None:
        """Makes everything else read-only."""
        self.args += ["--read-only"]

    def _mount(self, source: Path, path: Path) -> None:
        for each in (source, path):
            if "," in str(each):
                raise ValueError(f"a container engine cannot mount a path with a comma: {each}")
        self.args += ["--mount", f"type=bind,src={source},dst={path},ro=true"]


def command(
    engine: str, mounts: ContainerMounts, folder: Path, limits: Limits, env: Mapping[str, str]
) -> tuple[list[str], Container]:
    """Start of the command line of a program in the container, and the container, to end it.

    Args:
        folder: folder outside the box where the container's name is kept for later cleanup.

    Raises:
        OSError, subprocess.SubprocessError: the engine does not work.
    """
    container = Container(engine, f"md-{uuid.uuid4().hex}")
    (folder / _FILE).write_text(f"{engine}\n{container.name}\n")
    image = _image(engine, mounts.links)
    options = ["--rm", "--interactive", "--name", container.name, "--hostname", "box"]
    options += ["--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    options += ["--user", f"{os.getuid()}:{os.getgid()}", "--pull", "never"]
    options += ["--memory", str(limits.box_memory_bytes + limits.tmp_bytes + limits.shm_bytes)]
    options += ["--pids-limit", str(limits.num_processes)]
    # The engine's default limits may be higher than what the engine is allowed to set. `nproc`
    # counts the processes of all boxes of a user together; --pids-limit bounds each box.
    files = limits.num_open_files
    options += ["--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={_NPROC}:{_NPROC}"]
    if _is_podman(engine):
        # Podman's own hosts file and in-memory folders would take the place of ours.
        options += ["--no-hosts", "--read-only-tmpfs=false", "--log-driver", "none"]
        options += ["--userns", "keep-id"] if os.getuid() else []
    else:
        options += ["--log-driver", "none"]
    for name, value in env.items():
        options += ["--env", f"{name}={value}"]
    anew = _ANEW.format(remove=shlex.join(container.removal))
    started = ["/usr/bin/env", "-i", *outside(), "/bin/sh", "-c", anew, "sh"]
    started += [engine, "run", *options, *mounts.args, image, "/bin/sh", "-c", ENTER, "sh"]
    return started, container


def outside() -> list[str]:
    """``NAME=VALUE`` for the engine's own command."""
    return [f"{name}={os.environ[name]}" for name in _OUTSIDE if name in os.environ]


def _is_podman(engine: str) -> bool:
    return Path(engine).name == "podman"


def _image(engine: str, links: Mapping[str, str]) -> str:
    """The name of an image that holds only mount points and these links; made if missing."""
    digest = hashlib.sha256(repr(sorted(links.items())).encode()).hexdigest()[:12]
    name = f"localhost/minidist-box:{digest}"
    there = [engine, "image", "inspect", "--format", "there", name]
    quiet = {"capture_output": True, "timeout": _WITHIN_S}
    if subprocess.run(there, stdin=subprocess.DEVNULL, check=False, **quiet).returncode == 0:
        return name
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for folder in ("dev", "etc", "proc", "sys", "tmp", "var"):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        for path, target in links.items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    subprocess.run([engine, "import", "-", name], input=data.getvalue(), check=True, **quiet)
    return name
