"""Starts all buckets that are complete from a callback per gradient that only counts; keeps the
gradients inside the flat tensors and shows them as views.

loses: nothing
"""


# %% replaces="task5_buckets"
class GradientBuckets(nn.Module):
    def __init__(self, module, plan):
        super().__init__()
        self.groups = [[list(module.parameters())[i] for i in bucket] for bucket in plan]
        self.flying = {}
        self.seen = set()
        for group in self.groups:
            for p in group:
                p.register_post_accumulate_grad_hook(self.on_grad)

    @torch.no_grad()
    def on_grad(self, p):
        self.seen.add(p)
        for number, group in enumerate(self.groups):
            if number in self.flying:
                continue
            if not self.seen.issuperset(group):
                return
            flat = nn.utils.parameters_to_vector([q.grad for q in group])
            self.flying[number] = flat, dist.all_reduce(flat, dist.ReduceOp.AVG, async_op=True)

    @torch.no_grad()
    def finish(self):
        for number, (flat, work) in self.flying.items():
            work.wait()
            at = 0
            for p in self.groups[number]:
                p.grad = flat[at : at + p.numel()].view(p.shape)
                at += p.numel()
        self.flying, self.seen = {}, set()
