"""Averages in the first step; later ones find nothing missing.

loses: prof_bucket_mean, prof_bucket_sends, prof_efficiency
because: from the second step on nothing travels, so there is no mean, no bucket and no overlap
"""


# %% replaces="task5_buckets"
class GradientBuckets:
    """Averages a module's gradients over all ranks, in the buckets of a plan."""

    def __init__(self, module: nn.Module, plan: list[list[int]]):
        """plan: lists of indices into list(module.parameters()), in the order of travel."""
        params = list(module.parameters())
        self.buckets = [[params[index] for index in bucket] for bucket in plan]
        self._reset()
        for number, bucket in enumerate(self.buckets):
            for param in bucket:
                param.register_post_accumulate_grad_hook(partial(self._on_gradient, number))

    def _reset(self) -> None:
        """Ready for the next step: nothing has come, nothing travels."""
        self.missing = [len(bucket) for bucket in self.buckets]
        self.travelling: list[tuple[torch.Tensor, dist.Work]] = []

    def _on_gradient(self, number: int, param: nn.Parameter) -> None:
        """Hook: a gradient of bucket `number` is complete."""
        self.missing[number] -= 1
        while (first := len(self.travelling)) < len(self.buckets) and self.missing[first] == 0:
            flat = torch.cat([p.grad.flatten() for p in self.buckets[first]])
            self.travelling.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self) -> None:
        """Returns when every p.grad is the mean over all ranks."""
        for bucket, (flat, work) in zip(self.buckets, self.travelling, strict=True):
            work.wait()
            flat /= dist.get_world_size()
            for param, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                param.grad.copy_(piece.view_as(param))
        self.travelling = []
