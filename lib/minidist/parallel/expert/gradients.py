"""Which gradients are summed over which ranks, and what they are divided by.

Each rank's loss is the mean over its own share of the batch; the loss of the batch is the mean of
the n ranks' losses, so every gradient is divided by n.

- What is replicated (router, shared experts, attention): each rank has the gradient of its own
  tokens. Sum over all n ranks, divide by n.
- Experts: the all-to-all of the backward pass has brought the gradients of all tokens of the ep
  group to the rank of the expert. Their sum is there already. Sum over the edp group only, which
  holds the copies; divide by n, too. Dividing by the number of copies is a common mistake: it makes
  the gradient ep times too large.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from minidist.parallel.data.flat import average_flat
from minidist.parallel.expert.layer import Experts
from minidist.parallel.expert.mesh import ExpertMesh


def average_gradients(module: nn.Module, mesh: ExpertMesh) -> None:
    """Make every gradient that of the mean of all ranks' losses. Call it after `backward`.

    Each rank's loss is a mean over its own tokens, and all ranks have equally many. A parameter
    without a gradient on this rank counts as zero, so that all ranks send the same.
    """
    experts = [p for m in module.modules() if isinstance(m, Experts) for p in m.parameters()]
    of_experts = {id(parameter) for parameter in experts}
    replicated = [p for p in module.parameters() if id(p) not in of_experts]
    num_ranks = dist.get_world_size()
    average_flat(experts, mesh.edp_group, divide_by=num_ranks)
    average_flat(replicated, dist.group.WORLD, divide_by=num_ranks)
