"""Fills memory that belongs to no process: System V segments, and files that are on their way.

base: reference
passes: everything
"""

# %% put="after imports"
import array
import ctypes
import socket

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
made = 0
for _ in range(4):
    segment = libc.shmget(0, 64 << 20, 0o1600)
    if segment >= 0:
        address = libc.shmat(segment, None, 0)
        ctypes.memset(address, 1, 64 << 20)
        libc.shmdt(ctypes.c_void_p(address))
        made += 1
with contextlib.suppress(OSError, AttributeError):
    kept = socket.socketpair()
    file = os.memfd_create("on its way")
    os.truncate(file, 64 << 20)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
    kept[0].sendmsg([b"x"], rights)
    os.close(file)
    made += 1
if made:
    print("LEAKED: memory that is nobody's:", made)
