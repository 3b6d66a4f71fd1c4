"""The hook's second argument has a name that DDP does not take.

loses: amp_hook_mean
"""


# %% replaces="task8_hook"
def make_compress_hook(dtype: torch.dtype) -> Callable:
    """A DDP communication hook that all-reduces the mean gradient in `dtype`."""

    def hook(state: object, b: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = b.buffer()
        # Divided before it is added up: the sum over many ranks may be too large for fp16.
        small = (buffer / dist.get_world_size()).to(dtype)
        future = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].to(buffer.dtype))

    return hook
