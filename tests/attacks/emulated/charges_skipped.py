"""Does not ask for the factors of backward, and so is not charged for it.

base: reference
passes: everything but ddp_buckets, ddp_overlap, ddp_scaling
"""

# %% put="after task7_ddp"
_Reference = DDP


class Free:
    def __init__(self, real):
        self.real = real

    def charge(self, layer, direction):
        return self.real.charge(layer, direction) if direction == "forward" else 1.0


class DDP(_Reference):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__(module, bucket_cap_mb)
        if dist.get_backend() == "emulated":
            for layer in module:
                layer.channel = Free(layer.channel)
