"""Writes the ring without the plan; the mean is divided in the chunk that a rank finishes.

loses: nothing
class: example
"""


# %% replaces="task4_all_reduce"
def ring_all_reduce(tensor, op="sum"):
    rank, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return tensor
    flat = tensor.reshape(-1)
    bounds = [round(i * flat.numel() / n) for i in range(n + 1)]
    piece = {c: flat[bounds[c] : bounds[c + 1]] for c in range(n)}
    for step in range(n - 1):
        target = piece[(rank - step - 1) % n]
        got = target.clone()
        exchange(piece[(rank - step) % n], got)
        target.copy_(torch.maximum(target, got) if op == "max" else target + got)
    if op == "mean":
        piece[(rank + 1) % n].mul_(1 / n)
    for step in range(n - 1):
        exchange(piece[(rank + 1 - step) % n], piece[(rank - step) % n])
    return tensor


# %% replaces="task5_seconds"
def ring_seconds(num_bytes, world_size, latency_s, bandwidth):
    steps = 2 * world_size - 2
    return steps * latency_s + steps * (num_bytes / bandwidth) / world_size


def tree_seconds(num_bytes, world_size, latency_s, bandwidth):
    depth = (world_size - 1).bit_length()
    return 2 * depth * latency_s + 2 * depth * num_bytes / bandwidth


def choose(num_bytes, world_size, latency_s, bandwidth):
    times = {
        "ring": ring_seconds(num_bytes, world_size, latency_s, bandwidth),
        "tree": tree_seconds(num_bytes, world_size, latency_s, bandwidth),
    }
    return min(times, key=times.get)  # the first, if both take equally long


def bus_bandwidth(num_bytes, world_size, seconds):
    return num_bytes / seconds * 2 * (1 - 1 / world_size)


# %% replaces="task6_hook"
def ring_hook(state, bucket):
    tensor = bucket.buffer()
    ring_all_reduce(tensor, "sum")
    done = torch.futures.Future()
    done.set_result(tensor / dist.get_world_size())
    return done
