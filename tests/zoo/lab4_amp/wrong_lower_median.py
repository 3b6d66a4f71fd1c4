"""Of an even number of times takes the lower of the two in the middle.

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
    seconds = []
    for _ in range(repeats):
        synchronize()
        start = clock()
        step()
        synchronize()
        seconds.append(clock() - start)
    median = torch.tensor(seconds, dtype=torch.float64).median().item()
    slowest = torch.tensor([median], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()
