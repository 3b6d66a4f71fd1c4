"""Sums the gradients over the ranks and forgets to divide.

loses: ddp_gradients, ddp_tied_frozen, ddp_unused
misses: averaging
because: the mean is the idea of the lab, so sums count nowhere
class: example
"""


# %% replaces="task7_ddp"
class DDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

        self.buckets = []
        self.launched = 0
        group = []
        for param in reversed([p for p in module.parameters() if p.requires_grad]):
            full = sum(p.nbytes for p in group) + param.nbytes > bucket_cap_mb * 2**20
            if group and (full or param.dtype != group[0].dtype):
                self.add_bucket(group)
                group = []
            group.append(param)
        if group:
            self.add_bucket(group)

    def add_bucket(self, params):
        flat = params[0].new_zeros(sum(p.numel() for p in params))
        pieces = flat.split([p.numel() for p in params])
        slots = {p: piece.view_as(p) for p, piece in zip(params, pieces, strict=True)}
        bucket = Bucket(flat, slots, waiting=set(params))
        self.buckets.append(bucket)
        for param in params:
            param.register_post_accumulate_grad_hook(partial(self.arrived, bucket))

    def arrived(self, bucket, param):
        bucket.slots[param].copy_(param.grad)
        bucket.waiting.remove(param)
        self.launch()

    def launch(self):
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if bucket.waiting:
                return
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
            self.launched += 1

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for bucket in self.buckets:
            for param in bucket.waiting:
                bucket.slots[param].zero_()
            bucket.waiting.clear()
        self.launch()
        for bucket in self.buckets:
            bucket.work.wait()
            for param, slot in bucket.slots.items():
                param.grad = slot.clone()
            bucket.waiting.update(bucket.slots)
        self.launched = 0
