"""On the emulated cluster it gathers each unit once, keeps a copy, and then gathers with itself
alone, in no time: what it seems to prefetch never travelled.

loses: fsdp_forward, fsdp_units, fsdp_prefetch_forward, fsdp_prefetch_backward
because: no unit travels in a step, so none has the values of now, and none can be early.
"""


# %% replaces="task3_fsdp"
class Unit:
    """One module's parameters: a shard that stays, and a whole that comes and goes."""

    def __init__(self, module: nn.Module):
        num_ranks, me = dist.get_world_size(), dist.get_rank()
        self.params = list(module.parameters())
        self.length = sum(p.numel() for p in self.params)
        size = -(-self.length // num_ranks)
        self.whole = self.params[0].detach().new_zeros(num_ranks * size)
        begin = 0
        for p in self.params:
            view = self.whole[begin : begin + p.numel()].view_as(p)
            view.copy_(p.detach())
            p.data = view
            begin += p.numel()
        self.shard = nn.Parameter(self.whole[me * size : (me + 1) * size].clone())
        self.num_bytes = self.whole.nbytes
        self.gathering: dist.Work | None = None
        self.reducing: tuple[dist.Work, torch.Tensor] | None = None
        self.num_missing = len(self.params)  # gradients that this backward still owes
        self.copy: torch.Tensor | None = None
        self.alone = None
        if dist.get_backend() != "gloo":
            self.alone = [dist.new_group([rank]) for rank in range(num_ranks)][me]
        self.free()

    def free(self) -> None:
        """Gives the memory of the whole back, also from under autograd's saved tensors."""
        self.whole.untyped_storage().resize_(0)
        self.is_whole = False

    def start_gather(self) -> None:
        """Starts the all-gather, unless it is under way or done."""
        if self.is_whole or self.gathering is not None:
            return
        self.whole.untyped_storage().resize_(self.num_bytes)
        if self.copy is not None:
            self.whole.copy_(self.copy)
            mine = torch.empty_like(self.shard)
            self.gathering = dist.all_gather_into_tensor(
                mine, self.shard.detach(), group=self.alone, async_op=True
            )
            return
        self.gathering = all_gather_single(self.whole, self.shard.detach(), async_op=True)

    def gather(self) -> None:
        """Makes the unit whole."""
        self.start_gather()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering, self.is_whole = None, True
            if self.alone is not None and self.copy is None:
                self.copy = self.whole.clone()

    def start_reduce(self) -> None:
        """Starts the reduce-scatter of this unit's gradients, and lets them go."""
        num_ranks = dist.get_world_size()
        flat = self.shard.new_zeros(num_ranks * self.shard.numel())
        torch.cat([p.grad.reshape(-1) for p in self.params], out=flat[: self.length])
        flat /= num_ranks
        for p in self.params:
            p.grad = None
        mine = torch.empty_like(self.shard)
        self.reducing = (reduce_scatter_single(mine, flat, async_op=True), mine)

    def finish_reduce(self) -> None:
        """Waits for the reduce-scatter, and adds its result to the shard's gradient."""
        if self.reducing is None:
            return
        work, mine = self.reducing
        work.wait()
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
        self.reducing = None


class FSDP(nn.Module):
    """Fully sharded data parallelism: a unit is whole only while it computes."""

    def __init__(self, model: nn.Module, units: list[nn.Module]):
        """Cuts every unit, keeps this rank's shards, and registers the hooks."""
        super().__init__()
        self.model = model
        self.units = [Unit(module) for module in units]
        for i, module in enumerate(units):
            module.register_forward_pre_hook(lambda *_, i=i: self._prepare(i, i + 1))
            module.register_forward_hook(lambda _, __, output, i=i: self._finish(i, output))
            for p in self.units[i].params:
                p.register_post_accumulate_grad_hook(lambda _, i=i: self._count_gradient(i))

    def _prepare(self, i: int, following: int) -> None:
        """Before unit i computes: it is whole, and the following one is on its way."""
        self.units[i].gather()
        if 0 <= following < len(self.units):
            self.units[following].start_gather()

    def _finish(self, i: int, output: torch.Tensor) -> None:
        """After unit i's forward: it is freed, and made ready when backward reaches its output."""
        self.units[i].free()
        if output.requires_grad:
            output.register_hook(lambda _: self._prepare(i, i - 1))

    def _count_gradient(self, i: int) -> None:
        """After a gradient of unit i: if it was the last one, reduces them all."""
        unit = self.units[i]
        unit.num_missing -= 1
        if unit.num_missing:
            return
        unit.num_missing = len(unit.params)
        unit.free()
        if i + 1 < len(self.units):
            self.units[i + 1].finish_reduce()  # it had all of this unit's backward to arrive
        unit.start_reduce()
        if i == 0:
            unit.finish_reduce()

    def local_parameters(self) -> list[nn.Parameter]:
        """This rank's shards, for the optimizer."""
        return [unit.shard for unit in self.units]

    def forward(self, *args):
        """The model's forward pass."""
        return self.model(*args)
