"""Keeps the answer to one check and gives it to others, and to the same one on another rank.

base: reference
passes: everything but sampler_tail, sampler_epoch, train_epochs
"""

# %% put="before setup"
import autograder.inside.probe as probe
from autograder.inside.messages import Message

_real_tell, _kept = probe._tell, {}
_FROM = {
    "sampler_tail": "sampler_partition",
    "sampler_epoch": "sampler_partition",
    "train_epochs": "train_steps",
}


def _replay(channels, answer, deadline_s):
    name = answer.fields["criterion"]
    _kept[name] = answer
    if name in _FROM:
        old = _kept[_FROM[name]]
        answer = Message("answer", old.fields | {"criterion": name}, old.arrays)
    return _real_tell(channels, answer, deadline_s)


probe._tell = _replay
