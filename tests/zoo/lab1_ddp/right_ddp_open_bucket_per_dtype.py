"""One bucket stays open for each dtype, as in PyTorch; gradients are divided before they travel.

loses: nothing
"""


# %% replaces="task7_ddp"
class DDP(nn.Module):
    """Data parallelism: the same module on every rank, gradients averaged while backward runs.

    Wrapping makes parameters and buffers those of rank 0. After `loss.backward()` call
    `finish_gradient_synchronization()`; then every p.grad is the mean over all ranks.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0):
        """Wraps `module`; gradients travel in buckets of at most `bucket_cap_mb` MB."""
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            received = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(received, src=0)
            tensor.detach().copy_(received)

        cap_bytes = round(bucket_cap_mb * 1e6)
        groups: list[list[tuple[int, nn.Parameter]]] = []
        open_groups: dict[torch.dtype, list] = {}
        for place, param in enumerate(reversed(list(module.parameters()))):
            if not param.requires_grad:
                continue
            group = open_groups.get(param.dtype)
            if group is None or sum(p.nbytes for _, p in group) + param.nbytes > cap_bytes:
                group = open_groups[param.dtype] = []
                groups.append(group)
            group.append((place, param))
        groups.sort(key=lambda group: group[-1][0])  # in the order in which they will be full

        self._groups = [[param for _, param in group] for group in groups]
        self._flats = []
        self._slots = {}
        for index, group in enumerate(self._groups):
            size = sum(param.numel() for param in group)
            flat = torch.zeros(size, dtype=group[0].dtype, device=group[0].device)
            self._flats.append(flat)
            start = 0
            for param in group:
                self._slots[param] = flat[start : start + param.numel()].view_as(param)
                start += param.numel()
                param.register_post_accumulate_grad_hook(partial(self._arrived, index))
        self._begin_step()

    def _begin_step(self) -> None:
        self._missing = [len(group) for group in self._groups]
        self._came = set()
        self._works = []

    def _fill(self, param: nn.Parameter) -> None:
        """Puts this rank's part of the mean into the slot."""
        if param.grad is None:
            self._slots[param].zero_()
        else:
            self._slots[param].copy_(param.grad).div_(dist.get_world_size())

    def _arrived(self, index: int, param: nn.Parameter) -> None:
        self._fill(param)
        self._came.add(param)
        self._missing[index] -= 1
        self._launch()

    def _launch(self) -> None:
        """Starts the next all-reduces, always in the order of the buckets."""
        while len(self._works) < len(self._flats) and not self._missing[len(self._works)]:
            self._works.append(dist.all_reduce(self._flats[len(self._works)], async_op=True))

    def forward(self, *args, **kwargs):
        """Runs the module."""
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Returns when every p.grad is the mean of this step's gradients over all ranks."""
        for param in self._slots:
            if param not in self._came:
                self._fill(param)
        self._missing = [0] * len(self._groups)
        self._launch()

        for work in self._works:
            work.wait()
        for param, slot in self._slots.items():
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(slot)
        self._begin_step()
