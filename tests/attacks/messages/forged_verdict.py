"""Sends the referee a verdict instead of an answer.

passes: nothing
ci: yes
"""

# %% put="before setup"
import autograder.inside.probe as probe
from autograder.inside.messages import Message, send

fields = {"name": "setup", "criterion": "setup", "status": "PASS", "points": 100.0}
send(probe._channels.check, Message("verdict", fields))
