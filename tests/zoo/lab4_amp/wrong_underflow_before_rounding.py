"""Leaves out what the scaled product in fp32 makes 0: it has become 0, too.

loses: amp_lost_share
"""


# %% replaces="task1_formats"
def lost_share(values: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> float:
    """Share of the non-zero entries of `values` that are 0 as `dtype`, after scaling."""
    counts = (scale * values) != 0
    total = counts.sum().item()
    if total == 0:
        return 0.0
    stored = (scale * values).to(dtype)
    lost = ((stored == 0) & counts).sum().item()
    return lost / total


def safe_scale(gradients: list[torch.Tensor], dtype: torch.dtype) -> float:
    """The largest power of two that takes no entry of any rank out of `dtype`'s range."""
    largest = max((g.abs().max().item() for g in gradients if g.numel()), default=0.0)
    device = gradients[0].device if gradients else torch.device("cpu")
    found = torch.tensor([largest], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    exponent = math.floor(math.log2(torch.finfo(dtype).max / found.item()))
    return 2.0**exponent
