"""Divides by the seconds of rank 0.

loses: fsdp_throughput
"""


# %% replaces="task7_throughput"
def throughput(
    step: Callable[[], object],
    num_samples: int,
    synchronize: Callable[[], None],
    device: torch.device,
    *,
    warmup: int = 2,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Samples per second of all ranks together."""
    for _ in range(warmup):
        step()
    synchronize()
    begin = clock()
    for _ in range(repeats):
        step()
    synchronize()
    seconds = torch.tensor(clock() - begin, dtype=torch.float64, device=device)
    samples = torch.tensor(num_samples * repeats, dtype=torch.float64, device=device)
    dist.broadcast(seconds, 0)
    dist.all_reduce(samples)
    return (samples / seconds).item()


def scaling_efficiency(alone: float, together: float, world_size: int) -> float:
    """Share of the ideal speed-up that was reached."""
    return together / (world_size * alone)
