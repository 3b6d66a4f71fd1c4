"""Groups, kinds and sizes of all messages are right; what travels is empty.

loses: hier_values, hier_slow_bytes, hier_local_bytes
because: what travels is empty, so neither sum nor traffic is there.
"""


# %% replaces="task7_hierarchy"
class HierarchicalAllReduce:
    """Sums a tensor over all ranks; between nodes travels only 1/local_size of it per rank."""

    def __init__(self, local_size: int):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.local_size = local_size
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
        part = tensor.new_zeros(-(-tensor.numel() // self.local_size))
        padded = part.new_zeros(part.numel() * self.local_size)
        reduce_scatter_single(part, padded, group=self.inside)
        dist.all_reduce(part, group=self.across)
        all_gather_single(padded, part, group=self.inside)
        return tensor
