"""Gradients are views of a flat buffer; broadcast by all_gather; a sampler in blocks.

loses: nothing
"""


# %% replaces="task2_wrap"
def wrap_model(model, device):
    kwargs = {"device_ids": [device]} if device.type == "cuda" else {}
    return nn.parallel.DistributedDataParallel(module=model.to(device), **kwargs)


# %% replaces="task3_sampler"
class ShardSampler(Sampler[int]):
    def __init__(self, num_samples, rank, world_size, *, shuffle=True, seed=0, tail="pad"):
        self.__dict__.update(locals())
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return sum(1 for _ in self)

    def __iter__(self):
        order = np.arange(self.num_samples)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_samples)
        if self.tail == "pad":
            order = np.resize(
                order, math.ceil(self.num_samples / self.world_size) * self.world_size
            )
        if self.tail == "drop":
            order = order[: self.num_samples - self.num_samples % self.world_size]
        for index in np.array_split(order, self.world_size)[self.rank]:
            yield int(index)


# %% replaces="task6_in_sync"
def gradients_in_sync(model, tol=1e-6):
    device = next(model.parameters()).device
    ok = torch.ones((), dtype=torch.int32, device=device)
    for p in model.parameters():
        has = torch.tensor([0.0 if p.grad is None else 1.0], device=device)
        grad = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        flags = [torch.empty_like(has) for _ in parts]
        dist.all_gather(flags, has)
        stack = torch.stack(parts)
        if torch.cat(flags).unique().numel() != 1 or bool(
            ((stack.amax(0) - stack.amin(0)) > tol).any()
        ):
            ok.zero_()
    dist.all_reduce(ok, op=dist.ReduceOp.MIN)
    return bool(ok)


# %% replaces="task7_ddp"
class DDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__()
        self.module = module
        world = dist.get_world_size()
        for t in chain(module.parameters(), module.buffers()):
            t = t.data
            out = [torch.empty_like(t) for _ in range(world)]
            dist.all_gather(out, t.contiguous())
            t.copy_(out[0])
        params = [p for p in module.parameters() if p.requires_grad][::-1]
        plan, room = [], -1
        for p in params:
            if p.nbytes > room or plan[-1][0].dtype != p.dtype:
                plan.append([])
                room = int(bucket_cap_mb * 1024 * 1024)
            plan[-1].append(p)
            room -= p.nbytes
        self.flats, self.views, self.where, self.sizes = [], {}, {}, []
        for number, group in enumerate(plan):
            flat = torch.zeros(
                sum(p.numel() for p in group), dtype=group[0].dtype, device=group[0].device
            )
            at = 0
            for p in group:
                self.views[p] = flat[at : at + p.numel()].view(p.shape)
                self.where[p] = number
                at += p.numel()
                p.register_post_accumulate_grad_hook(self.ready)
            self.flats.append(flat)
            self.sizes.append(len(group))
        self.begin()

    def begin(self):
        self.missing, self.seen, self.works = list(self.sizes), set(), []

    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled():
            for p, view in self.views.items():
                if p.grad is None:
                    view.zero_()
                elif p.grad.data_ptr() != view.data_ptr():
                    view.copy_(p.grad)
                p.grad = view
        return self.module(*args, **kwargs)

    def ready(self, p):
        view = self.views[p]
        if p.grad.data_ptr() != view.data_ptr():  # cleared between forward and backward
            view.copy_(p.grad)
            p.grad = view
        self.seen.add(p)
        self.missing[self.where[p]] -= 1
        self.go()

    def go(self):
        while len(self.works) < len(self.flats) and self.missing[len(self.works)] == 0:
            flat = self.flats[len(self.works)]
            flat.mul_(1.0 / dist.get_world_size())
            self.works.append(dist.all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True))

    def finish_gradient_synchronization(self):
        for p, view in self.views.items():
            if p not in self.seen:
                view.zero_()
                p.grad = view
                self.missing[self.where[p]] -= 1
        self.go()
        while self.works:
            self.works.pop().wait()
        self.begin()
