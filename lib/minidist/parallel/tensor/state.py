"""Whole parameters from the parts and back, and the norm of a gradient that is in parts.

Example::

    state = full_state_dict(model)                    # on every rank, as of the unsplit model
    load_full_state_dict(other_model, state)          # split over any number of ranks

The modules say which parameters are split (`ShardedModule.shards`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.errors import named_rank
from minidist.parallel.tensor.config import TensorParallel
from minidist.parallel.tensor.layers import ShardedModule
from minidist.parallel.tensor.mappings import all_gather
from minidist.replaced import shared_names


def sharded_parameters(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Name -> (split dimension, its size in the whole parameter). Others are replicated."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedModule):
            for name, shard in module.shards.items():
                if getattr(module, name, None) is not None:
                    found[f"{prefix}.{name}" if prefix else name] = shard
    return found


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the unsplit model, on every rank. All ranks of the group must call it."""
    tp = _tensor_parallel(model)
    shards = sharded_parameters(model)
    full = {}
    for name, tensor in model.state_dict().items():
        if name in shards:
            dim, full_size = shards[name]
            full[name] = all_gather(tensor, dim, tp.group).narrow(dim, 0, full_size).clone()
        else:
            full[name] = tensor.clone()
    return full


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the state of an unsplit model; each rank takes its parts. No communication.

    Raises:
        ValueError: names or shapes are not those of the unsplit model.
    """
    tp = _tensor_parallel(model)
    shards = sharded_parameters(model)
    own = model.state_dict()
    if own.keys() != state.keys():
        extra = sorted(state.keys() - own.keys())
        raise ValueError(
            f"load_full_state_dict: {named_rank(tp.group)}: names of the state are not those of "
            f"the model: expected {sorted(own.keys() - state.keys())} as well, got {extra} besides"
        )
    for name, tensor in own.items():
        expected = list(tensor.shape)
        if name in shards:
            dim, full_size = shards[name]
            expected[dim] = full_size
        if list(state[name].shape) != expected:
            raise ValueError(
                f"load_full_state_dict: {named_rank(tp.group)}: {name}: expected shape "
                f"{tuple(expected)}, got {tuple(state[name].shape)}"
            )
    for first, *others in shared_names(model):
        for name in others:
            if not torch.equal(state[first], state[name]):
                raise ValueError(
                    f"load_full_state_dict: {named_rank(tp.group)}: {first} and {name} are one "
                    "parameter of this model, but the state has different values for them"
                )
    parts = {}
    for name, whole in state.items():
        parts[name] = whole
        if name in shards:
            dim, full_size = shards[name]
            padding = own[name].shape[dim] * tp.size - full_size  # of the vocabulary
            pad = [0, 0] * (whole.ndim - 1 - dim) + [0, padding]
            parts[name] = tp.part(F.pad(whole, pad), dim)
    if not any(tensor.is_meta for tensor in own.values()):
        model.load_state_dict(parts)
        return
    # On the meta device there is no memory to copy into, so parameters are replaced. Shared
    # parameters must be shared again afterwards.
    owners: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    shared = [(name, owners.setdefault(id(p), name)) for name, p in named]
    model.load_state_dict(parts, assign=True)
    for name, owner in shared:
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(owner))


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`.

    The squares of split gradients are summed over the ranks; replicated gradients, which are equal
    on all ranks, count once. Returns the norm before scaling, the same value on every rank.
    """
    tp = _tensor_parallel(model)
    shards = sharded_parameters(model)
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    squares = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for name, grad in named:
        squares[0 if name in shards else 1] += grad.double().pow(2).sum()
    dist.all_reduce(squares[:1], group=tp.group)
    norm = squares.sum().sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, grad in named:
        grad.mul_(scale.to(grad.dtype))
    return norm


def _tensor_parallel(model: nn.Module) -> TensorParallel:
    for module in model.modules():
        if isinstance(module, ShardedModule):
            return module.tp
    raise ValueError("expected a model with tensor-parallel layers, found none")
