"""Starts at most one bucket in a hook; two may be due.

loses: prof_efficiency
says: prof_efficiency One hook may have to start several buckets.
"""


# %% replaces="task5_buckets"
class GradientBuckets:
    def __init__(self, module: nn.Module, plan: list[list[int]]):
        params = list(module.parameters())
        self.buckets = [[params[i] for i in bucket] for bucket in plan]
        self.home = {}
        for number, bucket in enumerate(self.buckets):
            for param in bucket:
                self.home[param] = number
                param.register_post_accumulate_grad_hook(self.ready)
        self.reset()

    def reset(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sent = []

    def ready(self, param: nn.Parameter) -> None:
        self.missing[self.home[param]] -= 1
        if len(self.sent) < len(self.buckets) and self.missing[len(self.sent)] == 0:
            self.send(self.buckets[len(self.sent)])

    def send(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([param.grad.flatten() for param in bucket])
        self.sent.append((dist.all_reduce(flat, async_op=True), flat))

    def finish(self) -> None:
        while len(self.sent) < len(self.buckets):
            self.send(self.buckets[len(self.sent)])
        for bucket, (work, flat) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            flat /= dist.get_world_size()
            for param, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                param.grad.copy_(piece.view_as(param))
        self.reset()
