"""Multiplies the seed by the epoch: in epoch 0 every seed gives the same order.

loses: sampler_epoch
"""


# %% replaces="task3_sampler"
class ShardSampler(Sampler[int]):
    def __init__(
        self,
        num_samples: int,
        rank: int,
        world_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: str = "pad",
    ):
        self.n = num_samples
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.tail = tail
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        if self.tail == "pad":
            return math.ceil(self.n / self.world_size)
        if self.tail == "drop":
            return self.n // self.world_size
        return self.n // self.world_size + (self.rank < self.n % self.world_size)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.n))
        generator = torch.Generator()
        generator.manual_seed(self.seed * 1000 * self.epoch + self.epoch)
        return torch.randperm(self.n, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        if self.tail == "pad":
            total = math.ceil(self.n / self.world_size) * self.world_size
            order = (order * math.ceil(total / self.n))[:total]
        elif self.tail == "drop":
            order = order[: self.n // self.world_size * self.world_size]
        return iter(order[self.rank :: self.world_size])
