"""Takes the absolute values in place: the gradients have lost their signs.

loses: amp_safe_scale
"""


# %% replaces="task1_formats"
def lost_share(values: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> float:
    """Share of the non-zero entries of `values` that are 0 as `dtype`, after scaling."""
    ### BEGIN SOLUTION
    alive = values[values != 0]
    if alive.numel() == 0:
        return 0.0
    stored = (alive * scale).to(dtype)
    return (stored == 0).double().mean().item()
    ### END SOLUTION


def safe_scale(gradients: list[torch.Tensor], dtype: torch.dtype) -> float:
    """The largest power of two that takes no entry of any rank out of `dtype`'s range."""
    ### BEGIN SOLUTION
    largest = torch.stack([g.abs_().max() for g in gradients]).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / largest.item()))
    ### END SOLUTION
