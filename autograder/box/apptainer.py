"""A box made by Apptainer, for clusters that have nothing else.

It holds the same as the other two kinds: a folder of mount points for an image, whose only content
are read-only mounts of the same allow-list, no network, no capabilities. It always has a user
namespace, and ends with the command that started it. What Apptainer cannot bound are the sizes of
/tmp and /dev/shm: `guard` looks at them from outside.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from autograder.box.containers import ENTER, ContainerMounts, outside

# Where the grader is root, the box's user is as well, to the kernel's files at least.
_KERNEL = ("acpi", "bus", "fs", "irq", "mtrr", "pressure", "scsi", "sys", "sysrq-trigger")
_SCRATCH = Path("/tmp")


class ApptainerMounts(ContainerMounts):
    """Builds the mount arguments, and a folder with every place that something is mounted on.

    Attributes:
        image: that folder.
        sizes: folders in memory whose size nobody bounds yet -> what they may hold in bytes.
    """

    def __init__(self, staging: Path) -> None:
        super().__init__(staging)
        self.image = staging / "image"
        self.sizes: dict[str, int] = {}
        self._tops: set[Path] = set()
        shutil.rmtree(self.image, ignore_errors=True)  # of a box that was built here before
        for name in ("dev", "etc", "proc", "sys", "tmp", "var/tmp"):
            (self.image / name).mkdir(parents=True, exist_ok=True)

    def symlink(self, target: str, path: str) -> None:
        if path != "/var/tmp":  # a folder of the box's own, with /tmp in one file system
            (self.image / path.lstrip("/")).symlink_to(target)

    def device(self, path: Path) -> None:
        self.args += ["--mount", f"type=bind,src={path},dst={path}"]

    def kernel(self) -> None:
        for name in _KERNEL:
            if (place := Path("/proc", name)).exists():
                self._mount(place, place)

    def scratch(self, path: str, size: int) -> None:
        self.sizes[path] = size

    def seal(self) -> None:
        """An image that is a folder is read-only."""

    def _mount(self, source: Path, path: Path) -> None:
        inside = any(path != seen and path.is_relative_to(seen) for seen in self._seen)
        if not inside and path.parts[1] not in ("dev", "proc"):
            self._make_room(source, path)
        super()._mount(source, path)

    def _make_room(self, source: Path, path: Path) -> None:
        """A place to mount `source` on.

        A folder that leads to one below /tmp would be writable, and could be renamed away and
        replaced; the first of them therefore becomes a mount of its own.
        """
        room = self.image / path.relative_to("/")
        if path.is_relative_to(_SCRATCH):
            top = _SCRATCH / path.relative_to(_SCRATCH).parts[0]
            cover = self._staging / "covers" / top.name
            room = cover / path.relative_to(top)
            if top != path and top not in self._tops:
                self._tops.add(top)
                cover.mkdir(parents=True, exist_ok=True)
                super()._mount(cover, top)
        if source.is_dir():
            room.mkdir(parents=True, exist_ok=True)
        else:
            room.parent.mkdir(parents=True, exist_ok=True)
            room.touch()


def command(apptainer: str, mounts: ApptainerMounts, env: Mapping[str, str]) -> list[str]:
    """Start of the command line of a program in the box."""
    options = ["--userns", "--containall", "--no-init", "--no-privs", "--no-home", "--no-eval"]
    options += ["--cleanenv", "--net", "--network", "none", "--uts", "--hostname", "box"]
    options += ["--no-mount", "bind-paths,cwd,devpts,home,hostfs,sys"]
    # Apptainer adds variables, which say where things are outside.
    inside = ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in env.items())]
    started = ["/usr/bin/env", "-i", *outside(), apptainer, "--quiet", "exec", *options]
    return [*started, *mounts.args, str(mounts.image), *inside, "/bin/sh", "-c", ENTER, "sh"]
