"""Seeds torch's global generator in every epoch: from then on all ranks drop out alike.

loses: sampler_epoch
"""


# %% replaces="task3_sampler"
class ShardSampler(Sampler[int]):
    def __init__(self, num_samples, rank, world_size, *, shuffle=True, seed=0, tail="pad"):
        self.num_samples, self.rank, self.world_size = num_samples, rank, world_size
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.total = num_samples
        if tail == "pad":
            self.total = math.ceil(num_samples / world_size) * world_size
        elif tail == "drop":
            self.total = num_samples // world_size * world_size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(range(self.rank, self.total, self.world_size))

    def __iter__(self):
        order = list(range(self.num_samples))
        if self.shuffle:
            torch.default_generator.manual_seed(1000 * self.seed + self.epoch)
            order = torch.randperm(self.num_samples).tolist()
        while len(order) < self.total:
            order += order
        return iter(order[: self.total][self.rank :: self.world_size])
