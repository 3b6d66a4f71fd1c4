"""What a launcher inherits from the front, described, so that a fork of another process has it too.

A warm parent was started elsewhere: its forks take over what can be taken over (environment,
working directory, limits, cores) and refuse where it cannot be done, and then the launcher starts
cold.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

# The launcher sets these itself; a warm parent has imported torch with one thread.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Read once, when Python starts or when torch, numpy or IPython are imported: these must be alike.
_READ_ONCE = (
    "PYTHON", "LD_", "GLIBC_", "MALLOC_", "LANG", "LC_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NVPL_", "DNNL_", "ONEDNN_",
    "TORCH", "PYTORCH_", "ATEN_", "C10_", "FX_", "KINETO_", "COMPILE_", "TRITON_", "LOGLEVEL",
    "NUMPY_", "NPY_", "IPYTHON_", "TRAITLETS_", "TORNADO_", "PYZMQ_", "PYDEVD_", "DEBUGPY_",
    # A batch system looks after the processes that its own job has started.
    "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID",
)  # fmt: skip
# sys.path itself is compared.
_READ_LATER = {"PYTHONPATH", "PYTORCH_NVML_BASED_CUDA_CHECK", *THREADS}
_RIGHTS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_RIGHTS += ("NoNewPrivs", "Seccomp", "Umask")
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def describe(environment: dict[str, str] | None = None, cwd: str | None = None) -> dict[str, Any]:
    """What a process that this one started would inherit; JSON."""
    environment = dict(os.environ) if environment is None else environment
    cwd = os.getcwd() if cwd is None else os.path.abspath(cwd)
    first = [] if sys.flags.safe_path else [cwd]  # as `python -m` puts it
    status = _status()
    return {
        "environment": environment,
        "cwd": cwd,
        "python": [os.path.realpath(sys.executable), sys.prefix, sys.version, list(sys.flags)],
        "options": [sys.warnoptions, dict(sys._xoptions)],
        "executable": sys.executable,
        "path": first + sys.path[len(first) :],
        "rights": {name: status.get(name) for name in _RIGHTS if name != "Umask"},
        "umask": int(status.get("Umask", "022"), 8),
        "namespaces": _namespaces(),
        "cgroup": _read("/proc/self/cgroup"),
        "limits": {str(which): list(resource.getrlimit(which)) for which in set(_LIMITS)},
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": os.sched_getscheduler(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "oom": _read("/proc/self/oom_score_adj").strip(),
    }


def difference(mine: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What a fork of `mine` cannot become, in a few words; empty where it can."""
    for key, words in (
        ("python", "another Python"),
        ("options", "other options of Python"),
        ("rights", "another user, group or set of rights"),
        ("namespaces", "other namespaces, such as a container's"),
        ("scheduler", "another scheduling policy"),
    ):
        if mine[key] != wanted[key]:
            return words
    ours, theirs = mine["environment"], wanted["environment"]
    for name in sorted({*ours, *theirs}):
        read_once = name.startswith(_READ_ONCE) and name not in _READ_LATER
        if read_once and ours.get(name) != theirs.get(name):
            return f"another {name}"
    for name in THREADS:
        if not theirs.get(name, "1").isdecimal() or int(theirs.get(name, "1")) < 1:
            return f"{name} is not a number of threads"
    return _other_modules(mine["path"][_first(mine) :], wanted["path"])


def _first(described: dict[str, Any]) -> int:
    return 1 if described["path"][:1] == [described["cwd"]] else 0


def _other_modules(ours: list[str], theirs: list[str]) -> str:
    """Why imports with the path `theirs` would have found something else; empty if they would not.

    What `ours` has must come in the same order; what comes in between must not hide what is loaded.
    """
    rest = iter(theirs)
    if not all(entry in rest for entry in ours):
        return "another sys.path"
    loaded = {name.partition(".")[0] for name in sys.modules} | {"sitecustomize", "usercustomize"}
    loaded.discard("__main__")  # a program, which nobody imports by this name
    for folder in dict.fromkeys(entry for entry in theirs if entry not in ours):
        if os.path.isfile(folder):
            return f"{folder} in sys.path"
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                name, _, end = entry.name.partition(".")
                if name in loaded and (
                    end in ("py", "pyc")
                    or end.endswith("so")
                    or os.path.exists(f"{entry.path}/__init__.py")
                ):
                    return f"{entry.path} hides the module {name}"
    return ""


def take_over(wanted: dict[str, Any], added: dict[str, str]) -> None:
    """Become what `wanted` describes; `added` is what imports have set in the environment.

    Raises:
        OSError, ValueError: this process may not.
    """
    if wanted["cgroup"] != _read("/proc/self/cgroup"):
        _enter_cgroup(wanted["cgroup"])
    if wanted["oom"] != _read("/proc/self/oom_score_adj").strip():
        Path("/proc/self/oom_score_adj").write_text(wanted["oom"])
    if set(wanted["cores"]) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, wanted["cores"])
    if wanted["niceness"] != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, wanted["niceness"])
    for name, (soft, hard) in wanted["limits"].items():
        if resource.getrlimit(int(name)) != (soft, hard):
            resource.setrlimit(int(name), (soft, hard))
    os.umask(wanted["umask"])
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update({**added, **wanted["environment"]})
    time.tzset()
    sys.executable = wanted["executable"]
    sys.path[:] = wanted["path"]
    importlib.invalidate_caches()


def _enter_cgroup(text: str) -> None:
    """Move to the front's control group, which is its terminal's or session's, say."""
    number, _, group = text.strip().partition("::")
    if number != "0" or "\n" in group:
        raise ValueError("another control group")
    Path(f"/sys/fs/cgroup{group}/cgroup.procs").write_text("0")


def _status() -> dict[str, str]:
    lines = _read("/proc/self/status").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in pairs}


def _namespaces() -> dict[str, str]:
    found = {}
    for name in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"):
        with contextlib.suppress(OSError):
            found[name] = os.readlink(f"/proc/self/ns/{name}")
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
