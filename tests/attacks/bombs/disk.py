"""Fills /tmp, in one file and in many, and a file with holes that is larger than any disk.

passes: nothing
ci: yes
"""

# %% put="after imports"
import signal

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
written = 0
with contextlib.suppress(OSError):
    for number in range(20):
        with open(f"/tmp/fill-{os.environ['RANK']}-{number}", "wb", buffering=0) as file:
            for _ in range(64):
                written += file.write(bytes(1 << 20))
if written > 600 << 20:
    print("LEAKED:", written)
try:
    os.truncate("/tmp/fill-0-0", 1 << 45)
    print("LEAKED: a sparse file of 32 TiB")
except OSError:
    pass
