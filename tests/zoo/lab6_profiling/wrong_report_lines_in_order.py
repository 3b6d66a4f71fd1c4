"""Pairs the lines of two sizes as they come: their order, and what is missing, mix up the rounds.

loses: prof_report
"""


# %% replaces="task6_report"
def scaling_report(log):
    rates = {}
    for line in log:
        rate = line["ranks"] * line["batch_per_rank"] / line["seconds"]
        rates.setdefault(line["ranks"], []).append(rate)
    base = min(rates)

    def three(values):
        return min(values), statistics.median(values), max(values)

    return {
        n: {
            "samples_per_s": three(each),
            "efficiency": three([a / n / (b / base) for a, b in zip(each, rates[base])]),
        }
        for n, each in rates.items()
    }
