"""Lists of disjoint intervals, with union, intersection and difference; the settings through a
factory.

loses: nothing
"""


# %% replaces="task2_shares"
def merged(pairs):
    out = []
    for a, b in sorted(pairs):
        if out and a <= out[-1][1]:
            out[-1][1] = max(b, out[-1][1])
        elif a < b:
            out.append([a, b])
    return out


def minus(ones, others):
    for c, d in others:
        cut = []
        for a, b in ones:
            cut += [[a, min(b, c)]] if a < c else []
            cut += [[max(a, d), b]] if b > d else []
        ones = [pair for pair in cut if pair[0] < pair[1]]
    return ones


def of(spans, kind, start, end):
    return merged([max(s.start, start), min(s.end, end)] for s in spans if s.kind == kind)


def size(pairs):
    return math.fsum(b - a for a, b in pairs)


def utilisation(spans, start, end):
    return size(of(spans, "compute", start, end)) / (end - start)


def overlap(spans, start, end):
    network = of(spans, "communication", start, end)
    exposed = minus(network, of(spans, "compute", start, end))
    return 1 - size(exposed) / size(network) if network else 1.0


def breakdown(spans, start, end):
    free, parts = [[start, end]], {}
    for kind in ("compute", "communication", "copy", "loader", "host"):
        left = minus(free, of(spans, kind, start, end))
        parts[kind] = size(free) - size(left)
        free = left
    return {**parts, "idle": size(free)}


# %% replaces="task4_settings"
def loader_settings(load_s, step_s, cores, ranks_per_node, device):
    share, workers = cores // ranks_per_node, 0
    while workers < share and workers * step_s < load_s:
        workers += 1
    settings = {"num_workers": workers, "pin_memory": str(device).startswith("cuda")}
    if workers:
        settings.update(persistent_workers=True, prefetch_factor=2)
    return settings


# %% replaces="task5_predict"
def predict_step(plan, sizes, backward_s, forward_s, all_reduce_s):
    total = forward_s + sum(backward_s)
    ready = [total - sum(backward_s[:i]) for i in range(len(sizes))]
    arrival = 0.0
    for bucket in plan:
        arrival = max([arrival, *(ready[i] for i in bucket)])
        arrival += all_reduce_s(sum(map(sizes.__getitem__, bucket)))
    return max(total, arrival)
