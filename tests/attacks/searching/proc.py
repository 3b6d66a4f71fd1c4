"""Reads environment, command line and memory of every process that /proc shows.

passes: nothing
"""

# %% put="after imports"
import re

mark = b"can" + b"ary-"
for entry in os.listdir("/proc"):
    if not entry.isdigit():
        continue
    for name in ("environ", "cmdline"):
        with contextlib.suppress(OSError):
            if mark in open(f"/proc/{entry}/{name}", "rb").read():
                print("LEAKED:", entry, name)
    with contextlib.suppress(OSError, ValueError):
        maps = open(f"/proc/{entry}/maps").read()
        memory = open(f"/proc/{entry}/mem", "rb", buffering=0)
        for low, high in re.findall(r"(?m)^(\w+)-(\w+) rw.*\[heap\]", maps):
            memory.seek(int(low, 16))
            if re.search(mark + b"[0-9a-f]{8}", memory.read(int(high, 16) - int(low, 16))):
                print("LEAKED: memory of", entry)
