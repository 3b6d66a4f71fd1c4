"""Takes the mean of the squares over ranks, as if shares were gradients.

loses: zero_norm
"""


# %% replaces="task3_clip"
def clip_by_global_norm(gradients, max_norm):
    total = torch.zeros((), dtype=torch.float32, device=DEVICE)
    for gradient in gradients:
        total += gradient.square().sum()
    dist.all_reduce(total)
    total /= dist.get_world_size()
    norm = math.sqrt(total.item())
    if norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / norm
    return norm
