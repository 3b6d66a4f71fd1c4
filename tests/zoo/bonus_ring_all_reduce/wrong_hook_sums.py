"""The hook returns the sum over ranks.

loses: ring_hook
class: example
"""


# %% replaces="task6_hook"
def ring_hook(state, bucket):
    future = torch.futures.Future()
    future.set_result(ring_all_reduce(bucket.buffer(), "sum"))
    return future
