"""Half of the bytes, in a group that each rank has for itself.

loses: amp_hook_mean, amp_hook_bytes
because: nothing is reduced, and nothing travels.
says: amp_hook_bytes were all-reduced over all ranks in
"""


# %% replaces="task8_hook"
def make_compress_hook(dtype):
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def hook(state, bucket):
        small = (bucket.buffer() / dist.get_world_size()).to(dtype)
        future = dist.all_reduce(small, group=alone, async_op=True).get_future()
        return future.then(lambda f: f.value()[0].float())

    return hook
