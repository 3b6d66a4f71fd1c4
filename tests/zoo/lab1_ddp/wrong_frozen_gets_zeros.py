"""Gives frozen parameters a gradient of zeros, with which weight decay changes them.

loses: ddp_tied_frozen
says: ddp_tied_frozen is frozen, but has a gradient after the step
"""


# %% replaces="task7_ddp"
class DDP(nn.Module):
    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0):
        super().__init__()
        self.module = module
        with torch.no_grad():
            for t in chain(module.parameters(), module.buffers()):
                whole = t.detach().contiguous()
                dist.broadcast(whole, src=0)
                t.copy_(whole)
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[nn.Parameter, Bucket] = {}
        group: list[nn.Parameter] = []
        size = 0
        for p in reversed(list(module.parameters())):
            if not p.requires_grad:
                continue
            nbytes = p.numel() * p.element_size()
            if group and (size + nbytes > bucket_cap_mb * 1e6 or group[0].dtype != p.dtype):
                self._add_bucket(group)
                group, size = [], 0
            group.append(p)
            size += nbytes
        if group:
            self._add_bucket(group)
        self.next_launch = 0
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self._hook)

    def _add_bucket(self, group):
        flat = torch.zeros(
            sum(p.numel() for p in group), dtype=group[0].dtype, device=group[0].device
        )
        slots, start = {}, 0
        for p in group:
            slots[p] = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
        bucket = Bucket(flat, slots, set(group))
        self.buckets.append(bucket)
        for p in group:
            self.bucket_of[p] = bucket

    def _hook(self, p):
        bucket = self.bucket_of[p]
        bucket.slots[p].copy_(p.grad)
        bucket.waiting.discard(p)
        while self.next_launch < len(self.buckets):
            bucket = self.buckets[self.next_launch]
            if bucket.waiting:
                break
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
            self.next_launch += 1

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        for bucket in self.buckets[self.next_launch :]:
            for p in bucket.waiting:
                bucket.slots[p].zero_()
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat /= dist.get_world_size()
            for p, slot in bucket.slots.items():
                if p.grad is None:
                    p.grad = slot.clone()
                else:
                    p.grad.copy_(slot)
            bucket.work = None
        for p in self.module.parameters():
            if not p.requires_grad:
                p.grad = torch.zeros_like(p)
        for bucket in self.buckets:
            bucket.waiting = set(bucket.slots)
        self.next_launch = 0
