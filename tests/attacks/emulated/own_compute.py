"""Reports compute of its own, of no or of negative length, where the broker charges by plan.

base: reference
passes: everything but ddp_buckets, ddp_overlap, ddp_scaling
"""

# %% put="after task7_ddp"
_Reference = DDP


class DDP(_Reference):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__(module, bucket_cap_mb)
        if dist.get_backend() == "emulated":
            client = module[0].channel
            client.compute("free", 0.0, 0.0)
            client.compute("backwards in time", -1e12, -1e12)
            client._send_computes()
