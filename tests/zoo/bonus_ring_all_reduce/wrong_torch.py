"""Calls torch's own all-reduce.

loses: ring_bytes, ring_neighbours, ring_messages, ring_time
misses: a-ring
because: without sends there are no bytes, neighbours, chunks or seconds of a ring
"""


# %% replaces="task4_all_reduce"
def ring_all_reduce(tensor, op="sum"):
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
    if op == "mean":
        tensor /= dist.get_world_size()
    return tensor
