"""Holds two hundred connections that say nothing, or one byte now and then.

base: reference
passes: everything
"""

# %% put="before setup"
import socket

_held = []
for _number in range(200):
    _sock = socket.socket(socket.AF_UNIX)
    _sock.settimeout(1.0)
    with contextlib.suppress(OSError):
        _sock.connect(os.environ["MINIDIST_REFEREE"])
        if _number % 3 == 0:
            _sock.sendall(b"A")
        _held.append(_sock)
