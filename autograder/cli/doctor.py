"""`autograder doctor`: what this machine can do for grading, and how to fix what is missing.

missing    nothing can be graded without this
limited    something is left out without this; the line says what
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from autograder.box.cgroup import find_groups_folder
from autograder.box.sandbox import probe_support
from autograder.cli.installation import foreign_code
from autograder.course.course import Course, CourseError
from autograder.criteria import get_lab, lab_names
from autograder.criteria.limits import GIB
from minidist.processes.cores import num_cores

MIN_FREE_BYTES = 2 * GIB
MIN_SHM_BYTES = 64 << 20
SLURM_WITHIN_S = 15.0  # time for the answer of Slurm's controller
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "lustre", "gpfs", "ceph", "beegfs"})
_STYLES = {"ok": "green", "missing": "bold red", "limited": "yellow"}


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was checked.

    Attributes:
        state: "ok"; "missing": nothing can be graded; "limited": something is left out.
        text: what was found.
        mend: how to fix it; empty if there is nothing to fix.
    """

    what: str
    state: str
    text: str
    mend: str = ""


def examine(course: Course | None) -> list[Diagnosis]:
    """Checks everything that grading needs; starts a sandbox, and asks Slurm with `sinfo`."""
    found = [
        *_packages(),
        _installation(),
        _kernels(),
        _sandbox(),
        _limits(),
        *_devices(),
        _cores(),
        _shared_memory(),
    ]
    if course is None:
        found.append(
            Diagnosis(
                "course", "missing", "not in a course", "change to it, or set AUTOGRADER_COURSE"
            )
        )
    else:
        found += [_key(course), _privacy(course), *_labs(course), *_disk(course)]
    return [*found, _cluster()]


def doctor_table(findings: list[Diagnosis]) -> Table:
    """One line per check, for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("what", "state", "found"):
        table.add_column(name)
    for each in findings:
        text = Text(each.text)
        if each.mend:
            text.append(f"\n→ {each.mend}", style="bold")
        table.add_row(each.what, Text(each.state, _STYLES[each.state]), text)
    return table


def _packages() -> Iterator[Diagnosis]:
    for name in ("torch", "jupyterlab", "nbgrader", "papermill"):
        try:
            yield Diagnosis(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Diagnosis(name, "missing", "not installed", "make install")


def _installation() -> Diagnosis:
    if why := foreign_code():
        mend = f"use {sys.prefix}/bin/autograder, or `make install` here"
        return Diagnosis("installation", "missing", why, mend)
    return Diagnosis("installation", "ok", sys.prefix)


def _kernels() -> Diagnosis:
    from jupyter_client.kernelspec import KernelSpecManager

    wanted = {f"torchrun-{get_lab(name).practice_world_size}" for name in lab_names()}
    there = KernelSpecManager().find_kernel_specs()
    if lacking := sorted(wanted - set(there)):
        return Diagnosis("kernels", "missing", f"no {', '.join(lacking)}", "make install")
    return Diagnosis(
        "kernels", "ok", ", ".join(sorted(n for n in there if n.startswith("torchrun")))
    )


def _sandbox() -> Diagnosis:
    support = probe_support()
    if support.works:
        return Diagnosis("sandbox", "ok", support.reason)
    mend = (
        "install bubblewrap, Podman, Docker or Apptainer; what you trust is graded with --trusted"
    )
    return Diagnosis("sandbox", "limited", f"{support.reason}; only --trusted work is graded", mend)


def _limits() -> Diagnosis:
    place = find_groups_folder()
    if place.root is not None:
        return Diagnosis("limits", "ok", f"by the kernel, in {place.reason}")
    return Diagnosis("limits", "ok", f"counted from outside, twice a second ({place.reason})")


def _devices() -> Iterator[Diagnosis]:
    import torch

    count = torch.cuda.device_count()
    if not count:
        yield Diagnosis("GPUs", "limited", "none: criteria that need one are BLOCKED, not counted")
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Diagnosis(
            f"GPU {index}", "ok", f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        )


def _cores() -> Diagnosis:
    from autograder.batch.grade_class import default_jobs

    count = num_cores()
    most = max(get_lab(name).grading_world_size for name in lab_names())
    jobs = default_jobs(most)
    return Diagnosis("cores", "ok", f"{count}: {jobs} submissions at once, of {most} ranks at most")


def _shared_memory() -> Diagnosis:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Diagnosis("/dev/shm", "limited", "not there: DataLoader's workers and NCCL need it")
    free = shutil.disk_usage(folder).free
    if free < MIN_SHM_BYTES:
        mend = "for a container: --shm-size=1g"
        return Diagnosis("/dev/shm", "limited", f"{free / (1 << 20):.0f} MiB free", mend)
    return Diagnosis("/dev/shm", "ok", f"{free / GIB:.1f} GiB free")


def _key(course: Course) -> Diagnosis:
    try:
        course.key()
    except CourseError as error:
        return Diagnosis("course key", "missing", str(error).split(":")[0], "autograder init")
    return Diagnosis("course key", "ok", str(course.key_path))


def _privacy(course: Course) -> Diagnosis:
    if open_ := course.readable_by_others():
        names = ", ".join(open_)
        mend = "chmod -R go-rwx them; students get what `autograder release` writes"
        return Diagnosis("privacy", "limited", f"others on this machine can read {names}", mend)
    return Diagnosis("privacy", "ok", "answers and grades are for this user only")


def _labs(course: Course) -> Iterator[Diagnosis]:
    lacking = []
    for name in lab_names():
        try:
            course.master(name)
        except CourseError:
            lacking.append(name)
    if lacking:
        yield Diagnosis("labs", "limited", f"not released: {', '.join(lacking)}", "make build")
    else:
        yield Diagnosis("labs", "ok", ", ".join(lab_names()))


def _disk(course: Course) -> Iterator[Diagnosis]:
    place = course.build if course.build.is_dir() else course.root
    free = shutil.disk_usage(place).free
    enough = free >= MIN_FREE_BYTES
    yield Diagnosis(
        "disk",
        "ok" if enough else "limited",
        f"{free / GIB:.1f} GiB free at {place}",
        "" if enough else "a class leaves its notebooks and feedback there",
    )
    if not os.access(place, os.W_OK):
        yield Diagnosis(
            "disk",
            "missing",
            f"{place} cannot be written to",
            "change its owner; in an image (autograder/box/image), bind a folder of yours over "
            "build/",
        )
    kind = _file_system(place)
    if kind in NETWORK_FILE_SYSTEMS:
        yield Diagnosis(
            "gradebook",
            "limited",
            f"{place} is on {kind}, which SQLite's locks do not trust",
            "keep the course on a disk of this machine while it grades",
        )


def _file_system(place: Path) -> str:
    """Type of the file system that holds a path, from /proc/mounts; "" if unknown."""
    try:
        lines = Path("/proc/mounts").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if place.resolve().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def _cluster() -> Diagnosis:
    if shutil.which("sbatch") is None:
        text = "no sbatch: --executor slurm is not possible from this machine"
        return Diagnosis("Slurm", "limited", text)
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%R"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SLURM_WITHIN_S,
            check=False,
        )
        said, ok = done.stdout if done.returncode == 0 else done.stderr, done.returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        said, ok = str(error), False
    if not ok:
        reason = (said.strip().splitlines() or ["sinfo failed"])[-1]
        mend = "ask who runs the cluster; SLURM_CONF names its configuration"
        return Diagnosis("Slurm", "limited", f"sbatch is here, but sinfo fails: {reason}", mend)
    partitions = ", ".join(dict.fromkeys(said.split())) or "none"
    return Diagnosis("Slurm", "ok", f"grade --executor slurm; partitions: {partitions}")
