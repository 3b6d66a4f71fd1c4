"""Clamps what overflows: an inf becomes a number, and no scaler sees it.

loses: amp_hook_mean
"""


# %% replaces="task8_hook"
def make_compress_hook(dtype: torch.dtype) -> Callable:
    """A DDP communication hook that all-reduces the mean gradient in `dtype`."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        small = (
            (buffer / dist.get_world_size())
            .nan_to_num()
            .clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
            .to(dtype)
        )
        future = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].to(buffer.dtype))

    return hook
