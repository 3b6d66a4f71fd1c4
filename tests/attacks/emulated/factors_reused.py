"""Asks for each layer's factors once and uses them in every step.

base: reference
passes: everything but ddp_buckets, ddp_overlap, ddp_scaling
"""

# %% put="after task7_ddp"
_Reference = DDP


class Once:
    def __init__(self, real):
        self.real, self.known = real, {}

    def charge(self, layer, direction):
        if (layer, direction) not in self.known:
            self.known[layer, direction] = self.real.charge(layer, direction)
        return self.known[layer, direction]


class DDP(_Reference):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__(module, bucket_cap_mb)
        if dist.get_backend() == "emulated":
            once = Once(module[0].channel)
            for layer in module:
                layer.channel = once
