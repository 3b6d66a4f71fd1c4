"""Always cuts the dataset down to a multiple of the number of ranks, whatever `tail` says.

loses: sampler_tail
"""


# %% replaces="task3_sampler"
class ShardSampler(Sampler):
    def __init__(self, num_samples, rank, world_size, *, shuffle=True, seed=0, tail="pad"):
        self.num_samples, self.rank, self.world_size = num_samples, rank, world_size
        self.shuffle, self.seed, self.tail = shuffle, seed, tail
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.indices())

    def __iter__(self):
        return iter(self.indices())

    def indices(self):
        if self.shuffle:
            generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        else:
            order = list(range(self.num_samples))
        order = order[: len(order) // self.world_size * self.world_size]
        return order[self.rank :: self.world_size]
