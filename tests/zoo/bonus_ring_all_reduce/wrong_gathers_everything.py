"""Collects everybody's tensor and adds up.

loses: ring_bytes, ring_neighbours, ring_messages, ring_time
misses: a-ring
class: example
because: without sends there are no bytes, neighbours, chunks or seconds of a ring
"""


# %% replaces="task4_all_reduce"
def ring_all_reduce(tensor, op="sum"):
    n = dist.get_world_size()
    everyone = [torch.empty_like(tensor) for _ in range(n)]
    dist.all_gather(everyone, tensor.contiguous())
    stack = torch.stack(everyone)
    result = stack.amax(0) if op == "max" else stack.sum(0)
    tensor.copy_(result / n if op == "mean" else result)
    return tensor
