"""Does not believe in an efficiency above 1.

loses: prof_scaling
says: prof_scaling It can be more than that
"""


# %% replaces="task6_scaling"
def scaling(step_s: dict[int, float], mode: str) -> dict[int, tuple[float, float]]:
    base = min(step_s)
    result = {}
    for n, seconds in step_s.items():
        efficiency = step_s[base] / seconds
        if mode == "strong":
            efficiency *= base / n
        efficiency = min(1.0, efficiency)
        result[n] = (n * efficiency, efficiency)
    return result
