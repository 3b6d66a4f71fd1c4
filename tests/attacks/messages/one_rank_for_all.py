"""Rank 0 takes the other ranks' places and answers for all of them, without their inputs.

That one rank may speak for another is known (ranks of one submission are one principal); to know
what the answer is, it would have to compute it.

passes: nothing
status: setup WRONG
"""

# %% put="before setup"
import socket
import time

import autograder.inside.probe as probe
from autograder.inside.messages import Message, receive, send

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank:
    probe._channels.check.close()
time.sleep(1.0)


def check(name, subject=None):
    if rank:
        return
    for other in range(world_size):
        sock = probe._channels.check
        if other:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(20.0)
            sock.connect(os.environ["MINIDIST_REFEREE"])
            send(sock, Message("hello", {"rank": other, "channel": "check"}))
            receive(sock)
        send(sock, Message("ask", {"criterion": name}))
        receive(sock)
        fields = {"rank": other, "world_size": world_size, "device": "cpu", "backend": "gloo"}
        fields |= {"same_group": True, "left": True, "done": True}
        told = {"criterion": name, "status": "ok", "values": fields}
        send(sock, Message("answer", told, {"sum": np.zeros(5)}))
        receive(sock)
        if other:
            sock.close()
            time.sleep(0.1)
