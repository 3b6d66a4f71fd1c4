"""Starts threads without end: more of them than a submission may have end its ranks.

passes: nothing
"""

# %% put="after imports"
import threading

event = threading.Event()
threading.stack_size(65536)
with contextlib.suppress(RuntimeError):
    while True:
        threading.Thread(target=event.wait, daemon=True).start()
event.set()
