"""The filter of system calls: what it says of each, and that it is in force."""

from __future__ import annotations

import errno
import platform
import signal
import socket
import struct
import subprocess
import sys

import pytest

from autograder.box.syscalls import DENIED, filter_command, seccomp_filter, write_filter

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386 = 0x40000003
ALLOWED = 0x7FFF0000
# read, mmap, clone, socket
FINE = {"x86_64": (0, 9, 56, 41), "aarch64": (63, 222, 220, 198)}
NEW_USER, NEW_NET, THREAD = 0x10000000, 0x40000000, 0x3D0F00


def judge(program: bytes, number: int, arch: int, argument: int = 0) -> int:
    """Runs the filter as the kernel does; 0 if it allows the call, else the error."""
    data = struct.pack("<IIQ6Q", number, arch, 0, argument, 0, 0, 0, 0, 0)
    steps = list(struct.iter_unpack("HBBI", program))
    place = value = 0
    while True:
        code, if_true, if_false, operand = steps[place]
        place += 1
        if code == 0x20:
            value = struct.unpack_from("<I", data, operand)[0]
        elif code in (0x15, 0x35, 0x45):
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: value & operand}
            place += if_true if holds[code] else if_false
        else:
            assert code == 0x06
            return 0 if operand == ALLOWED else operand & 0xFFFF


@pytest.mark.parametrize("machine", ARCH)
def test_what_is_denied_is_absent_and_the_rest_is_as_it_was(machine):
    column, arch, program = list(ARCH).index(machine), ARCH[machine], seccomp_filter(machine)
    for numbers in DENIED.values():
        assert judge(program, numbers[column], arch) == errno.ENOSYS
    for number in FINE[machine]:
        assert judge(program, number, arch, socket.AF_INET) == 0
    calls = (n for n in range(1024) if judge(program, n, arch, socket.AF_UNIX))
    assert sorted(calls) == sorted(numbers[column] for numbers in DENIED.values())


@pytest.mark.parametrize("machine", ARCH)
def test_no_other_set_of_numbers_leads_around_it(machine):
    program = seccomp_filter(machine)
    assert {judge(program, n, I386) for n in range(512)} == {errno.ENOSYS}
    if machine == "x86_64":
        assert {judge(program, 0x40000000 | n, ARCH[machine]) for n in (0, 29, 41)} == {
            errno.ENOSYS
        }


@pytest.mark.parametrize("machine", ARCH)
def test_sockets_are_those_of_the_own_network(machine):
    program, number = seccomp_filter(machine), FINE[machine][3]
    families = [f for f in range(50) if judge(program, number, ARCH[machine], f) == 0]
    assert families == sorted([socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK])
    # The kernel looks at the lower half of the argument only.
    assert judge(program, number, ARCH[machine], 1 << 32 | 40) == errno.EAFNOSUPPORT


@pytest.mark.parametrize("machine", ARCH)
def test_pairs_of_sockets_are_no_way_around(machine):
    program, number = seccomp_filter(machine), {"x86_64": 53, "aarch64": 199}[machine]
    assert judge(program, number, ARCH[machine], socket.AF_UNIX) == 0
    assert judge(program, number, ARCH[machine], 30) == errno.EAFNOSUPPORT  # AF_TIPC


@pytest.mark.parametrize("machine", ARCH)
def test_processes_and_threads_are_made_but_no_namespaces(machine):
    program, number = seccomp_filter(machine), FINE[machine][2]
    for fine in (signal.SIGCHLD, THREAD):
        assert judge(program, number, ARCH[machine], fine) == 0
        for flag in (NEW_USER, NEW_NET):
            assert judge(program, number, ARCH[machine], fine | flag) == errno.ENOSYS


def test_with_a_gpu_cuda_may_share_memory():
    arch, numbers = ARCH["x86_64"], {name: n for name, (n, _) in DENIED.items()}
    program = seccomp_filter("x86_64", with_gpu=True)
    assert [n for n in numbers if not judge(program, numbers[n], arch)] == ["memfd_create"]


@pytest.mark.skipif(platform.machine() not in ARCH, reason="a machine whose numbers are unknown")
def test_a_program_can_take_it_upon_itself(tmp_path):
    path = write_filter(tmp_path, with_gpu=False)
    assert path is not None
    code = "import os; print(os.getpid() > 0); os.memfd_create('x')"
    done = subprocess.run(
        [*filter_command(path), sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "True\n"
    assert f"OSError: [Errno {errno.ENOSYS}]" in done.stderr
