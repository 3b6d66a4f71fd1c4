"""The median of each step's slowest rank, not the slowest rank's median.

loses: amp_timing
"""


# %% replaces="task5_speed"
def time_step(
    step: Callable[[], object],
    synchronize: Callable[[], object],
    device: torch.device,
    *,
    warmup: int = 3,
    repeats: int = 11,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Median seconds of a step, on the slowest rank."""
    for _ in range(warmup):
        step()
    synchronize()  # what the warm-up has queued must not be timed

    seconds = []
    for _ in range(repeats):
        begin = clock()
        step()
        synchronize()
        seconds.append(clock() - begin)

    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.median().item()
