"""A daemon, forked twice and in a session of its own, that outlives the cell and the ranks.

passes: nothing
ci: yes
"""

# %% put="after imports"
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            with contextlib.suppress(OSError):
                open("/dev/shm/still-here", "w").write(str(time.time()))
            time.sleep(0.5)
    os._exit(0)
