"""What the criteria of lab 3 share: parameters that can be told apart, and shards.

Every value of a drawn model occurs once, so the value of a shard's entry shows which parameter the
entry belongs to. So a submission may cut its parameters as it likes: no layout is prescribed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from autograder.criteria.common import answers
from autograder.criteria.common.answers import is_floats, read
from autograder.criteria.criterion import Values

_meshes = itertools.count()
ALIGNMENT_BYTES = 64  # per parameter: a submission may pad to more than the number of ranks


def distinct(rng: np.random.Generator, shapes: Sequence[tuple[int, ...]], scale: float = 0.3):
    """float32 arrays of these shapes, in which every value occurs once and none is 0."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    total = sum(sizes)
    values = ((rng.permutation(total) + 0.25) / total * 2 - 1).astype(np.float32) * np.float32(
        scale
    )
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def draw_mlp(rng: np.random.Generator, sizes: Sequence[int], scale: float = 0.3) -> Values:
    """Parameters p0, p1, … of `oracle.mlp`; every value occurs once."""
    shapes: list[tuple[int, ...]] = []
    for fan_in, fan_out in pairwise(sizes):
        shapes += [(fan_out, fan_in), (fan_out,)]
    return {f"p{i}": value for i, value in enumerate(distinct(rng, shapes, scale))}


def make_mesh(device_type: str) -> Any:
    """A mesh of one row with all ranks, under a name that no earlier mesh of this process has.

    DTensor caches results per operation and mesh. With an equal mesh, the cache would return the
    mesh of an earlier check, whose process groups are gone.
    """
    from torch.distributed.device_mesh import init_device_mesh

    name = f"shard{next(_meshes)}"
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=(name,))


def linears(model: nn.Module) -> list[nn.Module]:
    """The units of `oracle.mlp`."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor in this rank's memory: the local part of a DTensor, else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The local part as a NumPy array."""
    return to_local(tensor.detach()).detach().float().cpu().numpy().copy()


def local_parameters(fsdp: Any) -> list[torch.Tensor]:
    """What `local_parameters()` returns, checked to be a list of tensors that is not empty."""
    params = read(fsdp.local_parameters(), list, "local_parameters", "a list of tensors")
    for p in params:
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"local_parameters: expected tensors, got {type(p).__name__}")
    if not params:
        raise ValueError("local_parameters: expected this rank's shards, got an empty list")
    return params


@contextmanager
def naming_faults() -> Iterator[None]:
    """Explains torch's error about a parameter without memory; the student's line stays."""
    try:
        yield
    except RuntimeError as error:
        if "storage of size 0" in str(error):
            error.args = (
                "a unit computed while its memory was freed: each unit is gathered before its "
                "forward, and again before its backward, in eval mode as well.",
            )
        raise


def forget_whole_gradients(model: nn.Module, fsdp: Any) -> None:
    """Deletes the gradients that are no shard's; `fsdp_shards` judges whether any stay."""
    shards = {id(p) for p in local_parameters(fsdp)}
    for p in model.parameters():
        if id(p) not in shards:
            p.grad = None


def resident_bytes(tensors: Iterable[torch.Tensor | None], seen: set[int]) -> int:
    """Bytes of the storages behind the tensors; storages in `seen` do not count again."""
    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        storage = to_local(tensor).untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def shard_bound(shapes: Iterable[Sequence[int]], num_ranks: int) -> int:
    """Bytes of 1/N of float32 parameters plus padding, if each is cut along its first dimension."""
    total = 0
    for shape in shapes:
        rows = int(shape[0]) if len(shape) else 1
        total += -(-rows // num_ranks) * (int(np.prod(shape)) // rows) * 4 + ALIGNMENT_BYTES
    return total


def lookup(names: Sequence[str], values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(sorted values, position of each value in the concatenation of all arrays)."""
    flat = np.concatenate([np.asarray(v, dtype=np.float64).ravel() for v in values])
    order = np.argsort(flat, kind="stable")
    return flat[order], order


def find(sorted_values: np.ndarray, order: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The position in the model of each entry of `wanted`; -1 if the model does not have it."""
    place = np.searchsorted(sorted_values, wanted)
    place = np.minimum(place, len(sorted_values) - 1)
    return np.where(sorted_values[place] == wanted, order[place], -1)


def floats_of_shard(value: Any, num_values: int) -> np.ndarray | None:
    """A flat float64 copy of an answer that is an array of finite floats, else None.

    Args:
        num_values: number of values of the whole model. An array with more than twice as many is
            no shard, even with padding, and its float64 copy would be much larger.
    """
    if not is_floats(value) or value.size > 2 * num_values:
        return None
    found = answers.finite_floats(value, value.shape)
    return None if found is None else found.ravel()
