"""Divides by the ranks of this node.

loses: hier_hook
"""


# %% replaces="task7_hook"
def all_reduce_hook(
    all_reduce: Callable[[torch.Tensor], torch.Tensor], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer()
    all_reduce(flat)
    flat /= int(os.environ["LOCAL_WORLD_SIZE"])
    future = torch.futures.Future()
    future.set_result(flat)
    return future
