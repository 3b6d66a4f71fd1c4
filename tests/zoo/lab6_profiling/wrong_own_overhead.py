"""Reports what this rank sees: each rank another number, and none that of the slowest.

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

    rows = [(seconds(step), seconds(step_alone)) for _ in range(rounds)]
    return statistics.median(1 - alone / both for both, alone in rows)
