"""torch's own Reducer, the machinery inside DistributedDataParallel, which takes a list of
buckets.

loses: nothing
class: example
"""


# %% replaces="task5_buckets"
class GradientBuckets:
    def __init__(self, module, plan):
        params = list(module.parameters())
        self.reducer = dist.Reducer(
            params,
            [list(bucket) for bucket in plan],
            [2**40] * len(plan),
            dist.distributed_c10d._get_default_group(),
            [False] * len(params),
            2**40,
            False,
            False,
        )
        module.register_forward_hook(self.get_ready)

    def get_ready(self, module, args, output):
        self.reducer.prepare_for_forward()
        self.reducer.prepare_for_backward([])

    def finish(self):
        pass  # the reducer waits at the end of backward
