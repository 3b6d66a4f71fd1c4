"""Draws the other ranks' inputs itself, with the public seeds that are used at a student's desk.

passes: nothing
status: setup WRONG
ci: yes
"""

# %% put="before setup"
import hashlib
import hmac

import autograder.inside.probe as probe
from autograder.inside.messages import Message


def seed(key, purpose):
    text = "\0".join(("lab1_ddp", "setup", "practice", os.environ["WORLD_SIZE"], purpose))
    return int.from_bytes(hmac.new(key, text.encode(), hashlib.sha256).digest()[:16], "big")


def total(key):
    generators = (
        np.random.Generator(np.random.PCG64(seed(key, f"rank {r}")))
        for r in range(int(os.environ["WORLD_SIZE"]))
    )
    return sum(g.normal(size=5) for g in generators)


def check(name, subject):
    channel = probe._channels
    probe._talk(channel, Message("ask", {"criterion": name}), 20.0)
    fields = {"rank": channel.rank, "world_size": channel.world_size, "device": "cpu"}
    fields |= {"backend": "gloo", "same_group": True, "left": True}
    told = {"criterion": name, "status": "ok", "values": fields}
    answer = Message("answer", told, {"sum": total(b"practice")})
    probe._talk(channel, answer, 20.0)
    for key in (b"", b"practice", b"0" * 64, b"\0" * 32, b"secret"):
        if np.allclose(total(key), total(b"practice")) and key != b"practice":
            print("LEAKED: a key")


# %% put="after setup"
from autograder import check
