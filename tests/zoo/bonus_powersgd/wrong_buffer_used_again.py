"""Keeps one buffer per size: a second call overwrites what the first one returned.

loses: powersgd_mean
says: powersgd_mean That is the mean of a later call
"""

# %% replaces="task2_packed_mean"
BUFFERS = {}


def packed_mean(tensors):
    if not tensors:
        return []
    sizes = [tensor.numel() for tensor in tensors]
    key = sum(sizes), tensors[0].dtype
    flat = BUFFERS.setdefault(key, tensors[0].new_empty(sum(sizes)))
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return [part.view_as(tensor) for part, tensor in zip(flat.split(sizes), tensors)]
