"""Issues a collective on a stream that does not exist: a call that is refused leaves no trace.

base: reference
passes: everything but ddp_buckets, ddp_overlap, ddp_scaling
"""

# %% put="after task7_ddp"
_Reference = DDP


class DDP(_Reference):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__(module, bucket_cap_mb)
        if dist.get_backend() == "emulated":
            call = {"t": "issue", "kind": "barrier", "op": "", "dtype": "uint8", "shape": [0]}
            call |= {"g": "own", "r": [dist.get_rank()], "k": 0, "st": -1}
            module[0].channel.post(call)
