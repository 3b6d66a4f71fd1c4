"""A loop that ignores the interrupt, and one inside of C that holds the interpreter's lock.

base: reference
passes: everything
"""

# %% put="first"
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    pass

# %% put="after imports"
import re

re.match(r"(a+)+$", "a" * 60 + "b")
