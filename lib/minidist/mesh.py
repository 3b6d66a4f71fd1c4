"""A mesh of data, pipeline, context and tensor parallelism, and the place of each rank in it.

A mesh gives every rank a coordinate on each axis, and one process group per axis: the ranks that
differ from it on that axis only. Tensor parallelism communicates most, so its ranks are neighbours
(the axis varies fastest, and stays inside a node if its size divides the node's). Data parallelism
communicates least often, so it is the outermost axis.

Example, 8 ranks with `dp=2, pp=2, tp=2`:

>>> shape = MeshShape(dp=2, pp=2, tp=2)
>>> shape.coordinates(5)  # 5 = 1 * 4 + 0 * 2 + 1
{'dp': 1, 'pp': 0, 'cp': 0, 'tp': 1}
>>> shape.ranks_along("tp", 5), shape.ranks_along("pp", 5), shape.ranks_along("dp", 5)
((4, 5), (5, 7), (1, 5))

In a distributed program::

    dist.init_process_group(choose_backend())
    mesh = make_mesh(dp=2, tp=2)
    dist.all_reduce(gradient, group=mesh.group("dp"))

Order of the axes as in Megatron-LM (arXiv 2104.04473, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp", "pp", "cp", "tp")  # from slowest to fastest


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """The arithmetic of a mesh, without processes: rank <-> coordinate on each axis."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"mesh: {axis} must be at least 1, got {size}")

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, slowest first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of `rank` on every axis.

        Raises:
            ValueError: the rank lies outside the mesh.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"mesh {self}: has ranks 0 to {self.world_size - 1}, got {rank}")
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.sizes[axis])
        return {axis: found[axis] for axis in AXES}

    def rank_at(self, **coordinates: int) -> int:
        """The rank at a coordinate; an axis that is not named counts as 0."""
        _check_axes(tuple(coordinates))
        rank = 0
        for axis, size in self.sizes.items():
            at = coordinates.get(axis, 0)
            if not 0 <= at < size:
                raise ValueError(f"mesh {self}: {axis} goes from 0 to {size - 1}, got {at}")
            rank = rank * size + at
        return rank

    def ranks_along(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` on `axes` only, itself included, in ascending order."""
        names = _axes(axes)
        own = self.coordinates(rank)
        return tuple(
            other
            for other in range(self.world_size)
            if all(
                at == own[axis] for axis, at in self.coordinates(other).items() if axis not in names
            )
        )


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One rank's view of the mesh. `make_mesh` makes it; it is passed to whatever needs it."""

    shape: MeshShape
    rank: int
    device_mesh: DeviceMesh  # torch's form of the same mesh, with the same names of axes
    _groups: dict[tuple[str, ...], dist.ProcessGroup] = field(repr=False)

    @property
    def sizes(self) -> dict[str, int]:
        return self.shape.sizes

    @property
    def world_size(self) -> int:
        return self.shape.world_size

    def size(self, axes: str | Sequence[str]) -> int:
        """Number of ranks along one axis, or along several taken together."""
        return prod(self.sizes[axis] for axis in _axes(axes))

    def coordinate(self, axis: str) -> int:
        """Where this rank stands on `axis`."""
        _check_axes((axis,))
        return self._coordinates[axis]

    @cached_property
    def _coordinates(self) -> dict[str, int]:
        return self.shape.coordinates(self.rank)

    def ranks(self, axes: str | Sequence[str]) -> tuple[int, ...]:
        """Global ranks of `group(axes)`, in its order."""
        return self.shape.ranks_along(axes, self.rank)

    def group(self, axes: str | Sequence[str]) -> dist.ProcessGroup:
        """Process group along `axes`. Rank i of it is `ranks(axes)[i]`.

        Several axes have a group of their own only if `make_mesh` was asked for it.
        """
        names = _axes(axes)
        if names not in self._groups:
            raise ValueError(
                f"mesh {self.shape}: no group for {names}; make_mesh made {sorted(self._groups)}, "
                f"ask it for this one with groups=[{names}]"
            )
        return self._groups[names]

    def rank_at(self, **coordinates: int) -> int:
        """Global rank at a coordinate; an axis that is not named is this rank's own."""
        return self.shape.rank_at(**(self.shape.coordinates(self.rank) | coordinates))


def make_mesh(
    *,
    dp: int = 1,
    pp: int = 1,
    cp: int = 1,
    tp: int = 1,
    groups: Sequence[Sequence[str]] = (("dp", "cp"),),
    device_type: str | None = None,
) -> Mesh:
    """Lay a mesh over the default process group. Every rank has to call it, with the same sizes.

    Args:
        groups: sets of axes that get a joint group. Gradients are averaged over ("dp", "cp"):
            context-parallel ranks see different tokens of the same sequences.
        device_type: "cpu" or "cuda"; None means what the default group's backend works on.

    Raises:
        ValueError: the sizes do not multiply to the world size.
    """
    # Validate before any communication, so that a wrong call ends on every rank alike.
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    shape = MeshShape(dp=dp, pp=pp, cp=cp, tp=tp)
    joint = [_axes(names) for names in groups]
    world_size = dist.get_world_size()
    if shape.world_size != world_size:
        raise ValueError(f"mesh {shape} = {shape.world_size} ranks, but there are {world_size}")

    # torch makes the group of each axis ...
    if device_type is None:
        device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    device_mesh = init_device_mesh(device_type, tuple(shape.sizes.values()), mesh_dim_names=AXES)
    made: dict[tuple[str, ...], Any] = {(axis,): device_mesh.get_group(axis) for axis in AXES}

    # ... and we make the joint ones: every rank has to take part in making every group.
    rank = dist.get_rank()
    for names in joint:
        own = [axis for axis in names if shape.sizes[axis] > 1]
        if len(own) == 1:
            made[names] = made[own[0],]
        elif names not in made:
            made[names] = _make_groups(shape, names, rank)
    return Mesh(shape=shape, rank=rank, device_mesh=device_mesh, _groups=made)


def _make_groups(shape: MeshShape, names: tuple[str, ...], rank: int) -> dist.ProcessGroup:
    import torch.distributed as dist

    # Every rank makes every group, its own or not, in the same order.
    every = sorted({shape.ranks_along(names, other) for other in range(shape.world_size)})
    groups: dict[tuple[int, ...], Any] = {ranks: dist.new_group(list(ranks)) for ranks in every}
    return groups[shape.ranks_along(names, rank)]


def _axes(axes: str | Sequence[str]) -> tuple[str, ...]:
    """Names in the mesh's order: ("cp", "dp") and ("dp", "cp") are the same group."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    _check_axes(names)
    return tuple(axis for axis in AXES if axis in names)


def _check_axes(names: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in AXES]
    if unknown or not names:
        raise ValueError(f"mesh: axes are {', '.join(AXES)}; got {', '.join(unknown) or 'none'}")
