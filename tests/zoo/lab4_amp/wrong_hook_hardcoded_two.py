"""Divides by 2, the number of ranks on the student's own desk.

loses: amp_hook_mean
"""


# %% replaces="task8_hook"
def make_compress_hook(dtype):
    def hook(state, bucket):
        small = (bucket.buffer() / 2).to(dtype)
        future = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda f: f.value()[0].float())

    return hook
