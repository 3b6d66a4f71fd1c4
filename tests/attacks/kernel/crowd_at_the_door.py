"""Opens thousands of connections to the kernel, also to where fresh ranks are about to connect.

What accepts them ends with an error when it can open no more files, so before that the ranks end.

base: reference
passes: everything
ci: yes
"""

# %% put="after task1_setup"
import glob
import socket
import subprocess
import sys
import time

CROWD = r"""
import glob, socket, sys, time
held, ends_at = [], time.time() + 6
while time.time() < ends_at and len(held) < 3900:
    for path in glob.glob(sys.argv[1] + "/*-*-*"):
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(2)
        try:
            line.connect(path)
            held.append(line)
        except OSError:
            line.close()
"""
folder = os.path.dirname(os.environ["MINIDIST_REFEREE"])
if os.environ["RANK"] == "0" and os.environ["MINIDIST_GENERATION"] == "0":
    for _ in range(4):
        command = [sys.executable, "-I", "-S", "-c", CROWD, folder]
        subprocess.Popen(command, start_new_session=True)
    time.sleep(1)
    os._exit(1)
