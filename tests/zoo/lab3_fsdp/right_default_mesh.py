"""torch's fully_shard, with a mesh made in the plainest way, and unsharded by hand ahead of time.

loses: nothing
"""

# %% replaces="task3_fsdp"
from itertools import pairwise


class FSDP(nn.Module):
    def __init__(self, model, units):
        super().__init__()
        on = "cuda" if next(model.parameters()).is_cuda else "cpu"
        mesh = init_device_mesh(on, (dist.get_world_size(),))
        for module in [*units, model]:
            fully_shard(module, mesh=mesh)
        for module, following in pairwise(units):
            module.register_forward_pre_hook(
                lambda *_, following=following: following.unshard(async_op=True) and None
            )
        self.model = model

    def local_parameters(self):
        return list(self.model.parameters())

    def forward(self, *args):
        return self.model(*args)
