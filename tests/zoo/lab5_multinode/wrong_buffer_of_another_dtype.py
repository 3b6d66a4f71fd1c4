"""Keeps its padded buffer by length alone; another dtype gets the wrong one.

loses: hier_values
"""


# %% replaces="task7_hierarchy"
class HierarchicalAllReduce:
    def __init__(self, local_size: int):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.local_size = local_size
        for first in range(0, world, local_size):
            ranks = list(range(first, first + local_size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.inside = group
        for local in range(local_size):
            ranks = list(range(local, world, local_size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.across = group

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.view(-1)
        size = -(-flat.numel() // self.local_size)
        self.buffers = getattr(self, "buffers", {})
        padded = self.buffers.setdefault(size, flat.new_zeros(size * self.local_size))
        padded[: flat.numel()] = flat
        part = padded.new_empty(size)
        reduce_scatter_single(part, padded, group=self.inside)
        dist.all_reduce(part, group=self.across)
        all_gather_single(padded, part, group=self.inside)
        flat.copy_(padded[: flat.numel()])
        return tensor
