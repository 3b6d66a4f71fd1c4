"""Simulates 1F1B with a limit, tries every cost, goes back from the end under GPipe.

loses: nothing
class: example
"""


# %% replaces="task1_cut"
def cut_layers(costs, num_stages):
    def fill(limit):
        cuts, now = [0], 0
        for i, cost in enumerate(costs):
            must = len(costs) - i == num_stages - len(cuts)  # a layer for each stage to come
            if i > cuts[-1] and (now + cost > limit or must):
                cuts.append(i)
                now = 0
            now += cost
            if now > limit:
                return None
        return [*cuts, len(costs)] if len(cuts) == num_stages else None

    runs = {sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)}
    for limit in sorted(runs):
        cuts = fill(limit)
        if cuts:
            return list(itertools.pairwise(cuts))
    raise ValueError("fewer layers than stages")


# %% replaces="task2_schedules"
def gpipe(rank, num_stages, num_micro_batches):
    m = num_micro_batches
    return [("forward", i) for i in range(m)] + [("backward", m - 1 - i) for i in range(m)]


def one_f_one_b(rank, num_stages, num_micro_batches):
    room = num_stages - rank
    steps, forwards, backwards = [], 0, 0
    while backwards < num_micro_batches:
        if forwards < num_micro_batches and forwards - backwards < room:
            steps.append(("forward", forwards))
            forwards += 1
        else:
            steps.append(("backward", backwards))
            backwards += 1
    return steps


# %% replaces="task2_kept"
def peak_kept(schedule):
    kept, sizes = set(), [0]
    for what, i in schedule:
        kept ^= {i}
        sizes.append(len(kept))
    return max(sizes)


# %% replaces="task3_bubble"
def bubble_fraction(num_stages, num_micro_batches):
    return 1 - num_micro_batches / (num_micro_batches + num_stages - 1)


def idle_seconds(num_stages, num_micro_batches, forward_s, backward_s):
    step = (num_micro_batches + num_stages - 1) * (forward_s + backward_s)
    return step - num_micro_batches * (forward_s + backward_s)


def micro_batches_for(num_stages, most_bubble):
    m = 1
    while bubble_fraction(num_stages, m) > most_bubble:
        m += 1
    return m


# %% replaces="task6_bytes"
def pipeline_bytes(num_stages, num_micro_batches, activation_bytes):
    neighbours = [(r > 0) + (r < num_stages - 1) for r in range(num_stages)]
    return max(neighbours) * num_micro_batches * activation_bytes


def data_parallel_bytes(num_ranks, parameter_bytes):
    return 2 * (parameter_bytes - parameter_bytes / num_ranks)
