"""Connects anew and announces headers and arrays of many gigabytes, or of nothing.

base: reference
passes: everything
"""

# %% put="before setup"
import socket
import struct

for _head, _body in ((2**32 - 1, 0), (10, 2**63), (2**20, 2**27), (0, 0), (2**20 + 1, 1)):
    with socket.socket(socket.AF_UNIX) as _sock, contextlib.suppress(OSError):
        _sock.settimeout(2.0)
        _sock.connect(os.environ["MINIDIST_REFEREE"])
        _sock.sendall(struct.pack("!4sIQ", b"AGW1", _head, _body) + b"{" * 1000)
