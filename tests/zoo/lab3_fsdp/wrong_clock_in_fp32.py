"""Sends the clock itself, in fp32: a difference of large numbers.

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
    start = clock()
    for _ in range(repeats):
        step()
    synchronize()
    end = clock()
    ends = torch.tensor([start, end], device=device)
    seconds = (ends[1:] - ends[:1]).double()
    samples = torch.tensor([num_samples * repeats], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(samples, op=dist.ReduceOp.SUM)
    return samples.item() / seconds.item()


def scaling_efficiency(alone: float, together: float, world_size: int) -> float:
    """Share of the ideal speed-up that was reached."""
    return together / (alone * world_size)
