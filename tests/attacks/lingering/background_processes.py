"""Processes with new sessions, ignored signals and inherited sockets; at exit, one more.

base: reference
passes: everything
"""

# %% put="last"
import atexit
import signal
import subprocess

_quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "close_fds": False}
for _ in range(3):
    subprocess.Popen(
        ["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"],
        start_new_session=True,
        **_quiet,
    )
for _number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(_number, signal.SIG_IGN)
atexit.register(lambda: subprocess.Popen(["sleep", "600"], start_new_session=True))
