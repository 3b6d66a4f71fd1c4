"""Answers every check with nothing but the claim that it has passed.

passes: nothing
status: setup WRONG
status: ddp_scaling WRONG
"""

# %% put="after imports"
import autograder.inside.probe as probe
from autograder.inside.messages import Message


def check(name, subject=None):
    probe._talk(probe._channels, Message("ask", {"criterion": name}), 20.0)
    claim = {"status": "PASS", "verdict": "PASS", "points": 100, "done": True, "answers": True}
    told = {"criterion": name, "status": "ok", "points": 100, "values": claim}
    probe._talk(probe._channels, Message("answer", told), 20.0)
