"""Starts a send and a receive by themselves and waits for both; two phases in two functions.

loses: nothing
class: example
"""


# %% replaces="task3_exchange"
def exchange(outgoing, incoming):
    n = dist.get_world_size()
    if n == 1:
        incoming.copy_(outgoing)
        return
    rank = dist.get_rank()
    handles = [dist.irecv(incoming, (rank - 1) % n), dist.isend(outgoing, (rank + 1) % n)]
    for handle in handles:
        handle.wait()


# %% replaces="task4_all_reduce"
def parts_of(tensor):
    return [tensor.view(-1)[b:e] for b, e in chunk_bounds(tensor.numel(), dist.get_world_size())]


def reduce_scatter(parts, combine):
    rank, n = dist.get_rank(), dist.get_world_size()
    for sent, received in ring_steps(rank, n)[: n - 1]:
        arrived = torch.zeros_like(parts[received])
        exchange(parts[sent].contiguous(), arrived)
        combine(parts[received], arrived)


def all_gather(parts):
    rank, n = dist.get_rank(), dist.get_world_size()
    for sent, received in ring_steps(rank, n)[n - 1 :]:
        exchange(parts[sent], parts[received])


def ring_all_reduce(tensor, op="sum"):
    parts = parts_of(tensor)
    if op == "max":
        reduce_scatter(parts, lambda own, other: own.copy_(torch.max(own, other)))
    else:
        reduce_scatter(parts, lambda own, other: own.__iadd__(other))
    all_gather(parts)
    if op == "mean":
        tensor /= dist.get_world_size()
    return tensor
