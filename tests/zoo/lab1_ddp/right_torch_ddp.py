"""PyTorch's own DistributedDataParallel behind the lab's interface.

loses: nothing
"""

# ruff: noqa: F821


# %% replaces="task7_ddp"
class DDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__()
        self.module = module
        self.torch_ddp = DistributedDataParallel(
            module, bucket_cap_mb=bucket_cap_mb, find_unused_parameters=True
        )

    def forward(self, *args, **kwargs):
        return self.torch_ddp(*args, **kwargs)

    def finish_gradient_synchronization(self):
        pass  # backward returns when all buckets have been reduced
