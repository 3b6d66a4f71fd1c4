"""Takes the ring for every size.

loses: ring_choice
"""


# %% replaces="task5_seconds"
def ring_seconds(num_bytes, world_size, latency_s, bandwidth):
    return 2 * (world_size - 1) * (latency_s + num_bytes / world_size / bandwidth)


def tree_seconds(num_bytes, world_size, latency_s, bandwidth):
    return 2 * math.ceil(math.log2(world_size)) * (latency_s + num_bytes / bandwidth)


def choose(num_bytes, world_size, latency_s, bandwidth):
    return "ring"


def bus_bandwidth(num_bytes, world_size, seconds):
    return 2 * (world_size - 1) / world_size * num_bytes / seconds
