"""Right, but cells of its own leave behind what ends ranks later: threads, a timer, callbacks.

When a rank ends is a matter of luck, so each of them waits for a random time.

base: reference
passes: everything
"""

# %% put="after imports"
import random
import signal
import threading

luck = random.SystemRandom()
threading.Timer(luck.uniform(0.0, 3.0), os._exit, [0]).start()

# %% put="after helpers"
signal.setitimer(signal.ITIMER_REAL, luck.uniform(0.1, 3.0))

# %% put="after task1_setup"
import asyncio

handle = asyncio.get_event_loop().call_later(luck.uniform(0.1, 2.0), sys.exit)

# %% put="after task3_sampler"
late = threading.Thread(target=lambda: (time.sleep(luck.uniform(0.0, 2.0)), os.abort()))
late.daemon = True
late.start()

# %% put="after task4_train"
import atexit

atexit.register(os._exit, 3)
