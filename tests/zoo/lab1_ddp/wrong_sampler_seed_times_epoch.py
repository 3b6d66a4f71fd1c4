"""Seeds with seed * epoch: with the default seed 0 every epoch has the same order.

loses: sampler_epoch
"""


# %% replaces="task3_sampler"
class ShardSampler(Sampler[int]):
    def __init__(self, num_samples, rank, world_size, *, shuffle=True, seed=0, tail="pad"):
        self.n, self.rank, self.world_size = num_samples, rank, world_size
        self.shuffle, self.seed, self.tail, self.epoch = shuffle, seed, tail, 0
        self.total = {
            "pad": math.ceil(num_samples / world_size) * world_size,
            "drop": num_samples // world_size * world_size,
            "uneven": num_samples,
        }[tail]

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(range(self.rank, self.total, self.world_size))

    def __iter__(self):
        order = list(range(self.n))
        if self.shuffle:
            g = torch.Generator().manual_seed(self.seed * self.epoch)
            order = torch.randperm(self.n, generator=g).tolist()
        order = (order * math.ceil(self.total / self.n))[: self.total]
        return iter(order[self.rank :: self.world_size])
