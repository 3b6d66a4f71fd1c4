"""Expert parallelism: a mixture of experts whose experts are spread over ranks.

Read in this order:

- `router`    which experts a token visits, and with which weights
- `balance`   two ways to spread tokens evenly: an auxiliary loss, and a bias without a loss
- `dispatch`  capacity; tokens to their experts and back by all-to-all, with gradients
- `mesh`      expert parallelism beside data parallelism: who holds which experts
- `layer`     experts, shared experts, and the layer that replaces an MLP
- `gradients` which gradients are summed over which ranks
- `traffic`   a formula for the bytes of an all-to-all

Papers: GShard (arXiv 2006.16668), Switch Transformer (arXiv 2101.03961), DeepSeekMoE (arXiv
2401.06066), auxiliary-loss-free balancing (arXiv 2408.15664), DeepSeek-V3 (arXiv 2412.19437).
"""

from minidist.parallel.expert.balance import balance_loss, count_choices, imbalance, update_bias
from minidist.parallel.expert.dispatch import (
    Route,
    all_to_all,
    combine,
    dispatch,
    expert_capacity,
    keep_within_capacity,
)
from minidist.parallel.expert.gradients import average_gradients
from minidist.parallel.expert.layer import Experts, MoE, MoEConfig, use_experts
from minidist.parallel.expert.mesh import ExpertMesh, make_expert_mesh
from minidist.parallel.expert.router import Router, Routing
from minidist.parallel.expert.traffic import all_to_all_bytes

__all__ = [
    "ExpertMesh",
    "Experts",
    "MoE",
    "MoEConfig",
    "Route",
    "Router",
    "Routing",
    "all_to_all",
    "all_to_all_bytes",
    "average_gradients",
    "balance_loss",
    "combine",
    "count_choices",
    "dispatch",
    "expert_capacity",
    "imbalance",
    "keep_within_capacity",
    "make_expert_mesh",
    "update_bias",
    "use_experts",
]
