"""Reads the clock into float32, which has no milliseconds left after some weeks.

loses: prof_overhead
says: prof_overhead float32 has no milliseconds
"""


# %% replaces="task6_overhead"
def communication_overhead(
    step: Callable[[], object],
    step_alone: Callable[[], object],
    synchronize: Callable[[], None],
    device: torch.device,
    rounds: int = 11,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    shares = []
    for _ in range(rounds):
        times = []
        for run in (step, step_alone):
            synchronize()
            start = torch.tensor(clock(), dtype=torch.float32)
            run()
            synchronize()
            times.append((torch.tensor(clock(), dtype=torch.float32) - start).item())
        both = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        whole, alone = both.tolist()
        shares.append(1 - alone / whole)
    return statistics.median(shares)
