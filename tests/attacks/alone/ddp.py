"""A DDP that sends nothing, with the names and attributes of one that does.

base: reference
passes: everything but ddp_weights, ddp_buffers, ddp_gradients, ddp_tied_frozen, ddp_unused,
  ddp_buckets, ddp_overlap, ddp_scaling
"""


# %% replaces="task7_ddp"
class DDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__()
        self.module = module
        self.buckets = [list(module.parameters())]

    def forward(self, *arguments, **options):
        return self.module(*arguments, **options)

    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            if p.grad is not None:
                p.grad = p.grad.clone()
