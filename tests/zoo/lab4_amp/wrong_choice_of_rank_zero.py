"""All take what rank 0 would choose for itself.

loses: amp_choice
"""


# %% replaces="task6_choice"
def choose_precision(
    has_bf16: bool, has_fp16: bool, largest: float, device: torch.device
) -> tuple[torch.dtype | None, bool]:
    """(dtype for autocast or None, whether it needs a loss scaler), alike on all ranks."""
    facts = torch.tensor(
        [float(not has_bf16), float(not has_fp16), largest], dtype=torch.float64, device=device
    )
    dist.broadcast(facts, src=0)
    one_lacks_bf16, one_lacks_fp16, largest = facts.tolist()
    if not one_lacks_bf16:
        return torch.bfloat16, False
    if not one_lacks_fp16 and largest <= torch.finfo(torch.float16).max / 2:
        return torch.float16, True
    return None, False
