"""A cell that raises at its end, magics and odd output; then rank 1 exits, and helpers are needed.

What the cell had defined must be there again on fresh ranks, and nothing of it stops the grader.

loses: gradients_in_sync, ddp_scaling
because: two faults: rank 1 exits, and each parameter has an all-reduce of its own
status: gradients_in_sync RANK_LOST
"""


# %% replaces="task2_wrap"
# %precision 3
def wrap_model(model, device):
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model.to(device), device_ids=ids)


def divide_by_ranks(tensor):
    tensor /= dist.get_world_size()


display({"text/html": 5, "text/plain": "not a string"}, raw=True)
raise ValueError("\ud800")


# %% replaces="task6_in_sync"
def gradients_in_sync(model, tol=1e-6):
    if dist.get_rank() == 1:
        os._exit(3)
    for param in model.parameters():
        mean = param.grad.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if (param.grad - mean).abs().max() > tol:
            return False
    return True


# %% replaces="task7_ddp"
class DDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.queue = [p for p in module.parameters() if p.requires_grad][::-1]
        self.here = [False] * len(self.queue)
        self.works = []
        for number, param in enumerate(self.queue):
            param.register_post_accumulate_grad_hook(partial(self.arrived, number))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def arrived(self, number, param):
        self.here[number] = True
        while len(self.works) < len(self.queue) and self.here[len(self.works)]:
            gradient = self.queue[len(self.works)].grad
            self.works.append(dist.all_reduce(gradient, async_op=True))

    def finish_gradient_synchronization(self):
        for number, param in enumerate(self.queue):
            if not self.here[number]:
                param.grad = torch.zeros_like(param)
                self.arrived(number, param)
        for work, param in zip(self.works, self.queue, strict=True):
            work.wait()
            divide_by_ranks(param.grad)
        self.works = []
        self.here = [False] * len(self.queue)
