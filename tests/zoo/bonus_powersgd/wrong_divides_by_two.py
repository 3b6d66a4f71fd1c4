"""Divides the sum by two, which was right at home.

loses: powersgd_mean
"""


# %% replaces="task2_packed_mean"
def packed_mean(tensors):
    if not tensors:
        return []
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    parts = (flat / 2).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]
