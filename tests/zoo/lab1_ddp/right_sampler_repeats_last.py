"""Pads by repeating the last sample, as often as it takes; drops the first ones of the order; deals
from the last rank to the first, so that the last ranks have one more with "uneven".

loses: nothing
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
        rest = self.num_samples % self.world_size
        if rest and self.tail == "drop":
            order = order[rest:]
        if rest and self.tail == "pad":
            order += order[-1:] * (self.world_size - rest)
        return order[self.world_size - 1 - self.rank :: self.world_size]
