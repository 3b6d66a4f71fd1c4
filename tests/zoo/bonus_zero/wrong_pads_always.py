"""Adds a whole row of padding where the number of parts divides already.

loses: zero_flatten
"""


# %% replaces="task1_flat"
def flatten(tensors, num_parts):
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    missing = num_parts - sum(part.numel() for part in parts) % num_parts
    return torch.cat([*parts, parts[0].new_zeros(missing)])


def unflatten(flat, tensors):
    sizes = [tensor.numel() for tensor in tensors]
    with torch.no_grad():
        for tensor, part in zip(tensors, flat[: sum(sizes)].split(sizes), strict=True):
            tensor.copy_(part.view_as(tensor))
