"""From FSDP1 (`FullyShardedDataParallel`) to FSDP2 (`fully_shard`), option by option, as data.

>>> plan = fsdp1_to_fsdp2({"sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": True})
>>> plan.arguments
{'reshard_after_forward': False}
>>> print(plan.reasons["use_orig_params"])
nothing to write: parameters are never flattened, each stays a DTensor with its name and shape
>>> hybrid = {"sharding_strategy": "HYBRID_SHARD"}
>>> fsdp1_to_fsdp2(hybrid, world_size=16, ranks_per_node=8).mesh_shape
(2, 8)

FSDP1 wraps a module and flattens its parameters; FSDP2 changes the module in place and keeps each
parameter separate.
PyTorch FSDP: arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of FSDP1, or one of its methods, and what replaces it.

    Args:
        instead: what to write with FSDP2; empty if FSDP2 needs nothing.
        reason: why.
    """

    name: str
    instead: str
    reason: str


FSDP1_OPTIONS: tuple[Option, ...] = (
    Option(
        name="process_group",
        instead="mesh=init_device_mesh(…)",
        reason="a mesh names its axes, so other parallelisms can share it; a 1-D one shards, of a "
        "2-D one the first axis replicates and the second shards",
    ),
    Option(
        name="device_mesh",
        instead="mesh=…",
        reason="the same mesh under a shorter name",
    ),
    Option(
        name="sharding_strategy",
        instead="reshard_after_forward=… and the shape of the mesh",
        reason="the strategies were combinations of two questions: is a parameter freed between "
        "forward and backward, and over which ranks is it sharded or replicated",
    ),
    Option(
        name="cpu_offload",
        instead="offload_policy=CPUOffloadPolicy()",
        reason="shards, gradients and optimiser state live on the CPU; pin_memory=False where "
        "there is no GPU",
    ),
    Option(
        name="auto_wrap_policy",
        instead="for block in model.blocks: fully_shard(block); then fully_shard(model)",
        reason="the units are written down, inner ones first; a policy by size can cut through a "
        "block, so that nothing overlaps",
    ),
    Option(
        name="backward_prefetch",
        instead="",
        reason="BACKWARD_PRE is built in; set_modules_to_backward_prefetch sets a different order; "
        "BACKWARD_POST and None saved memory by giving up the overlap",
    ),
    Option(
        name="forward_prefetch",
        instead="model.set_modules_to_forward_prefetch([…])",
        reason="the next unit's all-gather is already issued from the CPU ahead of the GPU; only a "
        "CPU that cannot keep up needs it earlier",
    ),
    Option(
        name="limit_all_gathers",
        instead="",
        reason="it kept the CPU from running ahead and filling memory; memory is now freed without "
        "record_stream, so there is nothing to limit",
    ),
    Option(
        name="mixed_precision",
        instead="mp_policy=MixedPrecisionPolicy(param_dtype=…, reduce_dtype=…, "
        "cast_forward_inputs=…)",
        reason="the same two dtypes; buffers are never cast (cast them yourself), gradients are "
        "always in the dtype of the sharded parameter, and whether inputs are cast is said per "
        "unit: by default those of all units are, in FSDP1 the root's only",
    ),
    Option(
        name="ignored_modules",
        instead="ignored_params={p for m in modules for p in m.parameters()}",
        reason="parameters are what is ignored; they stay whole, and averaging their gradients is "
        "up to you",
    ),
    Option(
        name="ignored_states",
        instead="ignored_params={…}",
        reason="the same, as a set of parameters",
    ),
    Option(
        name="param_init_fn",
        instead="build on torch.device('meta'); fully_shard; model.to_empty(device=…); initialise",
        reason="initialisation comes after sharding, and needs memory for shards only",
    ),
    Option(
        name="device_id",
        instead="torch.cuda.set_device(local_rank), and a mesh of that device type",
        reason="a model on the CPU is moved to the mesh's device when it is sharded",
    ),
    Option(
        name="sync_module_states",
        instead="set_model_state_dict(model, state, options=StateDictOptions("
        "full_state_dict=True, broadcast_from_rank0=True))",
        reason="constructing and loading are separate; rank 0 sends each rank only its shards. "
        "With the same seed on all ranks there is nothing to send",
    ),
    Option(
        name="use_orig_params",
        instead="",
        reason="nothing to write: parameters are never flattened, each stays a DTensor with its "
        "name and shape",
    ),
    # Methods.
    Option(
        name="state_dict_type",
        instead="get_model_state_dict(model, options=StateDictOptions(full_state_dict=…, "
        "cpu_offload=…)), on all ranks",
        reason="model.state_dict() is always sharded (DTensors); a full one is asked for "
        "explicitly, and all ranks take part whichever of them saves it",
    ),
    Option(
        name="no_sync",
        instead="model.set_requires_gradient_sync(is_last_microbatch)",
        reason="a flag that is set before forward replaces the context manager",
    ),
    Option(
        name="clip_grad_norm_",
        instead="torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        reason="norms of DTensors are global; the result is a DTensor, full_tensor() is its value",
    ),
    Option(
        name="summon_full_params",
        instead="model.unshard() … model.reshard(), or param.full_tensor()",
        reason="for one unit or one parameter; collective",
    ),
)
_BY_NAME = {option.name: option for option in FSDP1_OPTIONS}

# strategy -> (reshard_after_forward, replicated between nodes?, reason)
_STRATEGIES: dict[str, tuple[bool, bool, str]] = {
    "FULL_SHARD": (True, False, "ZeRO-3: freed after forward, gathered again for backward"),
    "SHARD_GRAD_OP": (False, False, "ZeRO-2's traffic: gathered once, kept until backward is over"),
    "HYBRID_SHARD": (True, True, "ZeRO-3 inside a node, gradients all-reduced between nodes"),
    "_HYBRID_SHARD_ZERO2": (False, True, "as HYBRID_SHARD, but kept until backward is over"),
}


@dataclass(frozen=True, kw_only=True)
class Migration:
    """What to write instead of a call of FSDP1.

    Args:
        arguments: keyword arguments of `fully_shard`, for every unit.
        mesh_shape: shape of the mesh that `fully_shard` needs; None for a 1-D mesh over all ranks.
        steps: changes that are not arguments of `fully_shard`, as code or words.
        reasons: the reason for each option's replacement.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    mesh_shape: tuple[int, ...] | None = None
    steps: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)


def fsdp1_to_fsdp2(
    options: Mapping[str, Any], *, world_size: int | None = None, ranks_per_node: int | None = None
) -> Migration:
    """Translate the keyword arguments of an FSDP1 call.

    Args:
        options: name -> value. Enums may be given by name ("FULL_SHARD").
        world_size, ranks_per_node: needed for hybrid strategies, to shape their mesh.

    Raises:
        ValueError: an option or a value that FSDP1 does not have, or NO_SHARD, which is DDP.
    """
    unknown = [name for name in options if name not in _BY_NAME]
    if unknown:
        raise ValueError(f"fsdp1_to_fsdp2: FSDP1 has no option {', '.join(unknown)}")
    arguments: dict[str, Any] = {}
    mesh_shape: tuple[int, ...] | None = None
    steps: list[str] = []
    reasons = {name: _BY_NAME[name].reason for name in options}
    for name, value in options.items():
        if name == "sharding_strategy":
            strategy = getattr(value, "name", value) or "FULL_SHARD"
            arguments["reshard_after_forward"], is_hybrid, reasons[name] = _strategy(strategy)
            if is_hybrid:
                mesh_shape = _hybrid_mesh(strategy, world_size, ranks_per_node)
        elif name == "mixed_precision":
            if value is not None:
                arguments["mp_policy"] = _policy(value)
                steps += _policy_steps(value)
        elif name == "cpu_offload":
            if getattr(value, "offload_params", value):
                arguments["offload_policy"] = _offload()
        elif name in ("ignored_modules", "ignored_states"):
            arguments["ignored_params"] = arguments.get("ignored_params", set()) | _parameters(
                value
            )
        elif name == "device_mesh":
            arguments["mesh"] = value
        elif value not in (None, False) and _BY_NAME[name].instead:
            steps.append(_BY_NAME[name].instead)
    return Migration(
        arguments=arguments, mesh_shape=mesh_shape, steps=tuple(steps), reasons=reasons
    )


def _strategy(name: str) -> tuple[bool, bool, str]:
    if name == "NO_SHARD":
        raise ValueError(
            "fsdp1_to_fsdp2: NO_SHARD shards nothing: use DistributedDataParallel, or a mesh of "
            "shape (world_size, 1)"
        )
    if name not in _STRATEGIES:
        known = ", ".join([*_STRATEGIES, "NO_SHARD"])
        raise ValueError(f"fsdp1_to_fsdp2: sharding_strategy is one of {known}; got {name!r}")
    return _STRATEGIES[name]


def _hybrid_mesh(
    strategy: str, world_size: int | None, ranks_per_node: int | None
) -> tuple[int, int]:
    if not world_size or not ranks_per_node or world_size % ranks_per_node:
        raise ValueError(
            f"fsdp1_to_fsdp2: {strategy} needs a world_size that is a multiple of ranks_per_node, "
            f"got {world_size} and {ranks_per_node}"
        )
    return world_size // ranks_per_node, ranks_per_node


def _policy(value: Any) -> MixedPrecisionPolicy:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if value is True:
        raise ValueError(
            "fsdp1_to_fsdp2: mixed_precision is not a switch but a MixedPrecision(param_dtype=…), "
            "in FSDP1, too"
        )
    return MixedPrecisionPolicy(
        param_dtype=value.param_dtype,
        reduce_dtype=value.reduce_dtype,
        cast_forward_inputs=value.cast_forward_inputs,
    )


def _policy_steps(value: Any) -> list[str]:
    """Steps for the fields of FSDP1's MixedPrecision that FSDP2's policy does not have."""
    steps = []
    if value.cast_root_forward_inputs != value.cast_forward_inputs:
        steps.append(
            "fully_shard(model, mp_policy=replace(policy, cast_forward_inputs="
            f"{value.cast_root_forward_inputs})) for the root, whose inputs FSDP1 treats apart"
        )
    if value.buffer_dtype is not None:
        steps.append(
            f"for b in model.buffers(): if b.is_floating_point(): b.data = b.data.to("
            f"{value.buffer_dtype}), before fully_shard, which leaves buffers as they are"
        )
    if value.keep_low_precision_grads:
        steps.append(
            f"model.to({value.param_dtype}) before fully_shard, with an optimizer that keeps its "
            "own fp32 copy: a gradient always gets the dtype of its sharded parameter, so "
            "keep_low_precision_grads alone has no counterpart"
        )
    if value._module_classes_to_ignore and value.param_dtype is not None:
        names = ", ".join(kind.__name__ for kind in value._module_classes_to_ignore)
        steps.append(
            f"fully_shard(m, mp_policy=MixedPrecisionPolicy()) first for every module m of "
            f"{names}: FSDP1 keeps them in full precision by itself"
        )
    return steps


def _offload() -> Any:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy

    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


def _parameters(values: Any) -> set[Any]:
    found: set[Any] = set()
    for value in values or ():
        found |= set(value.parameters()) if hasattr(value, "parameters") else {value}
    return found
