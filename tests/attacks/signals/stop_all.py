"""Stops the launcher and the other ranks instead of ending them: they are there and do nothing.

base: reference
passes: everything
"""

# %% put="first"
import os
import signal

if os.environ["RANK"] == "0":
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in (1, os.getpid()):
            os.kill(int(entry), signal.SIGSTOP)
