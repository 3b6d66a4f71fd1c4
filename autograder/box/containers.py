"""A box made by a container engine (Podman, Docker), for machines where bubblewrap cannot make one.

It holds the same as bubblewrap's: an empty image whose only content are read-only mounts of the
same allow-list, no network, no capabilities, memory for /tmp and /dev/shm. Two things differ. The
engine itself bounds memory and processes. And what runs in a container does not end with the
command that started it: `Container.kill` ends it, and a box that is started again under the same
name ends the one before.
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
_FILE = "container"  # in the box's folder on the trusted side: which engine, which name
# What the engine's own command needs of the grader's environment; none of it enters the box.
_OUTSIDE = (
    "CONTAINER_HOST", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_HOST",
    "HOME", "PATH", "TMPDIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR",
)  # fmt: skip
# A container of this name may still be there: the kernel's front has killed only the command that
# had started it.
_ANEW = '{remove} >/dev/null 2>&1; exec "$@"'
ENTER = 'umask 077; mkdir /tmp/home /tmp/work && cd /tmp/work && umask 022 && exec "$@"'


@dataclass(frozen=True)
class Container:
    """One box's container, which may be started several times, one after the other."""

    engine: str
    name: str

    def take_reason(self) -> str:
        """The engine does not say what it refused."""
        return ""

    @property
    def removal(self) -> list[str]:
        """A command that ends it at once."""
        at_once = ["--time", "0"] if _is_podman(self.engine) else []  # Docker's default
        return [self.engine, "rm", "--force", *at_once, self.name]

    def kill(self) -> None:
        """Ends everything in it."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                self.removal, stdin=subprocess.DEVNULL, capture_output=True, timeout=_WITHIN_S,
                check=False,
            )  # fmt: skip

    def remove(self) -> bool:
        """Ends everything in it and takes it away."""
        self.kill()
        return True


def remove_left(folder: Path) -> None:
    """Ends the containers of a killed grader that worked in this folder."""
    for file in folder.glob(f"*/.box/{_FILE}"):
        lines = file.read_text().splitlines()
        if len(lines) == 2:  # else its grader was killed before there was a container
            Container(*lines).kill()


class ContainerMounts:
    """Builds the engine's mount arguments; takes the calls of `mounts.Mounts`."""

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
        """Shows a copy of a package without the hidden modules, given as paths of names below it.

        Engines mount on folders, so the modules cannot be mounted one by one into an empty one.
        """
        if not hidden:
            self.bind(folder)
            return
        copy = self._staging / f"package-{len(self._seen)}"

        def left_out(place: str, names: list[str]) -> Iterable[str]:
            parts = Path(place).relative_to(folder).parts
            if parts and parts[-1] == "__pycache__":
                parts = parts[:-1]
            return [n for n in names if (*parts, n.partition(".")[0]) in hidden]

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
        """A link that the image has."""
        self.links[path] = target

    def device(self, path: Path) -> None:
        self.args += ["--device", str(path)]

    def kernel(self) -> None:
        """/proc and /dev are the engine's."""

    def folder(self, path: str) -> None:
        """A private folder below a scratch folder; made when the box starts (`ENTER`)."""

    def scratch(self, path: str, size: int) -> None:
        """A folder in memory that student code may write to."""
        if path == "/dev/shm":
            self.args += ["--shm-size", str(size)]
        else:
            self.args += ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,size={size},mode=1777"]

    def seal(self) -> None:
        """Nothing else can be written to."""
        self.args += ["--read-only"]

    def _mount(self, source: Path, path: Path) -> None:
        for each in (source, path):
            if "," in str(each):
                raise ValueError(f"a container engine cannot mount a path with a comma: {each}")
        self.args += ["--mount", f"type=bind,src={source},dst={path},ro=true"]


def command(
    engine: str, mounts: ContainerMounts, folder: Path, limits: Limits, env: Mapping[str, str]
) -> tuple[list[str], Container]:
    """Start of the command line of a program in the container, and what ends it.

    Args:
        folder: of the trusted side, where the container's name is kept for whoever tidies up.

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
    # An engine's own defaults may be above what it may set. The processes of all of a user's boxes
    # count together here; --pids-limit bounds each.
    files = limits.num_open_files
    options += ["--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={_NPROC}:{_NPROC}"]
    if _is_podman(engine):
        # Its own hosts file and folders in memory are not ours.
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
    """The name of an image that has nothing but these links; made if it is not there."""
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
