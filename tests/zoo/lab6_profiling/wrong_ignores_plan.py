"""Reduces each gradient on its own, whatever the plan says.

loses: prof_bucket_sends, prof_efficiency
because: a latency for each gradient is what the plan was to avoid
says: prof_efficiency put all gradients of a bucket into one
says: prof_bucket_sends one per bucket, got
"""


# %% replaces="task5_buckets"
class GradientBuckets:
    def __init__(self, module, plan):
        params = list(module.parameters())
        self.plan = [[params[i]] for bucket in plan for i in bucket]
        self.left = [1] * len(self.plan)
        self.works = []
        for number, bucket in enumerate(self.plan):
            for p in bucket:
                p.register_post_accumulate_grad_hook(partial(self.count, number))

    def count(self, number, p):
        self.left[number] -= 1
        while len(self.works) < len(self.plan) and self.left[len(self.works)] == 0:
            self.start(self.plan[len(self.works)])

    def start(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        work = dist.all_reduce(flat, async_op=True)
        self.works.append((bucket, flat, work))

    def finish(self):
        for bucket, flat, work in self.works:
            work.wait()
            pieces = (flat / dist.get_world_size()).split([p.numel() for p in bucket])
            for p, piece in zip(bucket, pieces):
                p.grad = piece.view_as(p).clone()
        self.works = []
        self.left = [len(bucket) for bucket in self.plan]
