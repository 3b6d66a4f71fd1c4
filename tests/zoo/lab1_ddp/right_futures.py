"""Futures of the works divide; own batching from the sampler in the training loop.

loses: nothing
"""


# %% replaces="task4_train"
def train(ddp_model, dataset, sampler, loss_fn, *, num_epochs, batch_size, lr, device):
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    loader = DataLoader(
        dataset, batch_sampler=torch.utils.data.BatchSampler(sampler, batch_size, drop_last=False)
    )
    losses = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        per_sample = []
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            loss = loss_fn(ddp_model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            per_sample.extend([loss.item()] * len(targets))
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, per_sample)
        everyone = [value for part in everyone for value in part]
        losses.append(sum(everyone) / len(everyone))
    return losses


# %% replaces="task7_ddp"
class DDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__()
        self.module = module
        works = [
            dist.broadcast(t.detach(), src=0, async_op=True)
            for t in [*module.parameters(), *module.buffers()]
        ]
        [work.wait() for work in works]
        cap = bucket_cap_mb * 2**20
        self.groups = []
        for p in reversed(tuple(module.parameters())):
            if p.requires_grad:
                last = self.groups[-1] if self.groups else None
                if (
                    last
                    and last[0].dtype == p.dtype
                    and sum(map(lambda q: q.nbytes, last)) + p.nbytes <= cap
                ):
                    last.append(p)
                else:
                    self.groups.append([p])
        self.arrived = [0] * len(self.groups)
        self.futures = []
        self.touched = set()
        for i, group in enumerate(self.groups):
            for p in group:

                def hook(p, i=i):
                    self.touched.add(id(p))
                    self.arrived[i] += 1
                    self.kick()

                p.register_post_accumulate_grad_hook(hook)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def kick(self, force=False):
        for i in range(len(self.futures), len(self.groups)):
            group = self.groups[i]
            if self.arrived[i] < len(group) and not force:
                break
            flat = torch.cat(
                [
                    (p.grad if id(p) in self.touched else torch.zeros_like(p)).detach().ravel()
                    for p in group
                ]
            )
            work = dist.all_reduce(flat, async_op=True)
            world = dist.get_world_size()
            self.futures.append(work.get_future().then(lambda f: f.value()[0] / world))

    def finish_gradient_synchronization(self):
        self.kick(force=True)
        for group, flat in zip(self.groups, torch.futures.wait_all(self.futures)):
            for p, g in zip(group, flat.split([p.numel() for p in group])):
                if p.grad is None:
                    p.grad = g.view(p.shape).clone()
                else:
                    p.grad.copy_(g.view(p.shape))
        self.arrived = [0] * len(self.groups)
        self.futures = []
        self.touched = set()
