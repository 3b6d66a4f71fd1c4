"""torch's own fully_shard behind the class of task 3, and in every other task.

loses: nothing
class: example
"""

# %% replaces="task3_fsdp"
from itertools import pairwise


class FSDP(nn.Module):
    def __init__(self, model, units):
        super().__init__()
        on = "cuda" if next(model.parameters()).is_cuda else "cpu"
        # An equal mesh of an earlier group would bring that group back: names tell them apart.
        FSDP.made = getattr(FSDP, "made", 0) + 1
        mesh = init_device_mesh(on, (dist.get_world_size(),), mesh_dim_names=(f"dp{FSDP.made}",))
        for module in [*units, model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        for module, following in pairwise(units):
            module.set_modules_to_forward_prefetch([following])
        self.model = model

    def local_parameters(self):
        return list(self.model.parameters())

    def forward(self, *args):
        return self.model(*args)
