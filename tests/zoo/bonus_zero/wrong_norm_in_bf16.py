"""Sends the sum of squares in bfloat16.

loses: zero_norm, zero_norm_cost
because: the norm is wrong, and what travels is not a number in float32.
"""


# %% replaces="task3_clip"
def clip_by_global_norm(gradients, max_norm):
    total = torch.zeros((), dtype=torch.float32, device=DEVICE)
    for gradient in gradients:
        total += gradient.square().sum()
    total = total.bfloat16()
    dist.all_reduce(total)
    norm = math.sqrt(total.item())
    if norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / norm
    return norm
