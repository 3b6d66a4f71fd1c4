"""Begins with the chunk after its own, divides before it adds, and cuts chunks by hand.

loses: nothing
class: example
"""


# %% replaces="task1_chunks"
def chunk_bounds(numel, num_chunks):
    size, longer = divmod(numel, num_chunks)
    bounds, begin = [], 0
    for c in range(num_chunks):
        end = begin + size + (c < longer)
        bounds.append((begin, end))
        begin = end
    return bounds


# %% replaces="task2_steps"
def ring_steps(rank, world_size):
    steps = []
    held = (rank + 1) % world_size
    for _ in range(2 * (world_size - 1)):
        steps.append((held, (held - 1) % world_size))
        held = (held - 1) % world_size
    return steps


# %% replaces="task4_all_reduce"
def ring_all_reduce(tensor, op="sum"):
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = tensor.view(-1)
    chunks = [flat[begin:end] for begin, end in chunk_bounds(flat.numel(), n)]
    if op == "mean":
        flat.div_(n)
    for step, (sent, received) in enumerate(ring_steps(rank, n)):
        arrived = torch.empty_like(chunks[received])
        exchange(chunks[sent], arrived)
        if step >= n - 1:
            chunks[received].copy_(arrived)
        elif op == "max":
            chunks[received].copy_(torch.maximum(chunks[received], arrived))
        else:
            chunks[received].add_(arrived)
    return tensor
