"""Adds up in 16 bits and divides after that: the sum overflows.

loses: amp_hook_mean
"""


# %% replaces="task8_hook"
def make_compress_hook(dtype):
    def hook(state, bucket):
        small = bucket.buffer().to(dtype)
        future = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda f: f.value()[0].float() / dist.get_world_size())

    return hook
