"""Measures all steps of one kind and then all of the other, on a machine that slows down
meanwhile.

loses: prof_overhead
"""


# %% replaces="task6_overhead"
def communication_overhead(
    step, step_alone, synchronize, device, rounds=11, clock=time.perf_counter
):
    def seconds(run):
        synchronize()
        begin = clock()
        run()
        synchronize()
        return clock() - begin

    both = [statistics.median(seconds(run) for _ in range(rounds)) for run in (step, step_alone)]
    slowest = torch.tensor(both, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return 1 - slowest[1].item() / slowest[0].item()
