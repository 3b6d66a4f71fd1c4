"""Reduces four bytes per element and rounds the result.

loses: amp_hook_bytes
says: amp_hook_bytes saw an all-reduce of float32
"""


# %% replaces="task8_hook"
def make_compress_hook(dtype):
    def hook(state, bucket):
        mean = bucket.buffer() / dist.get_world_size()
        future = dist.all_reduce(mean, async_op=True).get_future()
        return future.then(lambda f: f.value()[0].to(dtype).float())

    return hook
