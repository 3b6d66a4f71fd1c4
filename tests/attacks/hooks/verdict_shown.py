"""Has the probe believe that the referee had answered with a passed verdict.

passes: nothing
"""

# %% put="after imports"
import autograder.inside.probe as probe
from autograder.inside.messages import Message

fields = {"status": "PASS", "points": 5, "max_points": 5, "name": "x", "title": "x", "so_far": "x"}
probe._talk = lambda *_: Message("verdict", fields)
probe.describe_error = lambda error: ""
