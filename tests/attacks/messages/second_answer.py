"""Answers a check twice, wrong and then right: the first answer is the one that counts.

base: reference
passes: everything but setup
status: setup WRONG
"""

# %% put="before setup"
import autograder.inside.probe as probe
from autograder.inside.messages import Message

_real_tell = probe._tell


def _twice(channels, answer, deadline_s):
    if answer.fields.get("criterion") == "setup":
        _real_tell(channels, Message("answer", answer.fields, {"sum": np.zeros(5)}), deadline_s)
    return _real_tell(channels, answer, deadline_s)


probe._tell = _twice
