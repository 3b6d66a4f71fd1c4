"""Adds up norms over the ranks, not their squares.

loses: zero_norm
"""


# %% replaces="task3_clip"
def clip_by_global_norm(gradients, max_norm):
    total = torch.zeros((), dtype=torch.float32, device=DEVICE)
    for gradient in gradients:
        total += gradient.square().sum()
    total = total.sqrt()
    dist.all_reduce(total)
    norm = total.item()
    if norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / norm
    return norm
