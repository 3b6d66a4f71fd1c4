"""Asks for a socket to the host of a virtual machine, which no network of the box's own holds back.

base: reference
passes: everything
"""

# %% put="after imports"
import socket

with contextlib.suppress(OSError):
    host = socket.socket(40, socket.SOCK_STREAM)  # AF_VSOCK
    print("LEAKED: a socket to the host:", host)
