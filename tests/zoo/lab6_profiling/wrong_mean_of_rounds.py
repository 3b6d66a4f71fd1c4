"""The mean over the rounds, which one round that was disturbed spoils.

loses: prof_overhead
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
    """Share of a step that is communication: the median over rounds, of the slowest ranks."""
    ### BEGIN SOLUTION
    shares = []
    for _ in range(rounds):
        seconds = []
        for run in (step, step_alone):
            synchronize()
            begin = clock()
            run()
            synchronize()
            seconds.append(clock() - begin)
        slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        with_s, alone_s = slowest.tolist()
        shares.append(1 - alone_s / with_s)
    return statistics.fmean(shares)
    ### END SOLUTION
