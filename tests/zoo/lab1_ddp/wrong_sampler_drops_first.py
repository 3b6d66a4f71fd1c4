"""Cuts the tail off before it shuffles: the same samples are lost in every epoch.

loses: sampler_tail
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
        size = self.num_samples
        if self.tail == "drop":
            size -= size % self.world_size
        order = list(range(size))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(size, generator=generator).tolist()
        if self.tail == "pad":
            while len(order) % self.world_size:
                order.append(order[len(order) - size])
        return order[self.rank :: self.world_size]
