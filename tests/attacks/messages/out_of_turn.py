"""Asks for checks that are not open and answers some before they are: all of it is refused.

base: reference
passes: everything
"""

# %% put="before setup"
import autograder.inside.probe as probe
from autograder.inside.messages import Message

for _name in ("setup", "ddp_scaling", "no_such_check", "", "sampler_tail"):
    _reply = probe._talk(probe._channels, Message("ask", {"criterion": _name}), 20.0)
    if _reply.kind != "refused" or _reply.arrays:
        print("LEAKED: inputs before the check")
    _told = {"criterion": _name, "status": "ok", "values": {"done": True}}
    probe._talk(probe._channels, Message("answer", _told, {"sum": np.zeros(5)}), 20.0)
