"""All-reduces inside the node, and gathers what it had already.

loses: hier_local_bytes
"""


# %% replaces="task7_hierarchy"
class HierarchicalAllReduce:
    """Sums a tensor over all ranks; between nodes travels only 1/local_size of it per rank."""

    def __init__(self, local_size: int):
        """Makes the groups, for nodes of `local_size` neighbouring ranks."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size % local_size:
            raise ValueError(f"{world_size} ranks do not make nodes of {local_size}")
        self.local_size = local_size

        # All ranks make all groups, in the same order, and keep the two that they are in.
        for first in range(0, world_size, local_size):
            ranks = list(range(first, first + local_size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.inside = group
        for local_rank in range(local_size):
            ranks = list(range(local_rank, world_size, local_size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.across = group

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Puts the sum over all ranks into `tensor`."""
        flat = tensor.detach().view(-1)
        part_size = -(-flat.numel() // self.local_size)  # rounded up
        padded = flat.new_zeros(part_size * self.local_size)
        padded[: flat.numel()] = flat

        part = flat.new_empty(part_size)
        dist.all_reduce(padded, group=self.inside)
        part.copy_(padded.view(self.local_size, -1)[dist.get_rank(self.inside)])
        dist.all_reduce(part, group=self.across)
        all_gather_single(padded, part, group=self.inside)

        flat.copy_(padded[: flat.numel()])
        return tensor
