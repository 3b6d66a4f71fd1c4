"""Does not synchronize before it starts the clock.

loses: prof_overhead
says: prof_overhead the device was still busy with what came before
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
            start = clock()
            run()
            synchronize()
            times.append(clock() - start)
        both = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        whole, alone = both.tolist()
        shares.append(1 - alone / whole)
    return statistics.median(shares)
