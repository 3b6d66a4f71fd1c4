"""Everybody gets everybody's tensors, and averages them.

loses: powersgd_bytes
"""


# %% replaces="task2_packed_mean"
def packed_mean(tensors):
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    everyones = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, flat)
    mean = torch.stack(everyones).mean(dim=0)
    parts = mean.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors)]
