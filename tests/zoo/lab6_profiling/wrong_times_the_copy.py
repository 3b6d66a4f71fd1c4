"""Starts the clock when the batch is there, as a snippet does that goes around: so it times
everything but loading.

loses: prof_loader_wait
"""


# %% replaces="task4_wait"
def loader_wait(loader, step, synchronize, clock=time.perf_counter):
    waits, works = [], []
    asked = clock()
    for batch in loader:
        asked = came = clock()
        step(batch)
        synchronize()
        waits.append(came - asked)
        works.append(clock() - came)
        asked = clock()
    return statistics.fmean(waits[1:]), statistics.fmean(works[1:])
