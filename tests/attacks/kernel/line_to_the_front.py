"""Tells the front over the companion's line that other ranks have ended, and floods it.

base: reference
passes: everything
"""

# %% put="first"
import gc
import os

from minidist.kernel.link import Link

for _link in [thing for thing in gc.get_objects() if isinstance(thing, Link)]:
    for _pid in range(2, 60):
        _link.send({"exit": _pid, "code": 0, "generation": 0})
    _link.send({"init_error": "nothing is wrong"})
    _link.send({"id": 1, "stopped": True})
    _link._socket.sendall(b"{" * 300_000 + b"\n")
