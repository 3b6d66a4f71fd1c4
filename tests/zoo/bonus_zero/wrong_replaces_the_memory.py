"""unflatten gives parameters new memory: a view of the old one keeps the old numbers.

loses: zero_unflatten
"""


# %% replaces="task1_flat"
def flatten(tensors: list[torch.Tensor], num_parts: int) -> torch.Tensor:
    """All numbers in one vector, padded with zeros so that `num_parts` divides its length."""
    ### BEGIN SOLUTION
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    missing = -sum(part.numel() for part in parts) % num_parts
    return torch.cat([*parts, parts[0].new_zeros(missing)])
    ### END SOLUTION


def unflatten(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copies the numbers of `flat` back into `tensors`."""
    ### BEGIN SOLUTION
    sizes = [tensor.numel() for tensor in tensors]
    with torch.no_grad():
        for tensor, part in zip(tensors, flat[: sum(sizes)].split(sizes), strict=True):
            tensor.data = part.view_as(tensor).clone()
    ### END SOLUTION
