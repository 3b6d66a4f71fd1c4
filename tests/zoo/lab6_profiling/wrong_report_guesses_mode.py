"""Guesses weak or strong from the batches, and takes the formulas of `scaling`.

In strong scaling the real batches of a batch that does not divide are left out.

loses: prof_report
"""


# %% replaces="task6_report"
def scaling_report(log: list[dict]) -> dict[int, dict[str, tuple[float, float, float]]]:
    """Number of ranks -> samples per second and efficiency, with their spread over rounds."""
    strong = len({line["batch_per_rank"] for line in log}) > 1
    rates: dict[int, list[float]] = {}
    times: dict[int, dict[int, float]] = {}  # ranks -> round -> seconds
    for line in log:
        n = line["ranks"]
        rates.setdefault(n, []).append(n * line["batch_per_rank"] / line["seconds"])
        times.setdefault(n, {})[line["round"]] = line["seconds"]
    base = min(rates)
    report = {}
    for n, rate in rates.items():
        shares = []
        for number, seconds in times[n].items():
            if number in times[base]:
                share = times[base][number] / seconds
                shares.append(share * base / n if strong else share)
        report[n] = {
            name: (min(values), statistics.median(values), max(values))
            for name, values in (("samples_per_s", rate), ("efficiency", shares))
        }
    return report
