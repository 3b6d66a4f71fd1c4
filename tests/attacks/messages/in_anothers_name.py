"""Says hello as every other rank, while those are connected.

base: reference
passes: everything
"""

# %% put="before setup"
import socket

from autograder.inside.messages import Message, receive, send

for _rank in [*range(int(os.environ["WORLD_SIZE"])), 99, -1]:
    for _channel in ("check", "broker"):
        with socket.socket(socket.AF_UNIX) as _sock:
            _sock.settimeout(20.0)
            _sock.connect(os.environ["MINIDIST_REFEREE"])
            send(_sock, Message("hello", {"rank": _rank, "channel": _channel}))
            if receive(_sock).kind == "welcome":
                print("LEAKED: welcomed as rank", _rank)
