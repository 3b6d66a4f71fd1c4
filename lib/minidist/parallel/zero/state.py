"""State dicts of sharded tensors: pack a rank's part, merge all parts, cut for other ranks.

    rank 0: elements [0, 5) of w ---.                      .--- rank 0 of 3: elements [0, 4)
                                     merge -> w whole, cut ---- rank 1 of 3: elements [4, 8)
    rank 1: elements [5, 9) of w ---'                      '--- rank 2 of 3: elements [8, 9)

A *part* says which elements it has. So merging does not depend on the number of ranks that wrote
the parts, and 3 ranks can read a checkpoint of 4 ranks. Parts are plain dicts of tensors and
numbers: `torch.load` reads them with weights_only=True.

>>> whole = torch.arange(6.0).view(2, 3)
>>> parts = [make_part(whole.view(-1)[b:e], whole.shape, b, e) for b, e in ((0, 4), (4, 6))]
>>> merge_parts(parts)["data"]
tensor([[0., 1., 2.],
        [3., 4., 5.]])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Cut(NamedTuple):
    """Elements [begin, end) of parameter `number` (counted over all groups)."""

    number: int
    shape: torch.Size
    begin: int
    end: int
    is_master: bool = False  # the tensor is a master copy in higher precision, so it is state too

    @property
    def is_elsewhere(self) -> bool:
        """Whether this rank has no element of it. Its optimiser then counts no steps for it."""
        return self.begin == self.end and prod(self.shape) > 0


def make_part(data: Tensor, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    """The part that holds elements [begin, end) of a tensor of `shape`."""
    values = {"data": _to_cpu(data)}
    return {"shape": list(shape), "begin": begin, "end": end, "values": values, "cut": ["data"]}


def merge_parts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole values of one tensor, from the parts of all ranks in any order.

    Raises:
        ValueError: the parts do not make up the tensor, e.g. because a rank's file is missing.
    """
    shape = parts[0]["shape"]
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part["values"]):
        # What every rank has whole counts once.
        own = {(part["begin"], part["end"]): part for part in parts if key in part["values"]}
        having = list(own.values())
        if not any(key in part["cut"] for part in having):
            merged[key] = having[0]["values"][key]  # e.g. a step count: the same on all ranks
            continue
        whole = having[0]["values"][key].new_empty(prod(shape))
        found = 0
        for part in having:
            whole[part["begin"] : part["end"]] = part["values"][key].reshape(-1)
            found += part["end"] - part["begin"]
        if found != whole.numel():
            raise ValueError(
                f"merge: the parts of a tensor of shape {shape} hold {found} of its "
                f"{whole.numel()} elements; is a rank's part missing?"
            )
        merged[key] = whole.view(shape)
    return merged


def gather_parts(
    part: dict[str, Any],
    merge: Callable[[list[dict[str, Any]]], dict[str, Any]],
    group: dist.ProcessGroup,
    rank0_only: bool,
) -> dict[str, Any]:
    """Merge the parts of all ranks of the group, on all ranks or only on its rank 0. Collective."""
    world_size = dist.get_world_size(group)
    parts: list[Any] = [None] * world_size
    if not rank0_only:
        dist.all_gather_object(parts, part, group=group)
        return merge(parts)
    is_first = dist.get_rank(group) == 0
    first = dist.get_global_rank(group, 0)
    dist.gather_object(part, parts if is_first else None, dst=first, group=group)
    return merge(parts) if is_first else {}


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


# -- optimisers ------------------------------------------------------------------------------------


def pack_optimizer_state(
    param_groups: list[dict[str, Any]],
    state: Mapping[Tensor, Mapping[str, Any]],
    cuts: Mapping[Tensor, Cut],
) -> dict[str, Any]:
    """This rank's part of an optimiser's state: groups as in torch, and one part per parameter."""
    groups, number = [], 0
    for group in param_groups:
        numbers = list(range(number, number + len(group["params"])))
        number += len(numbers)
        groups.append({**hyperparameters(group), "params": numbers})
    packed = {}
    for mine, cut in cuts.items():
        values = dict(state.get(mine, {}))
        if cut.is_master:
            values["master"] = mine
        if values and not cut.is_elsewhere:
            packed[cut.number] = {
                "shape": list(cut.shape),
                "begin": cut.begin,
                "end": cut.end,
                "values": {key: _to_cpu(value) for key, value in values.items()},
                "cut": [key for key, value in values.items() if _is_cut(key, value, mine.shape)],
            }
    return {"param_groups": groups, "state": packed}


def merge_optimizer_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The state dict of an ordinary torch optimiser, from the parts of all ranks.

    If a parameter is updated through a master copy, its state has the copy under "master".
    """
    numbers = sorted({number for part in parts for number in part["state"]})
    state = {
        number: merge_parts([part["state"][number] for part in parts if number in part["state"]])
        for number in numbers
    }
    return {"state": state, "param_groups": parts[0]["param_groups"]}


def cut_optimizer_state(
    state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    param_groups: list[dict[str, Any]],
    cuts: Mapping[Tensor, Cut],
    rank: int,
    world_size: int,
) -> None:
    """Load a full state dict, or this rank's own part, into an optimiser over `cuts`.

    Args:
        optimizer: holds this rank's cuts, in as many groups as `param_groups`.
        param_groups: groups of whole parameters, for validation.
    """
    _check_state(state_dict, param_groups, rank, world_size)  # before anything changes
    is_part = "world_size" in state_dict
    saved_numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    # Cut every value to this rank's elements.
    local: dict[int, dict[str, Any]] = {}
    masters: list[tuple[Tensor, Tensor]] = []
    groups, position = [], 0
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        numbers = list(range(position, position + len(group["params"])))
        position += len(numbers)
        groups.append({**hyperparameters(saved), "params": numbers})
        for number, mine in zip(numbers, group["params"], strict=True):
            cut = cuts[mine]
            values = state_dict["state"].get(saved_numbers[cut.number])
            if values is None or cut.is_elsewhere:
                continue
            if is_part:
                if [values["begin"], values["end"]] != [cut.begin, cut.end]:
                    raise ValueError(
                        f"[rank {rank}] load_state_dict: expected elements {cut.begin} to "
                        f"{cut.end} of parameter {cut.number}, got {values['begin']} to "
                        f"{values['end']}"
                    )
                values = dict(values["values"])
            else:
                values = {
                    key: value.reshape(-1)[cut.begin : cut.end].reshape(mine.shape)
                    if _is_cut(key, value, cut.shape)
                    else value
                    for key, value in values.items()
                }
            if "master" in values:
                masters.append((mine, values.pop("master")))
            if values:
                # Clone, because the optimiser must not update the caller's state dict in place.
                local[number] = {
                    k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()
                }
    optimizer.load_state_dict({"state": local, "param_groups": groups})
    with torch.no_grad():
        for mine, value in masters:
            if cuts[mine].is_master:
                mine.copy_(value)


def _check_state(
    state_dict: Mapping[str, Any],
    param_groups: list[dict[str, Any]],
    rank: int,
    world_size: int,
) -> None:
    """Raises ValueError if a state dict is another rank's part, or is for different parameters."""
    if "world_size" in state_dict and (state_dict["rank"], state_dict["world_size"]) != (
        rank,
        world_size,
    ):
        raise ValueError(
            f"[rank {rank}] load_state_dict: the shard of rank {state_dict['rank']} of "
            f"{state_dict['world_size']} does not fit rank {rank} of {world_size}; merge the "
            "shards of all ranks (merge_optimizer_parts), then load the result"
        )
    expected = [len(group["params"]) for group in param_groups]
    got = [len(group["params"]) for group in state_dict["param_groups"]]
    if expected != got:
        raise ValueError(
            f"[rank {rank}] load_state_dict: expected groups of {expected} parameters, got {got}"
        )


def _is_cut(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Whether a value is per element, and so cut like its parameter. ("step" counts steps.)"""
    return isinstance(value, Tensor) and key != "step" and list(value.shape) == list(shape)


def _to_cpu(value: Any) -> Any:
    # A copy, because pickling a view would write the whole storage.
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
