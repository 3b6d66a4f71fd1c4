from .balance import balance_loss, count_choices, imbalance, update_bias
from .dispatch import (
    Route,
    all_to_all,
    combine,
    dispatch,
    expert_capacity,
    keep_within_capacity,
)
from .gradients import average_gradients
from .layer import Experts, MoE, MoEConfig, use_experts
from .mesh import ExpertMesh, make_expert_mesh
from .router import Router, Routing
from .traffic import all_to_all_bytes

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
