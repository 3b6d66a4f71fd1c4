"""Pads and drops a whole round where the size divides.

loses: sampler_partition
"""


# %% replaces="task3_sampler"
class ShardSampler(Sampler[int]):
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
        order = list(range(self.num_samples))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        rounds = self.num_samples // self.world_size
        if self.tail == "drop":
            order = order[: rounds * self.world_size]
        if self.tail == "pad":
            while len(order) < (rounds + 1) * self.world_size:
                order += order
            order = order[: (rounds + 1) * self.world_size]
        return order[self.rank :: self.world_size]
