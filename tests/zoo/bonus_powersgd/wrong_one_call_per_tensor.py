"""Every tensor has an all-reduce of its own.

loses: powersgd_mean
class: example
"""


# %% replaces="task2_packed_mean"
def packed_mean(tensors):
    means = [tensor.clone() for tensor in tensors]
    for mean in means:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return means
