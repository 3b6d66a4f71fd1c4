"""Fills /dev/shm and leaves segments behind.

passes: nothing
"""

# %% put="after imports"
from multiprocessing import resource_tracker, shared_memory

resource_tracker.register = lambda *_: None
total = 0
with contextlib.suppress(OSError):
    with open(f"/dev/shm/minidist-fill-{os.environ['RANK']}", "wb", buffering=0) as file:
        while total < 700 << 20:
            total += file.write(bytes(1 << 20))
if total > 600 << 20:
    print("LEAKED:", total)
with contextlib.suppress(OSError):
    shared_memory.SharedMemory(name="left_behind", create=True, size=1 << 20)
