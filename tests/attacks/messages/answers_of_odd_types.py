"""Answers with nan, text for numbers, deep lists, arrays of odd shapes: may the judge stumble.

passes: nothing
status: setup WRONG
status: train_loss WRONG
status: ddp_gradients WRONG
"""

# %% put="after imports"
import autograder.inside.probe as probe
from autograder.inside.messages import Message

deep = []
for _ in range(90):
    deep = [deep]


def check(name, subject=None):
    probe._talk(probe._channels, Message("ask", {"criterion": name}), 20.0)
    values = {"rank": deep, "world_size": "3", "answers": {"x": deep}, "device": None, "1": 1e308}
    values |= {"same_group": 1, "left": 1, "done": "yes", "moved": {}}
    arrays = {"sum": np.full((5, 0, 3), np.nan), "losses": np.array(True), "output": np.zeros(0)}
    for number in range(40):
        arrays |= {f"g{number}/0": np.full(3, np.inf), f"p{number}": np.zeros((1,) * 8)}
        arrays |= {f"{number}/{r}/0": np.array([-1, 2**62]) for r in range(7)}
        values |= {f"{number}/{r}/len": 2 for r in range(7)}
    told = {"criterion": name, "status": "ok", "values": values}
    probe._talk(probe._channels, Message("answer", told, arrays), 20.0)
