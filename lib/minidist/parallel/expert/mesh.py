"""Expert parallelism beside data parallelism: who holds which experts.

Every rank has its own tokens. Groups of `ep` neighbouring ranks hold all experts once; each rank of
such a group holds E / ep of them. If there are more ranks, world / ep groups hold copies. Example,
4 ranks, ep 2, 6 experts:

    rank 0: experts 0 1 2      rank 1: experts 3 4 5      one ep group
    rank 2: experts 0 1 2      rank 3: experts 3 4 5      another one

Ranks 0 and 2 are an edp group: they hold the same experts. `gradients` says what that means for the
backward pass.

Paper: Megatron-Core's MoE parallel folding (arXiv 2504.14960) for the names ep and edp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


@dataclass(frozen=True)
class ExpertMesh:
    """One rank's view: its ep group, its edp group, and its place in the first.

    Attributes:
        ep: number of ranks that hold all experts once.
        ep_rank: which part of the experts this rank holds.
        ep_group: the ranks that tokens travel between.
        edp_group: the ranks that hold the same experts.
    """

    ep: int
    ep_rank: int
    ep_group: dist.ProcessGroup
    edp_group: dist.ProcessGroup

    def own_experts(self, num_experts: int) -> range:
        """Experts of this rank.

        Raises:
            ValueError: the experts cannot be spread evenly.
        """
        each, left = divmod(num_experts, self.ep)
        if left or not each:
            raise ValueError(
                f"[rank {dist.get_rank()}] num_experts {num_experts} cannot be spread evenly "
                f"over ep {self.ep} ({num_experts} = {self.ep} x {each} + {left})"
            )
        return range(self.ep_rank * each, (self.ep_rank + 1) * each)


def make_expert_mesh(ep: int | None = None, *, device_type: str | None = None) -> ExpertMesh:
    """Lay ep groups over the default process group. Every rank calls it, with the same `ep`.

    Args:
        ep: None means all ranks: no expert has a copy.
        device_type: "cpu" or "cuda"; None means what the default group's backend works on.

    Raises:
        ValueError: the ranks cannot be split into groups of `ep`; before any communication.
    """
    world_size = dist.get_world_size()
    ep = world_size if ep is None else ep
    if ep < 1:
        raise ValueError(f"make_expert_mesh: ep must be at least 1, got {ep}")
    if world_size % ep:
        raise ValueError(
            f"make_expert_mesh: {world_size} ranks cannot be split into groups of ep {ep} "
            f"({world_size} = {ep} x {world_size // ep} + {world_size % ep})"
        )
    if device_type is None:
        device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    # Tokens travel twice per layer and direction: the ranks of an ep group are neighbours.
    shape = (world_size // ep, ep)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("edp", "ep"))
    groups = mesh.get_group("ep"), mesh.get_group("edp")
    return ExpertMesh(ep, dist.get_rank() % ep, *groups)
