"""One number travels, and it says nothing of the shares; the norm is this rank's own.

loses: zero_norm, zero_norm_cost
because: the norm is wrong, and the number that travels does not carry it.
"""


# %% replaces="task3_clip"
def clip_by_global_norm(gradients, max_norm):
    dist.all_reduce(torch.ones(()))
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
    if norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / norm
    return norm
