"""Divides the tensor's size by the time, whatever the collective.

loses: link_bus
"""


# %% replaces="task6_link"
def measure_link(
    exchange: Callable[[int], object],
    sizes: list[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
    warmup: int = 2,
    repeats: int = 5,
) -> tuple[float, float]:
    """(latency_s, bandwidth_bytes_per_s) of what `exchange` sends over."""
    medians = []
    for num_bytes in sizes:
        for _ in range(warmup):
            exchange(num_bytes)
        seconds = []
        for _ in range(repeats):
            began = clock()
            exchange(num_bytes)
            seconds.append(clock() - began)
        medians.append(statistics.median(seconds))
    line = statistics.linear_regression(sizes, medians)
    return line.intercept, 1 / line.slope


def bus_bandwidth(kind: str, num_bytes: int, seconds: float, num_ranks: int) -> float:
    """What every link carried during a collective, in Gbit/s."""
    return num_bytes * 8 / seconds / 1e9
