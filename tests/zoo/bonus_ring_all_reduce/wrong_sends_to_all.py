"""Reduces each chunk at its owner, and each owner sends it to everybody: few bytes, no ring.

loses: ring_neighbours
"""


# %% replaces="task4_all_reduce"
def ring_all_reduce(tensor, op="sum"):
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = tensor.view(-1)
    parts = [flat[b:e] for b, e in chunk_bounds(flat.numel(), n)]
    for distance in range(1, n):
        to, source = (rank + distance) % n, (rank - distance) % n
        arrived = torch.empty_like(parts[rank])
        handles = [dist.isend(parts[to], to), dist.irecv(arrived, source)]
        for handle in handles:
            handle.wait()
        own = parts[rank]
        own.copy_(torch.maximum(own, arrived) if op == "max" else own + arrived)
    if op == "mean":
        parts[rank] /= n
    for distance in range(1, n):
        to, source = (rank + distance) % n, (rank - distance) % n
        handles = [dist.isend(parts[rank], to), dist.irecv(parts[source], source)]
        for handle in handles:
            handle.wait()
    return tensor
