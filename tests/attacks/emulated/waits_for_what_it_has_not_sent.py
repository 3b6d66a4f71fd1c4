"""Fetches a collective of other ranks, which would tell it their gradients before it has any.

base: reference
passes: everything but ddp_buckets, ddp_overlap, ddp_scaling
"""

# %% put="after task7_ddp"
_Reference = DDP


class DDP(_Reference):
    def finish_gradient_synchronization(self):
        if dist.get_backend() == "emulated":
            client = self.module[0].channel
            with contextlib.suppress(RuntimeError):
                header = {"t": "fetch", "key": "0/9999", "wait": False, "st": 0}
                print("LEAK" + "ED:", client.call(header))
        super().finish_gradient_synchronization()
