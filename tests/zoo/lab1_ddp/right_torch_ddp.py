"""PyTorch's own DistributedDataParallel behind the lab's interface.

It closes a bucket when it is full or over the cap, so it gets a smaller cap.

loses: nothing
"""


# %% replaces="task7_ddp"
class DDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__()
        self.module = module
        cap = bucket_cap_mb * 2**20
        last = max((p.nbytes for p in module.parameters() if p.nbytes <= cap), default=0)
        self.torch_ddp = DistributedDataParallel(
            module, bucket_cap_mb=(cap - last) / 2**20, find_unused_parameters=True
        )

    def forward(self, *args, **kwargs):
        return self.torch_ddp(*args, **kwargs)

    def finish_gradient_synchronization(self):
        pass  # backward returns when all buckets have been reduced
