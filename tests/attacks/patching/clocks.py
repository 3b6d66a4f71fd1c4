"""Stops the clocks of the rank, which would make any measured time as short as one likes.

passes: nothing
"""

# %% put="after imports"
import time

time.time = time.perf_counter = time.process_time = lambda: 0.0
time.time_ns = time.perf_counter_ns = lambda: 0
time.sleep = lambda _: None
