"""Clips by the norm of this rank's own share.

loses: zero_norm, zero_norm_cost
class: example
because: the norm is wrong, and nothing travels.
"""


# %% replaces="task3_clip"
def clip_by_global_norm(gradients, max_norm):
    total = torch.zeros((), dtype=torch.float32, device=DEVICE)
    for gradient in gradients:
        total += gradient.square().sum()
    norm = math.sqrt(total.item())
    if norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / norm
    return norm
