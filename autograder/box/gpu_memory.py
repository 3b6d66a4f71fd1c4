"""How much GPU memory each process holds, as the driver counts it from outside the box."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

from autograder.criteria.limits import MIB

_WITHIN_S = 10.0
Reader = Callable[[], dict[int, int]]


def find_reader() -> Reader | None:
    """A function that returns the bytes that each pid holds; None if there is no driver.

    The function starts `nvidia-smi`, which takes tens of milliseconds. It raises OSError or
    subprocess.SubprocessError if `nvidia-smi` fails.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    fields = "--query-compute-apps=pid,used_gpu_memory"
    command = [program, fields, "--format=csv,noheader,nounits"]

    def read() -> dict[int, int]:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=True,
        )
        return parse(done.stdout)

    try:
        read()
    except subprocess.TimeoutExpired:  # the machine is busy
        return read
    except (OSError, subprocess.SubprocessError):  # nvidia-smi is installed, but no driver
        return None
    return read


def parse(text: str) -> dict[int, int]:
    """Bytes by pid from lines ``pid, MiB``, one for each GPU that a process uses.

    >>> parse("4021, 514\\n4022, 1030\\n4021, 2\\n4023, [N/A]\\n")
    {4021: 541065216, 4022: 1080033280}
    """
    used: dict[int, int] = {}
    for line in text.splitlines():
        pid, _, number = (part.strip() for part in line.partition(","))
        if pid.isdecimal() and number.isdecimal():  # some drivers say "[N/A]", e.g. in a container
            used[int(pid)] = used.get(int(pid), 0) + int(number) * MIB
    return used
