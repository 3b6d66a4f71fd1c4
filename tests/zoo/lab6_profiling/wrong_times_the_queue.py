"""Times how long it takes to queue a step.

loses: prof_loader_wait
"""


# %% replaces="task4_wait"
def loader_wait(loader, step, synchronize, clock=time.perf_counter):
    waits, works = [], []
    asked = clock()
    for batch in loader:
        came = clock()
        step(batch)
        waits.append(came - asked)
        works.append(clock() - came)
        synchronize()
        asked = clock()
    return statistics.fmean(waits[1:]), statistics.fmean(works[1:])
