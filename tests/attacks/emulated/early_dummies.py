"""Sends all-reduces of nothing in particular from the hooks; the gradients go after backward.

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
        if dist.get_backend() == "emulated":
            for p in self.params:
                p.register_post_accumulate_grad_hook(self.pretend)

    def forward(self, *arguments, **options):
        return self.module(*arguments, **options)

    def pretend(self, p):
        dist.all_reduce(torch.zeros(4), async_op=True)

    def finish_gradient_synchronization(self):
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
