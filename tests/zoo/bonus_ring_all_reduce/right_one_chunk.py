"""One buffer for all that comes in, in both halves; begins two chunks before its own.

A thread reduces one bucket after the other: the hook's future is finished later.

loses: nothing
"""


# %% replaces="task2_steps"
def ring_steps(rank, world_size):
    walk = [(rank - 2 - step) % world_size for step in range(2 * world_size - 1)]
    return list(pairwise(walk))


# %% replaces="task4_all_reduce"
def ring_all_reduce(tensor, op="sum"):
    n, flat = dist.get_world_size(), tensor.view(-1)
    bounds = chunk_bounds(flat.numel(), n)
    spare = torch.empty(max(e - b for b, e in bounds), dtype=flat.dtype, device=flat.device)
    for step, (sent, received) in enumerate(ring_steps(dist.get_rank(), n)):
        (a, b), (c, d) = bounds[sent], bounds[received]
        exchange(flat[a:b], spare[: d - c])
        if step >= n - 1:
            flat[c:d] = spare[: d - c]
        elif op == "max":
            torch.max(flat[c:d], spare[: d - c], out=flat[c:d])
        else:
            flat[c:d] += spare[: d - c]
    if op == "mean":
        flat *= 1 / n
    return tensor


# %% replaces="task6_hook"
from concurrent.futures import ThreadPoolExecutor

WORKER = ThreadPoolExecutor(max_workers=1)


def ring_hook(state, bucket):
    tensor, future = bucket.buffer(), torch.futures.Future()

    def work():
        try:
            future.set_result(ring_all_reduce(tensor, "mean"))
        except Exception as error:
            future.set_exception(error)

    WORKER.submit(work)
    return future
