"""The hook waits, and returns the tensor itself.

loses: amp_hook_mean, amp_hook_bytes
status: amp_hook_mean STUDENT_ERROR
status: amp_hook_bytes STUDENT_ERROR
because: DDP goes on with a Future only, so no backward ends.
"""


# %% replaces="task8_hook"
def make_compress_hook(dtype: torch.dtype) -> Callable:
    """A DDP communication hook that all-reduces the mean gradient in `dtype`."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        # Divided before it is added up: the sum over many ranks may be too large for fp16.
        small = (buffer / dist.get_world_size()).to(dtype)
        dist.all_reduce(small)
        return small.to(buffer.dtype)

    return hook
