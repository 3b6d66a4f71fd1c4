"""Waits in milliseconds.

loses: prof_loader_wait
"""


# %% replaces="task4_wait"
def loader_wait(
    loader: Iterable,
    step: Callable[[object], object],
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Mean seconds per batch of (waiting for it, working on it), without the first batch."""
    waits, works = [], []
    asked = clock()
    for batch in loader:
        came = clock()
        step(batch)
        synchronize()
        done = clock()
        waits.append(came - asked)
        works.append(done - came)
        asked = done
    return 1e3 * statistics.fmean(waits[1:]), 1e3 * statistics.fmean(works[1:])
