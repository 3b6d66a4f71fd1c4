"""A separate control group (cgroup v2) for every box, on machines that let the grader make groups.

The kernel then bounds at every moment what `guard` counts twice a second: memory, including
everything in /tmp and /dev/shm, and the number of processes and threads. CPU time is shared equally
among submissions, not among processes. And the kernel can end all processes of a box at once.

The grader makes groups only in a part of the tree that was delegated to it: below the group named
by $AUTOGRADER_CGROUP, or below the grader's own group if that was delegated, for example by

    systemd-run --user --scope -p Delegate=yes autograder grade …

Anywhere else the tree belongs to systemd, Slurm or a container engine, and `guard` works alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from autograder.criteria.limits import MIB, Limits

ROOT_VARIABLE = "AUTOGRADER_CGROUP"
_CONTROLLERS = ("memory", "pids", "cpu")
_OWN = "grader"  # group of the grader itself: only groups without processes pass controllers on
_GONE_WITHIN_S = 10.0
# `guard` enforces the limit on processes, so that the limit is the same on every machine. The
# kernel's limit is higher by this number: it only stops a burst between two looks of `guard`.
_SPARE_PROCESSES = 64
_ENTER = 'echo 0 >"$0/cgroup.procs" && exec "$@"'


@dataclass(frozen=True)
class GroupsFolder:
    """Where groups can be made.

    Attributes:
        root: folder of the group below which groups are made; None if none can be made.
        controllers: which of memory, pids and cpu are available.
        reason: what is used, or why no groups can be made.
    """

    root: Path | None
    controllers: tuple[str, ...]
    reason: str


@dataclass
class Group:
    """One submission's group; call `remove` at the end.

    Attributes:
        path: the group's folder.
        prefix: start of a command line; the appended program runs in the group.
    """

    path: Path
    prefix: list[str] = field(init=False)
    _killed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.prefix = ["/bin/sh", "-c", _ENTER, str(self.path)]

    def take_reason(self) -> str:
        """Why the kernel killed processes of the group since the last call; empty if it did not."""
        killed = _events(self.path / "memory.events").get("oom_kill", 0)
        if killed <= self._killed:
            return ""
        self._killed = killed
        most = int((self.path / "memory.max").read_text())
        return (
            f"the submission used more than the {most // MIB} MiB of memory that all its ranks, "
            "/tmp and /dev/shm may have together"
        )

    def kill(self) -> None:
        """Kills every process in the group at once."""
        with contextlib.suppress(OSError):  # the group is gone
            (self.path / "cgroup.kill").write_text("1")

    def remove(self) -> bool:
        """Kills every process in the group and removes the group; False if that takes too long."""
        ends_at = time.monotonic() + _GONE_WITHIN_S
        while self.path.is_dir():
            self.kill()
            with contextlib.suppress(OSError):  # some processes have not ended yet
                self.path.rmdir()
                break
            if time.monotonic() > ends_at:
                return False
            time.sleep(0.01)
        return True


def make_group(name: str, limits: Limits) -> Group | None:
    """Makes a group with these limits; None if this machine does not let us make groups."""
    place = find_groups_folder()
    if place.root is None:
        return None
    group = Group(place.root / name)
    group.path.mkdir()
    if "memory" in place.controllers:
        most = limits.box_memory_bytes + limits.tmp_bytes + limits.shm_bytes
        (group.path / "memory.max").write_text(str(most))
        (group.path / "memory.oom.group").write_text("1")
        with contextlib.suppress(OSError):  # the file does not exist without swap
            (group.path / "memory.swap.max").write_text("0")
    if "pids" in place.controllers:
        (group.path / "pids.max").write_text(str(limits.num_processes + _SPARE_PROCESSES))
    return group


def remove_group(name: str) -> None:
    """Removes the group of this name that a killed grader left, and kills its processes."""
    place = find_groups_folder()
    if place.root is not None:
        Group(place.root / name).remove()


@functools.cache
def find_groups_folder() -> GroupsFolder:
    """Looks for a part of the tree that was delegated to us, and tests it once (cached)."""
    mount = _mount()
    if mount is None:
        return GroupsFolder(None, (), "no cgroup v2 file system is mounted")
    if chosen := os.environ.get(ROOT_VARIABLE):
        root = Path(chosen)
        if not (root / "cgroup.procs").is_file():
            return GroupsFolder(None, (), f"{ROOT_VARIABLE}: {chosen} is not a cgroup v2 folder")
    else:
        own = _own_group(mount)
        ours = [] if own is None else [own] if own.name != _OWN else [own, own.parent]
        root = next(filter(_is_delegated, ours), None)
        if root is None:
            how = "systemd-run --user --scope -p Delegate=yes autograder grade … delegates one"
            return GroupsFolder(None, (), f"this process's cgroup is not delegated to it: {how}")
    try:
        controllers = _prepare(root)
        trial = Group(root / f"md-trial-{os.getpid()}")
        trial.path.mkdir()
        try:
            subprocess.run(
                [*trial.prefix, "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=30,
                check=True,
            )
        finally:
            trial.remove()
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return GroupsFolder(
            None, (), f"{root}: no process can be moved there: {(lines or ['?'])[-1]}"
        )
    except (OSError, subprocess.SubprocessError) as error:
        return GroupsFolder(None, (), f"{root}: {error}")
    bounded = ", ".join(controllers) or "no controller is available, processes are only ended there"
    return GroupsFolder(root, controllers, f"{root}: {bounded}")


def _prepare(root: Path) -> tuple[str, ...]:
    """Enables all available controllers for the groups below `root`; returns the controllers."""
    there = (root / "cgroup.controllers").read_text().split()
    wanted = [name for name in _CONTROLLERS if name in there]
    switch = root / "cgroup.subtree_control"
    if set(wanted) <= set(switch.read_text().split()):
        return tuple(wanted)
    # Move the processes that are in `root` now, including this one, into a group below `root`.
    if (root / "cgroup.type").exists():  # the tree's own root may have processes and controllers
        own = root / _OWN
        own.mkdir(exist_ok=True)
        for pid in (root / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (own / "cgroup.procs").write_text(pid)
    switch.write_text(" ".join(f"+{name}" for name in wanted))
    return tuple(wanted)


def _mount() -> Path | None:
    """Where the cgroup v2 tree is mounted writable; None if it is not."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if rest.startswith("cgroup2 ") and "rw" in fields.split()[5].split(","):
            return Path(fields.split()[4])
    return None


def _own_group(mount: Path) -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            folder = mount / line[3:].lstrip("/")
            return folder if (folder / "cgroup.procs").is_file() else None
    return None


def _is_delegated(folder: Path) -> bool:
    """Whether systemd has delegated this group (it sets an extended attribute)."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _events(path: Path) -> dict[str, int]:
    """The lines ``name number`` of a kernel file; empty if the file does not exist."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(number) for name, number in (line.split() for line in lines)}
