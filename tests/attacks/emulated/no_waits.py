"""Reduces after backward and never waits; what was sent is right, and it is still too late.

base: reference
passes: everything but ddp_overlap, ddp_scaling
"""


# %% replaces="task7_ddp"
class DDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.params = [p for p in module.parameters() if p.requires_grad]

    def forward(self, *arguments, **options):
        return self.module(*arguments, **options)

    def finish_gradient_synchronization(self):
        if dist.get_backend() == "emulated":
            self.works = [dist.all_reduce(p.grad.clone(), async_op=True) for p in self.params]
            return
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
