"""The order comes from the seed alone.

loses: elastic_order
"""


# %% replaces="task2_sampler"
class ElasticSampler:
    """Deals out global batches to any number of ranks."""

    def __init__(
        self, num_samples: int, global_batch: int, seed: int = 0, share: Callable = share_of_batch
    ) -> None:
        self.num_samples, self.global_batch = num_samples, global_batch
        self.seed, self.share = seed, share
        self.epoch, self.position = 0, 0  # samples of this epoch that all ranks have taken

    def order(self) -> list[int]:
        """All indices, as this epoch deals them out."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def next_batch(self, rank: int, world_size: int) -> tuple[list[int], int]:
        """This rank's indices of the next global batch, and the size of that batch."""
        if self.position == self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0
        batch = self.order()[self.position :][: self.global_batch]
        self.position += len(batch)
        return batch[self.share(len(batch), world_size, rank)], len(batch)

    def state_dict(self) -> dict:
        """Where it stands."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        """Goes on from there."""
        self.epoch, self.position = state["epoch"], state["position"]
