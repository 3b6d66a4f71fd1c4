"""Divides by 3, the number of ranks on the student's own desk.

loses: ring_ops
says: ring_ops LOCAL_WORLD_SIZE taken for WORLD_SIZE?
"""


# %% replaces="task4_all_reduce"
def ring_all_reduce(tensor, op="sum"):
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = tensor.view(-1)
    chunks = [flat[begin:end] for begin, end in chunk_bounds(flat.numel(), n)]
    for step, (sent, received) in enumerate(ring_steps(rank, n)):
        arrived = torch.empty_like(chunks[received])
        exchange(chunks[sent], arrived)
        if step >= n - 1:
            chunks[received].copy_(arrived)
        elif op == "max":
            chunks[received].copy_(torch.maximum(chunks[received], arrived))
        else:
            chunks[received].add_(arrived)
    if op == "mean":
        flat.div_(3)
    return tensor
