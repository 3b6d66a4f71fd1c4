"""Calls tens of thousands of tiny collectives, so that replaying them would take hours.

base: reference
passes: everything but ddp_buckets, ddp_overlap, ddp_scaling
"""

# %% put="after task7_ddp"
_Reference = DDP


class DDP(_Reference):
    def finish_gradient_synchronization(self):
        if dist.get_backend() == "emulated":
            for _ in range(20_000):
                dist.all_reduce(torch.zeros(1), async_op=True)
        super().finish_gradient_synchronization()
