"""Everybody sends to rank 0, which adds up and sends the result to everybody.

loses: ring_bytes, ring_neighbours, ring_messages, ring_time
misses: a-ring
because: a star breaks all that makes a ring: whole tensors, to everybody, over one link
says: ring_neighbours this rank sent to ranks 1, 2, 3, expected rank 1 only
"""


# %% replaces="task4_all_reduce"
def ring_all_reduce(tensor, op="sum"):
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = tensor.view(-1)
    if rank:
        dist.send(flat, 0)
        dist.recv(flat, 0)
        return tensor
    for other in range(1, n):
        arrived = torch.empty_like(flat)
        dist.recv(arrived, other)
        flat.copy_(torch.maximum(flat, arrived) if op == "max" else flat + arrived)
    if op == "mean":
        flat /= n
    for other in range(1, n):
        dist.send(flat, other)
    return tensor
