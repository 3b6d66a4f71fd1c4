"""Tensor hooks, a wrapper that is no nn.Module, an object broadcast, all_gather_object in task 6.

loses: nothing
"""


# %% replaces="task1_setup"
def setup_distributed():
    env = os.environ
    local_rank = int(env.get("LOCAL_RANK", 0))
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(env["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{local_rank}" if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            init_method="env://",
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
        )
    return dist.get_rank(), dist.get_world_size(), device


def cleanup():
    try:
        dist.destroy_process_group()
    except (AssertionError, ValueError, RuntimeError):
        pass


# %% replaces="task6_in_sync"
def gradients_in_sync(model, tol=1e-6):
    mine = [None if p.grad is None else p.grad.cpu().numpy() for p in model.parameters()]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for column in zip(*everyone):
        if all(g is None for g in column):
            continue
        if any(g is None for g in column):
            return False
        stacked = np.stack(column)
        if (np.ptp(stacked, axis=0) > tol).any():
            return False
    return True


# %% replaces="task7_ddp"
class DDP:
    def __init__(self, module, bucket_cap_mb=25.0):
        self.module = module
        tensors = list(module.parameters()) + list(module.buffers())
        box = [[t.detach().cpu() for t in tensors]]
        dist.broadcast_object_list(box, src=0)
        for t, value in zip(tensors, box[0]):
            t.data.copy_(value)
        self.groups = []
        size = float("inf")
        dtype = None
        for p in list(module.parameters())[::-1]:
            if not p.requires_grad:
                continue
            nbytes = p.numel() * p.element_size()
            if size + nbytes > bucket_cap_mb * 1e6 or p.dtype != dtype:
                self.groups.append([])
                size, dtype = 0, p.dtype
            self.groups[-1].append(p)
            size += nbytes
        self.have = {}
        self.handles = []
        for group in self.groups:
            for p in group:
                p.register_hook(lambda g, p=p: self.got(p, g))

    def __getattr__(self, name):
        return getattr(self.module, name)

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def got(self, p, g):
        self.have[p] = g.detach().clone()
        self.advance()

    def advance(self):
        while len(self.handles) < len(self.groups):
            group = self.groups[len(self.handles)]
            if not all(p in self.have for p in group):
                break
            flat = torch.cat([self.have[p].reshape(-1) for p in group])
            self.handles.append((dist.all_reduce(flat, async_op=True), flat))

    def finish_gradient_synchronization(self):
        for group in self.groups:
            for p in group:
                if p not in self.have:
                    self.have[p] = torch.zeros_like(p)
        self.advance()
        for group, (work, flat) in zip(self.groups, self.handles):
            work.wait()
            flat /= dist.get_world_size()
            for p, g in zip(group, flat.split([p.numel() for p in group])):
                p.grad = g.reshape(p.shape)
        self.have, self.handles = {}, []
