"""The all-reduce between nodes is a ring of messages.

loses: nothing
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

    def _ring(self, part: torch.Tensor) -> None:
        """Reduce-scatter and all-gather around the nodes, with sends and receives."""
        ranks = dist.get_process_group_ranks(self.across)
        num, me = len(ranks), dist.get_rank(self.across)
        if num == 1:
            return
        size = -(-part.numel() // num)
        padded = torch.nn.functional.pad(part, (0, size * num - part.numel()))
        chunks = list(padded.view(num, size))
        following, before = ranks[(me + 1) % num], ranks[(me - 1) % num]
        for hop in range(2 * num - 2):
            out, into = chunks[(me - hop) % num], chunks[(me - hop - 1) % num]
            received = torch.empty_like(into)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, out.clone(), following),
                    dist.P2POp(dist.irecv, received, before),
                ]
            )
            for work in works:
                work.wait()
            if hop < num - 1:
                into += received
            else:
                into.copy_(received)
        part.copy_(padded[: part.numel()])

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Puts the sum over all ranks into `tensor`."""
        flat = tensor.detach().view(-1)
        part_size = -(-flat.numel() // self.local_size)  # rounded up
        padded = flat.new_zeros(part_size * self.local_size)
        padded[: flat.numel()] = flat

        part = flat.new_empty(part_size)
        reduce_scatter_single(part, padded, group=self.inside)
        self._ring(part)
        all_gather_single(padded, part, group=self.inside)

        flat.copy_(padded[: flat.numel()])
        return tensor
