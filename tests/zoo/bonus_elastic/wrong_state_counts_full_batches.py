"""The state is the number of steps; an epoch is taken for so many full batches.

The last batch of an epoch, which is smaller, is forgotten when a state is loaded.

loses: elastic_resize
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
        self.steps = 0
        self.epoch, self.position = 0, 0  # samples of this epoch that all ranks have taken

    def order(self) -> list[int]:
        """All indices, as this epoch deals them out."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()
        ### END SOLUTION

    def next_batch(self, rank: int, world_size: int) -> tuple[list[int], int]:
        """This rank's indices of the next global batch, and the size of that batch."""
        ### BEGIN SOLUTION
        if self.position == self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0
        batch = self.order()[self.position :][: self.global_batch]
        self.position += len(batch)
        self.steps += 1
        return batch[self.share(len(batch), world_size, rank)], len(batch)
        ### END SOLUTION

    def state_dict(self) -> dict:
        """Where it stands."""
        ### BEGIN SOLUTION
        return {"steps": self.steps}
        ### END SOLUTION

    def load_state_dict(self, state: dict) -> None:
        """Goes on from there."""
        ### BEGIN SOLUTION
        self.steps = state["steps"]
        self.epoch, batches = divmod(self.steps, self.num_samples // self.global_batch)
        self.position = batches * self.global_batch
        ### END SOLUTION
