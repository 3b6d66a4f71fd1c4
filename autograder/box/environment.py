"""The environment of a program in the box, and the limits of each process."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys

from autograder.criteria.limits import Limits

# Variables of the grader's own environment that may enter the box.
_INHERITED = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "NVIDIA_VISIBLE_DEVICES",
    "TZ",
)


def environment(home: str, tmp: str, path: str) -> dict[str, str]:
    """All environment variables of a program that runs in the box, or without a box."""
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    env.setdefault("LANG", "C.UTF-8")
    env |= {
        "HOME": home,
        "IPYTHONDIR": f"{home}/ipython",
        "JUPYTER_CONFIG_DIR": f"{home}/jupyter/config",
        "JUPYTER_DATA_DIR": f"{home}/jupyter/data",
        "JUPYTER_NO_CONFIG": "1",
        "JUPYTER_RUNTIME_DIR": f"{home}/jupyter/runtime",
        "MPLCONFIGDIR": f"{home}/matplotlib",
        "OMP_NUM_THREADS": "1",
        "PATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "TMPDIR": tmp,
        "USER": "student",
    }
    if sys.platform == "linux":
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return env


def limit_command(limits: Limits, *, with_gpu: bool) -> list[str]:
    """Start of a command line that sets the limits and runs a program.

    It must run inside the box, because the kernel counts NPROC there for the box's processes.
    """
    wanted = {
        "CORE": 0,
        "CPU": limits.cpu_seconds,
        "FSIZE": limits.file_bytes,
        "NOFILE": limits.num_open_files,
    }
    if not with_gpu:
        wanted["DATA"] = limits.memory_bytes
    release = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    if os.getuid() != 0 and release >= (5, 14):
        wanted["NPROC"] = limits.num_processes
    values: dict[str, int] = {}
    for name, value in wanted.items():
        hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
        values[name] = value if hard == resource.RLIM_INFINITY else min(value, hard)
    if shutil.which("prlimit", path="/usr/bin:/bin"):
        options = [f"--{name.lower()}={value}:{value}" for name, value in values.items()]
        return ["prlimit", *options, "--"]
    calls = "".join(
        f"r.setrlimit(r.RLIMIT_{name},({value},{value}));" for name, value in values.items()
    )
    code = f"import os,resource as r,sys;{calls}os.execvp(sys.argv[1],sys.argv[1:])"
    return [sys.executable, "-I", "-S", "-c", code]
