"""Answers a check with a hundred megabytes on every rank.

passes: nothing
status: setup WRONG
"""

# %% put="before setup"
import autograder.inside.probe as probe
from autograder.inside.messages import Message


def check(name, subject=None):
    probe._talk(probe._channels, Message("ask", {"criterion": name}), 20.0)
    arrays = {"sum": np.zeros(12 << 20)} if name == "setup" else {}
    told = {"criterion": name, "status": "ok", "values": {"rank": 0}}
    probe._talk(probe._channels, Message("answer", told, arrays), 30.0)
