"""A thread that answers whatever check is open with guesses, as fast as it can.

passes: nothing
"""

# %% put="before setup"
import threading
import time

import autograder.inside.probe as probe
from autograder.criteria import get_lab
from autograder.inside.messages import Message, receive, send

names = [criterion.name for criterion in get_lab("lab1_ddp").criteria]
lock = threading.Lock()


def guess():
    ends_at = time.monotonic() + 40.0
    while time.monotonic() < ends_at:
        for name in names:
            values = {"done": True, "rank": 0, "world_size": 3, "answers": [True] * 20}
            told = {"criterion": name, "status": "ok", "values": values}
            with lock, contextlib.suppress(Exception):
                for message in (Message("ask", {"criterion": name}), Message("answer", told)):
                    send(probe._channels.check, message)
                    receive(probe._channels.check)
        time.sleep(0.01)


threading.Thread(target=guess, daemon=True).start()
