"""Shards and what travels are float32, whatever the parameters are: a float64 model is rounded.

loses: zero1_options
"""


# %% replaces="task4_zero1"
class ZeRO1:
    """A torch optimiser of which each rank keeps and computes one share."""

    def __init__(self, params: Iterable, optimizer_class: type, **options: object) -> None:
        ### BEGIN SOLUTION
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.parameters: list[list[nn.Parameter]] = []  # of each group
        self.shards: list[nn.Parameter] = []
        sharded = []
        for group in trainable_groups(params):
            shard = nn.Parameter(
                self.part(flatten(group["params"], self.num_ranks)).float().clone()
            )
            self.parameters.append(group["params"])
            self.shards.append(shard)
            sharded.append(group | {"params": [shard]})
        self.inner = optimizer_class(sharded, **options)

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat vector; a view."""
        return flat.chunk(self.num_ranks)[self.rank]

    def mean_part(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean over ranks."""
        dist.all_reduce(flat)
        return self.part(flat).clone() / self.num_ranks

    def reduce_group(self, number: int) -> None:
        """Adds the mean of a group's gradients to its shard's, and forgets them."""
        parameters, shard = self.parameters[number], self.shards[number]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = flatten(grads, self.num_ranks).float()
        for parameter in parameters:
            parameter.grad = None
        mean = self.mean_part(flat)
        shard.grad = mean if shard.grad is None else shard.grad + mean
        ### END SOLUTION

    @property
    def param_groups(self) -> list[dict]:
        """The groups of the wrapped optimiser, for schedulers."""
        ### BEGIN SOLUTION
        return self.inner.param_groups
        ### END SOLUTION

    def reduce(self) -> None:
        """Averages p.grad over ranks, adds this rank's part to its shards' gradients."""
        ### BEGIN SOLUTION
        for number in range(len(self.shards)):
            self.reduce_group(number)
        ### END SOLUTION

    def gradients(self) -> list[torch.Tensor]:
        """This rank's part of the mean gradient, one tensor per group."""
        ### BEGIN SOLUTION
        return [shard.grad for shard in self.shards if shard.grad is not None]
        ### END SOLUTION

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clips by the norm over all ranks (task 3)."""
        return clip_by_global_norm(self.gradients(), max_norm)

    def step(self) -> None:
        """Updates this rank's shards, and gathers those of the others."""
        ### BEGIN SOLUTION
        self.inner.step()
        for parameters, shard in zip(self.parameters, self.shards, strict=True):
            flat = shard.data.new_empty(self.num_ranks * shard.numel())
            all_gather_single(flat, shard.data)
            unflatten(flat, parameters)
        ### END SOLUTION

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        ### BEGIN SOLUTION
        for parameters, shard in zip(self.parameters, self.shards, strict=True):
            for parameter in [*parameters, shard]:
                parameter.grad = None
        ### END SOLUTION
