"""The mesh: rank <-> coordinates, and the groups along its axes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from minidist.launch import run
from minidist.mesh import AXES, MeshShape, make_mesh

SHAPES = [
    MeshShape(dp=dp, pp=pp, cp=cp, tp=tp)
    for dp, pp, cp, tp in itertools.product((1, 2, 3), (1, 2), (1, 3), (1, 2))
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranks_and_coordinates_are_inverse(shape):
    seen = [shape.coordinates(rank) for rank in range(shape.world_size)]
    assert [shape.rank_at(**at) for at in seen] == list(range(shape.world_size))
    assert seen == sorted(seen, key=lambda at: [at[axis] for axis in AXES])  # tp varies fastest


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axes", ["tp", "dp", ("dp", "cp"), ("cp", "dp"), AXES])
def test_groups_along_axes_divide_the_world(shape, axes):
    groups = {shape.ranks_along(axes, rank) for rank in range(shape.world_size)}
    assert sorted(sum(groups, ())) == list(range(shape.world_size))
    assert all(rank in shape.ranks_along(axes, rank) for rank in range(shape.world_size))


def use_mesh(sizes):
    dist.init_process_group("gloo")
    mesh = make_mesh(**sizes, groups=[("dp", "cp"), ("tp", "pp")])
    found = {}
    for axes in (*AXES, ("dp", "cp"), ("pp", "tp")):
        mine = torch.tensor([mesh.rank])
        others = [torch.empty_like(mine) for _ in range(mesh.size(axes))]
        dist.all_gather(others, mine, group=mesh.group(axes))
        found[axes] = tuple(int(t) for t in others)
        assert found[axes] == mesh.ranks(axes)
        assert dist.get_rank(mesh.group(axes)) == mesh.ranks(axes).index(mesh.rank)
    assert mesh.device_mesh["tp"].get_local_rank() == mesh.coordinate("tp")
    assert mesh.rank_at(tp=0) == mesh.rank - mesh.coordinate("tp")
    with pytest.raises(ValueError, match=r"make_mesh made .*groups=\[\('dp', 'tp'\)\]"):
        mesh.group(("dp", "tp"))
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    "sizes", [{}, {"tp": 3}, {"dp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"dp": 2, "cp": 3}], ids=str
)
def test_groups_talk_to_the_ranks_that_the_shape_names(sizes):
    shape = MeshShape(**sizes)
    for rank, found in enumerate(run(use_mesh, shape.world_size, sizes)):
        assert found == {axes: shape.ranks_along(axes, rank) for axes in found}


def wrong_mesh():
    dist.init_process_group("gloo")
    with pytest.raises(ValueError, match=r"dp 2 x pp 1 x cp 1 x tp 2 = 4 ranks.*are 3"):
        make_mesh(dp=2, tp=2)
    dist.barrier()
    return True


def test_sizes_that_do_not_multiply_to_the_world_are_refused_on_every_rank():
    assert run(wrong_mesh, 3) == [True] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MeshShape(tp=0), "tp must be at least 1, got 0"),
        (lambda: MeshShape(tp=2).coordinates(2), "has ranks 0 to 1, got 2"),
        (lambda: MeshShape(tp=2).rank_at(tp=2), "tp goes from 0 to 1, got 2"),
        (lambda: MeshShape(tp=2).rank_at(ep=0), "axes are dp, pp, cp, tp; got ep"),
        (lambda: MeshShape().ranks_along((), 0), "got none"),
    ],
)
def test_wrong_use_says_what_is_right(call, message):
    with pytest.raises(ValueError, match=message):
        call()
