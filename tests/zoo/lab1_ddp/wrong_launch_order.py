"""Launches buckets as they become ready: in another order on a rank that uses other parameters.

Then different buckets meet in one all-reduce. Where all ranks use the same parameters it is right.

loses: ddp_unused
"""


# %% replaces="task7_ddp"
class DDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.buckets, group = [], []
        for param in reversed([p for p in module.parameters() if p.requires_grad]):
            full = sum(p.nbytes for p in [*group, param]) > bucket_cap_mb * 10**6
            if group and (full or param.dtype != group[0].dtype):
                self.add_bucket(group)
                group = []
            group.append(param)
        if group:
            self.add_bucket(group)

    def add_bucket(self, params):
        flat = torch.zeros(
            sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device
        )
        pieces = flat.split([p.numel() for p in params])
        slots = {p: piece.view_as(p) for p, piece in zip(params, pieces, strict=True)}
        bucket = Bucket(flat, slots, waiting=set(params))
        self.buckets.append(bucket)
        for param in params:
            param.register_post_accumulate_grad_hook(partial(self.arrived, bucket))

    def arrived(self, bucket, param):
        bucket.slots[param].copy_(param.grad)
        bucket.waiting.remove(param)
        if not bucket.waiting:
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for bucket in self.buckets:
            for param in bucket.waiting:
                bucket.slots[param].zero_()
            bucket.waiting.clear()
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat.div_(dist.get_world_size())
            for param, slot in bucket.slots.items():
                param.grad = slot.clone()
            bucket.waiting.update(bucket.slots)
            bucket.work = None
