"""Kills every process that it may: its parent, the launcher, the other ranks.

base: reference
passes: everything
ci: yes
"""

# %% put="first"
import os
import signal

os.kill(os.getppid(), signal.SIGKILL)
os.kill(-1, signal.SIGKILL)
