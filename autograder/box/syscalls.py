"""The filter of system calls in a box, and the command that starts a box.

The filter denies two kinds of calls: those whose memory `guard` cannot count from outside, and
those of parts of the Linux kernel that no training needs but that programs have used to escape from
sandboxes. A denied call fails with ENOSYS, as on a kernel that was built without this call, so
that libraries use a different way if they have one. Sockets are limited to families that the box's
own network confines; a socket to the host of a virtual machine, for example, would lead out.

The filter is a program of classic BPF for seccomp(2).
"""

from __future__ import annotations

import errno
import platform
import struct
import sys
from pathlib import Path

_MACHINES = ("x86_64", "aarch64")
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_* of linux/audit.h
# Name -> the call's number on each of the machines above.
_UNCOUNTED = {  # calls that allocate memory which belongs to no process
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
}
_KERNEL = {
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
# In a new user namespace a program has capabilities again, over memory that nobody counts.
_NAMESPACES = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "clone3": (435, 435),  # a filter cannot read its flags; libraries call clone instead
}
DENIED = _UNCOUNTED | _KERNEL | _NAMESPACES
_FOR_A_GPU = frozenset({"memfd_create"})  # CUDA shares memory with it; `guard` counts most of it

_CLONE, _NEW_NAMESPACES = (56, 220), 0x7E020000  # CLONE_NEW* of linux/sched.h
_SOCKET, _SOCKETPAIR = (41, 198), (53, 199)
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6; AF_NETLINK lists networks

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of linux/bpf_common.h
_NUMBER_AT, _ARCH_AT, _ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data; both are little-endian
_STEP = "HBBI"
_ERRNO = 0x00050000
_ENDS = {
    "allow": 0x7FFF0000,
    "absent": _ERRNO | errno.ENOSYS,
    "family": _ERRNO | errno.EAFNOSUPPORT,
}
_X32 = 0x40000000  # a second set of numbers for the same calls, on x86_64
_JOIN_SESSION_KEYRING = 1
_SET_SECCOMP, _SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2  # of linux/prctl.h and linux/seccomp.h


def seccomp_filter(machine: str, *, with_gpu: bool = False) -> bytes:
    """The filter as ``struct sock_filter[]``, for ``bwrap --seccomp``.

    Args:
        machine: name from `platform.machine`; one of `_MACHINES`, whose call numbers are known.
    """
    column = _MACHINES.index(machine)
    denied = [DENIED[name][column] for name in DENIED if not (with_gpu and name in _FOR_A_GPU)]
    # (operation, value, steps to skip if true, steps to skip if false); a name is a key of `_ENDS`.
    steps: list[tuple[int, int, str | int, str | int]] = [
        (_LOAD, _ARCH_AT, 0, 0),
        (_EQUAL, _ARCH[machine], 0, "absent"),
        (_LOAD, _NUMBER_AT, 0, 0),
    ]
    if machine == "x86_64":
        steps.append((_AT_LEAST, _X32, "absent", 0))
    steps += [(_EQUAL, number, "absent", 0) for number in denied]
    steps += [
        (_EQUAL, _CLONE[column], 0, 2),
        (_LOAD, _ARGUMENT_AT, 0, 0),
        (_ANY_BIT, _NEW_NAMESPACES, "absent", "allow"),
        (_EQUAL, _SOCKET[column], 1, 0),
        (_EQUAL, _SOCKETPAIR[column], 0, "allow"),
        (_LOAD, _ARGUMENT_AT, 0, 0),
        *((_EQUAL, family, "allow", 0) for family in _FAMILIES[:-1]),
        (_EQUAL, _FAMILIES[-1], "allow", "family"),
    ]
    ends = {name: len(steps) + index for index, name in enumerate(_ENDS)}
    program = b""
    for place, (operation, value, *where) in enumerate(steps):
        skips = (to if isinstance(to, int) else ends[to] - place - 1 for to in where)
        program += struct.pack(_STEP, operation, *skips, value)
    return program + b"".join(struct.pack(_STEP, _RETURN, 0, 0, end) for end in _ENDS.values())


def write_filter(folder: Path, *, with_gpu: bool) -> Path | None:
    """Writes this machine's filter to a file in `folder`; None if this machine cannot filter."""
    if not can_filter():
        return None
    path = folder / "seccomp"
    path.write_bytes(seccomp_filter(platform.machine(), with_gpu=with_gpu))
    return path


def can_filter() -> bool:
    """Whether this machine's call numbers are known and its kernel supports filters."""
    try:
        return (
            platform.machine() in _MACHINES
            and "\nSeccomp:" in Path("/proc/self/status").read_text()
        )
    except OSError:
        return False


def start_command(filter_file: Path | None = None) -> list[str]:
    """Start of a command line for the program that makes a box: new session keyring, and a filter.

    The program also gets the highest OOM score: if the machine runs out of memory, the kernel kills
    the box's processes first, and not the grader.

    Without a new keyring, all boxes would share the grader's login keyring, which outlives them.
    A submission could leave something there for the next one, and perhaps find the grader's keys.

    Args:
        filter_file: passed to the program as an open file, by its first option ``--seccomp FD``.
    """
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return []
    number = DENIED["keyctl"][_MACHINES.index(platform.machine())]
    # If the kernel has no keyrings, or the quota is used up, the box is started without a new one.
    lines = [
        "import ctypes, os, sys",
        f"ctypes.CDLL(None).syscall({number}, {_JOIN_SESSION_KEYRING}, None)",
        "try:",
        "    open('/proc/self/oom_score_adj', 'w').write('1000')",
        "except OSError: pass",
        "_, program, *options = sys.argv",
    ]
    if filter_file is not None:
        lines += [
            f"file = os.open({str(filter_file)!r}, os.O_RDONLY)",
            "os.set_inheritable(file, True)",
            "options[:0] = ['--seccomp', str(file)]",
        ]
    lines.append("os.execvp(program, [program, *options])")
    return [sys.executable, "-I", "-S", "-c", "\n".join(lines)]


def filter_command(filter_file: Path | None) -> list[str]:
    """Start of a command line that, inside the box, adds the filter to the engine's own filter.

    The box must show the file at the same path as outside. Bubblewrap does not use this command:
    its first process stays in the box and must be under the filter too, so `start_command` passes
    the filter to bubblewrap.
    """
    if filter_file is None:
        return []
    lines = [
        "import ctypes, os, sys",
        f"steps = open({str(filter_file)!r}, 'rb').read()",
        # struct sock_fprog with the machine's alignment
        "Program = type('Program', (ctypes.Structure,), {'_fields_': "
        "[('len', ctypes.c_ushort), ('filter', ctypes.c_char_p)]})",
        "prctl = ctypes.CDLL(None, use_errno=True).prctl",
        f"program = Program(len(steps) // {struct.calcsize(_STEP)}, steps)",
        f"prctl({_SET_NO_NEW_PRIVS}, 1, 0, 0, 0) == 0 == "
        f"prctl({_SET_SECCOMP}, {_FILTER}, ctypes.byref(program), 0, 0) "
        "or sys.exit(f'no filter of system calls: {os.strerror(ctypes.get_errno())}')",
        "os.execvp(sys.argv[1], sys.argv[1:])",
    ]
    return [sys.executable, "-I", "-S", "-c", "; ".join(lines)]
