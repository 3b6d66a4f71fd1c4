"""Lets the first batch, which starts the workers, count like all others.

loses: prof_loader_wait
"""


# %% replaces="task4_wait"
def loader_wait(loader, step, synchronize, clock=time.perf_counter):
    waits, works = [], []
    asked = clock()
    for batch in loader:
        came = clock()
        step(batch)
        synchronize()
        waits.append(came - asked)
        works.append(clock() - came)
        asked = clock()
    return statistics.fmean(waits), statistics.fmean(works)
