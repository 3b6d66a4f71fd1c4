"""The hook does not use the all-reduce that it was given.

loses: hier_hook
"""


# %% replaces="task7_hook"
def all_reduce_hook(
    all_reduce: Callable[[torch.Tensor], torch.Tensor], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for DDP: the mean over ranks, by means of `all_reduce`."""
    flat = bucket.buffer()
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    future = torch.futures.Future()
    future.set_result(flat)
    return future
