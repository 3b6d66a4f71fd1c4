"""torch's own GradScaler and its own compression hook behind the lab's interfaces.

loses: nothing
class: example
"""


# %% replaces="task2_scaler"
class LossScaler(torch.amp.GradScaler):
    def __init__(
        self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
    ):
        super().__init__(device.type, init_scale, growth_factor, backoff_factor, growth_interval)

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)

    def step(self, optimizer):
        steps = []
        hook = optimizer.register_step_post_hook(lambda *_: steps.append(1))
        if self._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
            self.unscale_(optimizer)
        super().step(optimizer)
        hook.remove()
        return bool(steps)


# %% replaces="task8_hook"
def make_compress_hook(dtype):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def hook(state, bucket):
        return default_hooks._compress_hook(dtype, state, bucket)

    return hook
