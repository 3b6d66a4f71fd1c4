"""Seeds torch's global generator in set_epoch (and __init__), where the permutation is drawn.

Every rank's dropout starts anew in every epoch, alike on all ranks.

loses: sampler_epoch
says: sampler_epoch __init__, set_epoch or __iter__ moved
"""


# %% replaces="task3_sampler"
class ShardSampler(Sampler[int]):
    def __init__(self, num_samples, rank, world_size, *, shuffle=True, seed=0, tail="pad"):
        self.n, self.rank, self.world_size = num_samples, rank, world_size
        self.shuffle, self.seed, self.tail = shuffle, seed, tail
        self.total = {
            "pad": math.ceil(num_samples / world_size) * world_size,
            "drop": num_samples // world_size * world_size,
            "uneven": num_samples,
        }[tail]
        self.set_epoch(0)

    def set_epoch(self, epoch):
        self.order = list(range(self.n))
        if self.shuffle:
            torch.default_generator.manual_seed(self.seed + epoch)
            self.order = torch.randperm(self.n).tolist()

    def __len__(self):
        return len(range(self.rank, self.total, self.world_size))

    def __iter__(self):
        order = (self.order * math.ceil(self.total / self.n))[: self.total]
        return iter(order[self.rank :: self.world_size])
