"""Makes the groups of a single node, and of nodes of one rank, on their members only.

loses: hier_values
status: hier_values STUDENT_ERROR
says: hier_values all ranks have to call new_group for all groups
"""


# %% replaces="task7_hierarchy"
class HierarchicalAllReduce:
    """Sums a tensor over all ranks; between nodes travels only 1/local_size of it per rank."""

    def __init__(self, local_size: int):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.local_size = local_size
        for first in range(0, world_size, local_size):
            ranks = list(range(first, first + local_size))
            if local_size in (1, world_size):
                if rank in ranks:
                    self.inside = dist.new_group(ranks)
                continue
            group = dist.new_group(ranks)
            if rank in ranks:
                self.inside = group
        for local_rank in range(local_size):
            ranks = list(range(local_rank, world_size, local_size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.across = group

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().view(-1)
        part_size = -(-flat.numel() // self.local_size)
        padded = flat.new_zeros(part_size * self.local_size)
        padded[: flat.numel()] = flat
        part = flat.new_empty(part_size)
        reduce_scatter_single(part, padded, group=self.inside)
        dist.all_reduce(part, group=self.across)
        all_gather_single(padded, part, group=self.inside)
        flat.copy_(padded[: flat.numel()])
        return tensor
