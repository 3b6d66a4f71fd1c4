"""A box made by Apptainer, for clusters that have nothing else.

The box has the same content as the other two kinds. Its image is a folder of mount points with
read-only mounts of the same allow-list; it has no network and no capabilities. The box always has a
user namespace, and ends with the command that started it. Apptainer cannot bound the sizes of /tmp
and /dev/shm, so `guard` checks them from outside.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from autograder.box.containers import ENTER, ContainerMounts, outside

# Covered read-only below /proc: if the grader is root, the kernel treats the box's user as root
# when it accesses these files.
_KERNEL = ("acpi", "bus", "fs", "irq", "mtrr", "pressure", "scsi", "sys", "sysrq-trigger")
_SCRATCH = Path("/tmp")


class ApptainerMounts(ContainerMounts):
    """Builds the mount arguments, and a folder that holds every mount point.

    Attributes:
        image: the folder of mount points.
        sizes: in-memory folders whose size Apptainer does not bound -> allowed bytes.
    """

    def __init__(self, staging: Path) -> None:
        super().__init__(staging)
        self.image = staging / "image"
        self.sizes: dict[str, int] = {}
        self._tops: set[Path] = set()
        shutil.rmtree(self.image, ignore_errors=True)  # left by an earlier box in this folder
        for name in ("dev", "etc", "proc", "sys", "tmp", "var/tmp"):
            (self.image / name).mkdir(parents=True, exist_ok=True)

    def symlink(self, target: str, path: str) -> None:
        if path != "/var/tmp":  # a real folder here, in the same file system as /tmp
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
        """Does nothing: an image that is a folder is already read-only."""

    def _mount(self, source: Path, path: Path) -> None:
        inside = any(path != seen and path.is_relative_to(seen) for seen in self._seen)
        if not inside and path.parts[1] not in ("dev", "proc"):
            self._make_room(source, path)
        super()._mount(source, path)

    def _make_room(self, source: Path, path: Path) -> None:
        """Makes the mount point for `source`.

        The parent folders of a mount point below /tmp would be writable, and student code could
        rename and replace them. So the topmost parent folder becomes a mount too.
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
    # Apptainer adds variables that reveal paths outside the box; env -i removes them.
    inside = ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in env.items())]
    started = ["/usr/bin/env", "-i", *outside(), apptainer, "--quiet", "exec", *options]
    return [*started, *mounts.args, str(mounts.image), *inside, "/bin/sh", "-c", ENTER, "sh"]
