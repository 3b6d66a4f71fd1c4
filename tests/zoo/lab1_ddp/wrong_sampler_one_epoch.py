"""Shuffles by the seed alone: every epoch has the same order.

loses: sampler_epoch
"""


# %% replaces="task3_sampler"
class ShardSampler(Sampler[int]):
    def __init__(self, num_samples, rank, world_size, *, shuffle=True, seed=0, tail="pad"):
        order = torch.arange(num_samples)
        if shuffle:
            order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
        order = order.tolist()
        short = -num_samples % world_size
        if tail == "drop":
            order = order[: num_samples - num_samples % world_size]
        elif tail == "pad":
            order += [order[i % num_samples] for i in range(short)]
        self.mine = order[rank::world_size]

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.mine)

    def __iter__(self):
        return iter(self.mine)
