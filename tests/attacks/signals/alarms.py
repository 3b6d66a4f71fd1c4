"""Timers whose signal interrupts whatever is running, the checks included.

passes: nothing
"""

# %% put="after imports"
import signal

signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
