"""Seeds with seed * epoch: the default seed 0 has the same order in all epochs.

loses: elastic_order
"""


# %% replaces="task2_sampler"
class ElasticSampler:
    """Deals out global batches to any number of ranks."""

    def __init__(
        self, num_samples: int, global_batch: int, seed: int = 0, share: Callable = share_of_batch
    ) -> None:
        ### BEGIN SOLUTION
        self.num_samples, self.global_batch = num_samples, global_batch
        self.seed, self.share = seed, share
        self.epoch, self.position = 0, 0  # samples of this epoch that all ranks have taken

    def order(self) -> list[int]:
        """All indices, as this epoch deals them out."""
        generator = torch.Generator().manual_seed(self.seed * self.epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()
        ### END SOLUTION

    def next_batch(self, rank: int, world_size: int) -> tuple[list[int], int]:
        """This rank's indices of the next global batch, and the size of that batch."""
        ### BEGIN SOLUTION
        if self.position == self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0
        batch = self.order()[self.position :][: self.global_batch]
        self.position += len(batch)
        return batch[self.share(len(batch), world_size, rank)], len(batch)
        ### END SOLUTION

    def state_dict(self) -> dict:
        """Where it stands."""
        ### BEGIN SOLUTION
        return {"epoch": self.epoch, "position": self.position}
        ### END SOLUTION

    def load_state_dict(self, state: dict) -> None:
        """Goes on from there."""
        ### BEGIN SOLUTION
        self.epoch, self.position = state["epoch"], state["position"]
        ### END SOLUTION
