"""One submission's box: what student code can see, use and reach while it is graded.

`build_box` returns the start of a command line. A program that is appended to it runs with its own
users, processes, network (only ``lo``), hostname and IPC, under a filter of system calls
(`syscalls`). Its file system is read-only and made of an allow-list of mounts. The program can
write only to /tmp and /dev/shm, whose sizes are limited:

    box = build_box(run_dir=run_dir, withheld=("minidist.parallel",), limits=Limits())
    process = subprocess.Popen([*box.prefix, sys.executable, "script.py"], env=box.env)

Four rules for the caller:

- Pass ``env=box.env``. The other processes of the box can read the environment that its first
  process was started with, so clearing variables later would not help.
- Start the box from a thread that outlives the box: the kernel ends the box when the *thread* that
  started it ends.
- To end the box, kill the started process. Its pid namespace ends with it, and so does everything
  that was forked or daemonised inside.
- Use pipes or /dev/null as standard streams, never a file that student code must not read: student
  code can reopen every file that a process has open.

Not in the box: the course's solutions, tests, keys and gradebook, the trusted part of this
package, and the modules of minidist that a lab withholds. They are absent, not protected.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import minidist
from autograder.box import apptainer, bubblewrap, containers
from autograder.box.apptainer import ApptainerMounts
from autograder.box.bubblewrap import Mounts
from autograder.box.containers import Container, ContainerMounts
from autograder.box.environment import environment, limit_command
from autograder.box.syscalls import can_filter, filter_command, start_command, write_filter
from autograder.criteria.limits import Limits

_PACKAGE = Path(__file__).parents[1]
# The parts of this package that a box shows, because they run beside student code. All other parts
# are trusted and absent. "py" is py.typed.
_OURS = "criteria/*/ours.py"  # see `Criterion.stand_ins`
_SHOWN_IN_BOX = frozenset({"__init__", "py", "inside", "criteria"})
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")
# In nbgrader's older versions, the exchange folder, with everybody's submissions, is below /usr.
_HIDDEN = ("/usr/local/share/nbgrader",)
# If the grader is root, only one rule of the kernel keeps student code from replacing bwrap: nobody
# can write to a running program. Kernels 6.11 and 6.12 lacked this rule for a while.
_PROBE = """
import minidist
try:
    open("/proc/1/exe", "r+b")
except OSError:
    pass
else:
    raise SystemExit("bwrap itself can be written to from inside (Linux 6.11 or 6.12 as root)")
"""
DEVICES = Path("/dev")
SANDBOXES = ("bwrap", "podman", "docker", "apptainer")  # tried in this order


@dataclass(frozen=True)
class Support:
    """Whether this machine can sandbox.

    Attributes:
        program: bwrap or a container engine.
        reason: what is used; or, if the sandbox does not work, why not and what to do.
    """

    program: str | None
    works: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Box:
    """How to start a program in the box: ``Popen([*prefix, program, …], env=env)``.

    Attributes:
        prefix: start of the command line; empty without a sandbox.
        env: the whole environment, an allow-list.
        cwd: working folder as the program sees it; the prefix changes to it. Without a sandbox,
            the caller must set it (``Popen(…, cwd=cwd)``).
        sandboxed: whether the box restricts the program; False without a sandbox.
        container: the container to end too; None if everything ends with the started process.
        sizes: in-memory folders that only `guard` bounds -> allowed bytes.
    """

    prefix: list[str] = field(default_factory=list)
    env: dict[str, str]
    cwd: str
    sandboxed: bool
    container: Container | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)


@functools.cache
def probe_support() -> Support:
    """Starts Python in a real box once and reports whether that works on this machine (cached).

    Tries bubblewrap first, then the container engines. $AUTOGRADER_SANDBOX chooses a single one
    (bwrap, podman, docker, apptainer).
    """
    if sys.platform != "linux":
        return Support(None, False, f"the sandbox needs Linux, this is {platform.system()}")
    chosen = os.environ.get("AUTOGRADER_SANDBOX")
    if chosen and chosen not in SANDBOXES:
        expected = f"expected one of {', '.join(SANDBOXES)}"
        return Support(None, False, f"AUTOGRADER_SANDBOX: {expected}, got {chosen!r}")
    tried = []
    for name in (chosen,) if chosen else SANDBOXES:
        program = shutil.which(name)
        if program is not None:
            tried.append(_probe(program))
        elif name in (chosen, "bwrap"):
            hint = ": apt-get install bubblewrap" if name == "bwrap" else ""
            tried.append(Support(None, False, f"{name} is not installed{hint}"))
        if tried[-1].works:
            return tried[-1]
    return replace(tried[0], reason="; ".join(each.reason for each in tried))


def _probe(program: str) -> Support:
    name = Path(program).name
    try:
        with tempfile.TemporaryDirectory(prefix="md-probe-", dir="/tmp") as folder:
            box = _assemble(program, Path(folder), (), Limits(), {}, ())
            try:
                done = subprocess.run(
                    [*box.prefix, sys.executable, "-c", _PROBE],
                    env=box.env,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=60,
                )
            finally:
                if box.container is not None:
                    box.container.remove()
    except subprocess.CalledProcessError as error:
        return Support(program, False, f"{name} does not work: {_said(error)}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return Support(program, False, f"{name} could not be tried: {error}")
    said = _said(done)
    without = "" if can_filter() else ", without a filter of system calls"
    if name != "bwrap":
        works = done.returncode == 0
        how = f"works: a container per submission{without}" if works else f"does not work: {said}"
        return Support(program, works, f"{program if works else name} {how}")
    if done.returncode == 0:
        if not bubblewrap.disables_userns(program):
            without += ", without --disable-userns (needs bwrap 0.8)"
        return Support(program, True, f"{program} works{without}")
    hint = "Python or the package is not readable in the box"
    if said.startswith("bwrap:"):
        hint = "user namespaces are not allowed here"
        if Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").exists():
            hint += " (sysctl kernel.apparmor_restrict_unprivileged_userns=0 allows them)"
    return Support(program, False, f"{hint}: {said}")


def _said(
    ended: subprocess.CompletedProcess[bytes] | subprocess.CalledProcessError,
) -> str:
    """The last line that a program wrote to stderr, else its exit status."""
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else f"exit status {ended.returncode}"


def build_box(
    *,
    run_dir: Path,
    withheld: Collection[str] = (),
    limits: Limits | None = None,
    env_extra: Mapping[str, str] | None = None,
    hide: Sequence[Path] = (),
) -> Box:
    """A sandboxed box.

    Args:
        run_dir: existing folder outside the box; the box shows it read-only at the same path, so
            that programs in the box can connect to its sockets. It also holds a few files of the
            box's /etc.
        withheld: modules of minidist that must not exist inside, such as ``"minidist.parallel"``;
            names of modules that do not exist are allowed.
        limits: see `Limits`; `guard` enforces the limits on the box as a whole.
        env_extra: added to the environment inside.
        hide: further files and folders that must not be visible even if they lie below a mount.

    Raises:
        RuntimeError: no sandbox on this machine (`probe_support` says why).
        ValueError: `run_dir` is not an absolute existing folder, or a withheld name is not of the
            form ``minidist.module``.
    """
    support = probe_support()
    if support.program is None or not support.works:
        raise RuntimeError(f"no sandbox on this machine: {support.reason}")
    limits = limits or Limits()
    return _assemble(support.program, run_dir, withheld, limits, env_extra or {}, hide)


def build_open(*, run_dir: Path, env_extra: Mapping[str, str] | None = None) -> Box:
    """A box without a sandbox: working folder and home are in `run_dir`, nothing is restricted."""
    _check_run_dir(run_dir)
    work, home = run_dir / "work", run_dir / "home"
    for folder in (work, home):
        folder.mkdir(mode=0o700, exist_ok=True)
    tmp = os.environ.get("TMPDIR", "/tmp")
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    env = environment(str(home), tmp, path) | dict(env_extra or {})
    return Box(env=env, cwd=str(work), sandboxed=False)


def _assemble(
    program: str,
    run_dir: Path,
    withheld: Collection[str],
    limits: Limits,
    env_extra: Mapping[str, str],
    hide: Sequence[Path],
) -> Box:
    _check_run_dir(run_dir)
    own = run_dir / ".box"
    own.mkdir(mode=0o700, exist_ok=True)
    name = Path(program).name
    if name == "bwrap":
        mounts = Mounts()
    else:
        mounts = ApptainerMounts(own) if name == "apptainer" else ContainerMounts(own)
    _mount_system(mounts, limits, _write_etc(own))
    for prefix in _python_prefixes():
        mounts.bind(prefix)
    mounts.package(Path(minidist.__file__).parent, _hidden_names(withheld))
    mounts.package(_PACKAGE, _trusted_names())
    mounts.bind(run_dir)
    for path in (*map(Path, _HIDDEN), *hide):
        mounts.hide(path)
    home, work = "/tmp/home", "/tmp/work"
    for folder in (home, work):
        mounts.folder(folder)
    mounts.seal()
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    env = environment(home, "/tmp", path) | dict(env_extra)
    container, sizes, with_gpu = None, {}, bool(_cuda_devices())
    seccomp = write_filter(own, with_gpu=with_gpu)
    if isinstance(mounts, ApptainerMounts):
        prefix, sizes = apptainer.command(program, mounts, env), mounts.sizes
        prefix = [*start_command(), *prefix, *filter_command(seccomp)]
    elif isinstance(mounts, ContainerMounts):
        prefix, container = containers.command(program, mounts, own, limits, env)
        prefix += filter_command(seccomp)
    else:
        prefix = [*start_command(seccomp), *bubblewrap.command(program, mounts, env, work)]
    prefix += limit_command(limits, with_gpu=with_gpu)
    return Box(prefix=prefix, env=env, cwd=work, sandboxed=True, container=container, sizes=sizes)


def _mount_system(mounts: Mounts | ContainerMounts, limits: Limits, etc: Path) -> None:
    """Mounts /usr and links into it, some files of /etc, /proc, devices and scratch folders."""
    mounts.bind(Path("/usr"))
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        root = Path("/", name)
        if root.is_symlink():
            mounts.symlink(os.readlink(root), str(root))
        elif root.is_dir():
            mounts.bind(root)
    for name in _ETC:
        mounts.bind(Path("/etc", name))
    for own in sorted(etc.iterdir()):
        mounts.bind(Path("/etc", own.name), own)
    mounts.kernel()
    devices = _cuda_devices()
    for device in devices:
        mounts.device(device)
    # torch reads the processors' layout, and warns on stderr without it; CUDA reads the buses.
    for readable in (
        ("/sys",) if devices else ("/sys/devices/system/cpu", "/sys/devices/system/node")
    ):
        mounts.bind(Path(readable))
    mounts.scratch("/dev/shm", limits.shm_bytes)
    mounts.scratch("/tmp", limits.tmp_bytes)
    mounts.symlink("/tmp", "/var/tmp")


def _write_etc(own: Path) -> Path:
    """The box's own small /etc files: a hostname that resolves, and one user and group only."""
    etc = own / "etc"
    etc.mkdir(mode=0o700, exist_ok=True)
    files = {
        "hosts": "127.0.0.1 localhost box\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "passwd": "student:x:1000:1000:student:/tmp/home:/bin/sh\n",
        "group": "student:x:1000:\n",
    }
    for name, text in files.items():
        (etc / name).write_text(text)
    return etc


def _python_prefixes() -> list[Path]:
    """Folders of the interpreter and its packages, including those of links to the interpreter."""
    found: list[Path] = [Path(sys.base_prefix), Path(sys.prefix)]
    link = Path(sys.executable)
    while link.is_symlink():  # a version manager may put several links before the binary
        link = Path(os.path.normpath(link.parent / os.readlink(link)))
        found.append(link.parent.parent)
    found += [path.resolve() for path in found]
    project = _PACKAGE.parent
    prefixes: list[Path] = []
    for path in found:
        if path in map(Path, ("/", "/usr")):
            continue
        if project.is_relative_to(path) and project.name != "site-packages":
            # The environment lies in the project's own folder: do not show solutions and tests.
            names = ("bin", "lib", "lib64", "share", "pyvenv.cfg")
            prefixes += [path / name for name in names if (path / name).exists()]
        else:
            prefixes.append(path)
    return list(dict.fromkeys(prefixes))


def _hidden_names(withheld: Collection[str]) -> set[tuple[str, ...]]:
    names = {tuple(name.split(".")) for name in withheld}
    for parts in names:
        if len(parts) < 2 or parts[0] != "minidist" or not all(map(str.isidentifier, parts)):
            raise ValueError(f"withheld: expected 'minidist.module', got {'.'.join(parts)!r}")
    return {parts[1:] for parts in names}


def _trusted_names() -> set[tuple[str, ...]]:
    # Includes compiled files of modules that no longer exist.
    children = (*_PACKAGE.iterdir(), *_PACKAGE.glob("__pycache__/*"))
    stems = {child.name.partition(".")[0] for child in children}
    ours = {path.relative_to(_PACKAGE).with_suffix("").parts for path in _PACKAGE.glob(_OURS)}
    return {(stem,) for stem in stems - _SHOWN_IN_BOX - {"__pycache__", ""}} | ours


@functools.cache
def _cuda_devices() -> tuple[Path, ...]:
    """NVIDIA devices that this process may open; only the job's with Slurm's ConstrainDevices."""
    return tuple(sorted(p for p in DEVICES.glob("nvidia*") if p.is_dir() or _can_open(p)))


def _can_open(device: Path) -> bool:
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno not in (errno.EPERM, errno.EACCES)
    return True


def _check_run_dir(run_dir: Path) -> None:
    if not run_dir.is_absolute() or not run_dir.is_dir() or run_dir.is_symlink():
        raise ValueError(
            f"run_dir: expected an existing folder by its absolute path, got {run_dir}"
        )
