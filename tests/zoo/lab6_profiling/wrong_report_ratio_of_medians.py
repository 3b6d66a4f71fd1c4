"""Efficiency from the medians of all rounds, not from ratios within a round.

loses: prof_report
"""


# %% replaces="task6_report"
def scaling_report(log):
    rates = {}
    for line in log:
        rate = line["ranks"] * line["batch_per_rank"] / line["seconds"]
        rates.setdefault(line["ranks"], []).append(rate)
    base = min(rates)
    alone = statistics.median(rates[base]) / base
    return {
        n: {
            "samples_per_s": (min(each), statistics.median(each), max(each)),
            "efficiency": tuple(
                rate / n / alone for rate in (min(each), statistics.median(each), max(each))
            ),
        }
        for n, each in rates.items()
    }
