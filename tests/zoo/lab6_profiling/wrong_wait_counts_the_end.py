"""Takes what is not work for waiting, and so counts the time in which the loader ends.

loses: prof_loader_wait
says: prof_loader_wait After the last batch the workers end
"""


# %% replaces="task4_wait"
def loader_wait(
    loader: Iterable,
    step: Callable[[object], object],
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Mean seconds per batch of (waiting for it, working on it), without the first batch."""
    works = []
    begin = None
    for batch in loader:
        came = clock()
        step(batch)
        synchronize()
        done = clock()
        if begin is None:
            begin = done  # the first batch is through: from here on it counts
        else:
            works.append(done - came)
    total = clock() - begin
    working = sum(works)
    return (total - working) / len(works), working / len(works)
