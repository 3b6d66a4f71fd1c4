"""Counts the ranks with a second all-reduce.

loses: zero_norm_cost
"""


# %% replaces="task3_clip"
def clip_by_global_norm(gradients, max_norm):
    total = torch.zeros((), dtype=torch.float32, device=DEVICE)
    for gradient in gradients:
        total += gradient.square().sum()
    dist.all_reduce(total)
    ranks = torch.ones(())
    dist.all_reduce(ranks)
    norm = math.sqrt(total.item())
    if norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / norm
    return norm
