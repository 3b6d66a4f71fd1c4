"""A unit of ZeRO-3: the parameters that are gathered and freed together, usually one block.

Which parameter belongs to which unit:
- a parameter belongs to the innermost unit that contains its layer;
- a parameter outside all units belongs to the root, which is the model itself;
- a parameter that several units share (tied weights) belongs to the root, because the root's
  parameters stay whole during the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minidist.parallel.zero.flat import FlatShard, Slot


class State(Enum):
    """The phase of a unit in a step."""

    SHARDED = auto()  # only the shard exists, or an all-gather is in progress
    FORWARD = auto()  # whole; its forward runs, or has run (if it is not freed afterwards)
    BACKWARD = auto()  # whole, because its backward has begun


class Unit:
    """One module's share of the parameters, and its state.

    Each dtype has a separate `FlatShard`, because one line has one dtype. Frozen parameters also
    have a separate `FlatShard`, so that no gradient travels for them.
    """

    def __init__(self, module: nn.Module, name: str, reshard_after_forward: bool) -> None:
        self.module = module
        self.name = name
        self.reshard_after_forward = reshard_after_forward
        self.flats: list[FlatShard] = []
        self.state = State.SHARDED
        self.num_calls = 0  # forwards whose backward has not run yet
        self.owes_gradients = False  # no_sync() has kept gradients that are not reduced yet

    def shard(
        self,
        params: dict[nn.Parameter, list[Slot]],
        group: dist.ProcessGroup,
        device: torch.device,
        policy: Any,
        offload: bool,
        is_whole: bool = False,
    ) -> dict[nn.Parameter, tuple[FlatShard, int]]:
        """Replace the module's parameters by shards; returns the new place of each parameter."""
        alike: dict[Any, list[nn.Parameter]] = {}
        for param in params:
            alike.setdefault((param.dtype, param.requires_grad), []).append(param)
        homes = {}
        for some in alike.values():
            slots = [params[param] for param in some]
            flat = FlatShard(some, slots, group, device, policy, offload, is_whole)
            self.flats.append(flat)
            homes |= {param: (flat, index) for index, param in enumerate(some)}
        return homes

    @property
    def is_sharded(self) -> bool:
        """Whether only the shards exist, and no all-gather is in progress."""
        return all(flat.is_sharded for flat in self.flats)

    def gather(self) -> None:
        """Start the all-gathers."""
        for flat in self.flats:
            flat.gather()

    def wait(self) -> None:
        """Make the parameters whole."""
        for flat in self.flats:
            flat.wait()

    def free(self) -> None:
        """Keep the shards only."""
        for flat in self.flats:
            flat.free()
        self.state = State.SHARDED

    @property
    def has_gradients(self) -> bool:
        return any(flat.has_gradients for flat in self.flats)


def assign_parameters(
    model: nn.Module, units: Iterable[nn.Module]
) -> dict[nn.Module, dict[nn.Parameter, list[Slot]]]:
    """Which parameters each unit has, and where each parameter is registered.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> assigned = assign_parameters(model, [model[0]])
    >>> [len(assigned[module]) for module in (model, model[0])]
    [1, 1]
    """
    roots = list(dict.fromkeys([model, *units]))
    slots: dict[nn.Parameter, list[Slot]] = {}
    homes: dict[nn.Parameter, set[nn.Module]] = {}
    seen: set[tuple[nn.Module, nn.Module]] = set()

    def visit(module: nn.Module, home: nn.Module) -> None:
        home = module if module in roots else home
        if (module, home) in seen:
            return
        seen.add((module, home))
        for name, param in module._parameters.items():
            if param is not None:
                slot = Slot(module, name)
                if slot not in slots.setdefault(param, []):
                    slots[param].append(slot)
                homes.setdefault(param, set()).add(home)
        for child in module.children():
            visit(child, home)

    visit(model, model)
    assigned: dict[nn.Module, dict[nn.Parameter, list[Slot]]] = {root: {} for root in roots}
    for param, where in homes.items():
        home = next(iter(where)) if len(where) == 1 else model
        assigned[home][param] = slots[param]
    return assigned


@torch.no_grad()
def take_values_of_rank0(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Copy parameters and buffers of the group's rank 0 to all ranks; move buffers to `device`."""
    first = dist.get_global_rank(group, 0)
    for tensor in (*model.parameters(), *model.buffers()):
        value = tensor.to(device).contiguous()
        dist.broadcast(value, src=first, group=group)
        tensor.copy_(value)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def share_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let all ranks continue with the random state of the group's rank 0."""
    on_gpu = device.type == "cuda"
    state = [torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None]
    dist.broadcast_object_list(state, src=dist.get_global_rank(group, 0), group=group)
    assert state[0] is not None
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
