"""Two all-reduces for each bucket.

loses: amp_hook_bytes
"""


# %% replaces="task8_hook"
def make_compress_hook(dtype: torch.dtype) -> Callable:
    """A DDP communication hook that all-reduces the mean gradient in `dtype`."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        # Divided before it is added up: the sum over many ranks may be too large for fp16.
        small = (buffer / dist.get_world_size()).to(dtype)
        works = [dist.all_reduce(half, async_op=True) for half in small.chunk(2)]
        for work in works:
            work.wait()
        done = torch.futures.Future()
        done.set_result(small.to(buffer.dtype))
        return done

    return hook
