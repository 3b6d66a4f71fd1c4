"""Asks for the result of a message that it has sent itself and that nobody receives.

There is none; the broker, which belongs to the referee, must survive the question.

base: reference
passes: everything but ddp_buckets, ddp_overlap, ddp_scaling
"""

# %% put="after task7_ddp"
_Reference = DDP


class DDP(_Reference):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__(module, bucket_cap_mb)
        if dist.get_backend() == "emulated":
            rank, n = dist.get_rank(), dist.get_world_size()
            target = (rank + 1) % n
            client = module[0].channel
            message = {"t": "issue", "kind": "send", "op": "", "dtype": "float32", "shape": [0]}
            message |= {"g": "own", "r": list(range(n)), "peer": target, "tag": 0}
            client.post(message)
            client.post({"t": "fetch", "key": f"own/{rank}>{target}/0/0", "q": 1})
