"""Checkpoints: whole or not at all, checked, read by other numbers and layouts of ranks."""

from __future__ import annotations

import json
import os
import signal
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minidist.average import WeightAverage
from minidist.checkpoint import (
    CheckpointError,
    Checkpoints,
    Shard,
    load_dcp,
    save_dcp,
    shards_of,
)
from minidist.checkpoint.shards import Box, overlap
from minidist.errors import LaunchError
from minidist.launch import run
from minidist.mesh import make_mesh
from minidist.parallel.zero import ShardedOptimizer, Zero3
from minidist.precision import MasterWeights


class Value:
    """The least that has state."""

    def __init__(self, value) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def init():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def done(result=None):
    dist.barrier()
    dist.destroy_process_group()
    return result


# -- one process ---------------------------------------------------------------------------------


def save(checkpoints, step, value=None):
    return checkpoints.save(step, shared={"x": Value(step if value is None else value)})


def test_the_newest_is_loaded_and_old_ones_are_deleted(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.load(shared={"x": Value(0)}) is None
    for step in (10, 20, 30):
        assert save(checkpoints, step).name == f"step-{step:08d}"
    assert checkpoints.steps() == [20, 30]
    x = Value(0)
    assert Checkpoints(tmp_path).load(shared={"x": x}) == 30
    assert x.value == 30
    save(checkpoints, 30, "again")  # a run that was set back replaces it
    assert Checkpoints(tmp_path).load(shared={"x": x}) == 30
    assert x.value == "again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]


def flip_a_byte(folder):
    data = bytearray((folder / "shared.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "shared.pt").write_bytes(data)


DAMAGE = {
    "a byte": flip_a_byte,
    "half a file": lambda f: (f / "shared.pt").write_bytes((f / "shared.pt").read_bytes()[:100]),
    "a lost file": lambda f: (f / "shared.pt").unlink(),
    "no manifest": lambda f: (f / "manifest.json").unlink(),
    "half a manifest": lambda f: (f / "manifest.json").write_text('{"format": 1, "fi'),
    "another manifest": lambda f: (f / "manifest.json").write_text("[]"),
    "a later format": lambda f: (f / "manifest.json").write_text('{"format": 2, "files": {}}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_one_is_passed_over_with_a_warning(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    damage(save(checkpoints, 2))
    x = Value(0)
    with pytest.warns(UserWarning, match="checkpoint of step 2 is damaged and not used"):
        assert checkpoints.load(shared={"x": x}) == 1
    assert x.value == 1


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("damaged", [(100,), (90, 100)])
def test_a_run_that_was_set_back_keeps_what_it_saves(tmp_path, keep, damaged):
    for step in (40, 50, *damaged):
        folder = save(Checkpoints(tmp_path, keep=9), step)
        if step in damaged:
            flip_a_byte(folder)
    checkpoints = Checkpoints(tmp_path, keep=keep)
    with pytest.warns(UserWarning, match="damaged"):
        assert checkpoints.load(shared={"x": Value(0)}) == 50
    save(checkpoints, 60)
    assert checkpoints.steps() == [*(50, 60)[-keep:], *damaged]
    with pytest.warns(UserWarning, match="damaged"):
        assert Checkpoints(tmp_path).load(shared={"x": Value(0)}) == 60
    save(checkpoints, 100)  # in the place of a damaged one
    assert checkpoints.steps() == [*(60, 100)[-keep:]]
    save(checkpoints, 110)
    assert checkpoints.steps() == [*(100, 110)[-keep:]]
    assert Checkpoints(tmp_path).load(shared={"x": Value(0)}) == 110


def die_while_replacing(directory):
    checkpoints = Checkpoints(directory, keep=1)
    save(checkpoints, 1)
    kind = type(checkpoints.directory)
    rename = kind.rename

    def rename_or_die(path, target):
        if path.suffix == ".writing":
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    kind.rename = rename_or_die
    save(checkpoints, 1, "again")


def test_a_job_that_dies_while_it_replaces_has_the_old_one(tmp_path):
    with pytest.raises(LaunchError, match="SIGKILL"):
        run(die_while_replacing, 1, str(tmp_path))
    assert not (tmp_path / "step-00000001").exists()
    x = Value(0)
    assert Checkpoints(tmp_path).load(shared={"x": x}) == 1
    assert x.value == 1


def die_while_writing(directory, moment):
    checkpoints = Checkpoints(directory)
    save(checkpoints, 1)

    def write(folder):
        (folder / "shared.pt").write_bytes(b"half of it")
        if moment == "write":
            os.kill(os.getpid(), signal.SIGKILL)

    if moment == "rename":
        type(checkpoints.directory).rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save_files(2, write)


@pytest.mark.parametrize("moment", ["write", "rename"])
def test_a_job_that_dies_while_it_saves_loses_only_that_save(tmp_path, moment):
    with pytest.raises(LaunchError, match="SIGKILL"):
        run(die_while_writing, 1, str(tmp_path), moment)
    assert (tmp_path / "step-00000002.writing").exists()
    x = Value(0)
    checkpoints = Checkpoints(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoints.load(shared={"x": x}) == 1
    save(checkpoints, 2)  # what was left behind is not in the way
    assert checkpoints.load(shared={"x": x}) == 2


def test_a_failed_save_leaves_the_earlier_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    def fail(folder):
        raise OSError("no space left on device")

    with pytest.raises(CheckpointError, match=r"could not write .*: rank 0: .*no space left"):
        checkpoints.save_files(2, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_async_saves_what_was_there_when_it_was_called(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    saving = checkpoints.save_async(1, shared={"model": model})
    with torch.no_grad():
        model.weight.zero_()
    assert saving.wait().name == "step-00000001"
    assert checkpoints.load(shared={"model": model}) == 1
    assert torch.equal(model.weight, before)
    with pytest.raises(CheckpointError, match=r"shared\['bad'\]\['value'\] is a function"):
        checkpoints.save_async(2, shared={"bad": Value(lambda: 0)})


def test_wrong_use_says_what_is_right(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match=r"shape \(3,\) at \(2,\) does not lie inside .*\(4,\)"):
        Shard(tensor=torch.zeros(3), global_shape=(4,), offsets=(2,))
    with pytest.raises(ValueError, match="'a' is int, not a tensor"):
        shards_of({"a": 3})
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    with pytest.raises(CheckpointError, match=r"has \['x'\], but not \['y'\]"):
        checkpoints.load(shared={"y": Value(0)})
    part = Shard(tensor=torch.zeros(2), global_shape=(4,), offsets=(0,))
    with pytest.raises(ValueError, match="hold 2 of the 4 elements of 'w'"):
        checkpoints.save(2, sharded={"w": part})
    rest = Shard(tensor=torch.ones(2), global_shape=(4,), offsets=(2,))
    checkpoints.save(3, sharded={"w": [part, rest]})
    with pytest.raises(CheckpointError, match="has no 'v'"):
        checkpoints.load(sharded={"v": part})
    other = Shard(tensor=torch.zeros(5), global_shape=(5,), offsets=(0,))
    with pytest.raises(CheckpointError, match=r"has shape \(4,\), expected \(5,\)"):
        checkpoints.load(sharded={"w": other})


# -- parts of tensors ----------------------------------------------------------------------------

side = st.integers(0, 5)


@st.composite
def two_boxes(draw):
    num_dims = draw(st.integers(0, 3))
    pick = st.tuples(*[side] * num_dims)
    return [Box(draw(pick), draw(pick)) for _ in range(2)]


@given(two_boxes())
@settings(derandomize=True, max_examples=200, deadline=None)
def test_overlap_is_what_two_masks_share(boxes):
    whole = torch.zeros((10,) * len(boxes[0].offsets), dtype=torch.int64)
    for box in boxes:
        whole[box.within(Box((0,) * whole.dim(), whole.shape))] += 1
    common = overlap(*boxes)
    assert (0 if common is None else common.numel) == int((whole == 2).sum())


def split(total, parts, index):
    """Begin and length of part `index`; sizes may differ by one."""
    begin = total * index // parts
    return begin, total * (index + 1) // parts - begin


def write_1d(directory, total):
    rank, world_size = init()
    begin, length = split(total, world_size, rank)
    shard = Shard(
        tensor=torch.arange(begin, begin + length).float(),
        global_shape=(total,),
        offsets=(begin,),
    )
    Checkpoints(directory).save(1, sharded={"flat": shard})
    return done()


def read_1d(directory, total):
    rank, world_size = init()
    begin, length = split(total, world_size, rank)
    mine = torch.full((length,), -1.0)
    shard = Shard(tensor=mine, global_shape=(total,), offsets=(begin,))
    assert Checkpoints(directory).load(sharded={"flat": shard}) == 1
    return done(mine)


@pytest.mark.parametrize("total", [0, 1, 3, 17])
def test_four_ranks_write_two_then_three_read(tmp_path, total):
    run(write_1d, 4, str(tmp_path), total)
    for readers in (2, 3, 1):
        got = torch.cat(run(read_1d, readers, str(tmp_path), total))
        assert torch.equal(got, torch.arange(total).float())


def layout(directory, sizes, load):
    """A matrix split by rows over tp, replicated over dp; or read by columns."""
    init()
    mesh = make_mesh(**sizes)
    whole = torch.arange(5 * 6).float().view(5, 6)
    at, parts = mesh.coordinate("tp"), mesh.size("tp")
    dim = 1 if load else 0
    begin, length = split(whole.shape[dim], parts, at)
    part = whole.narrow(dim, begin, length).contiguous()
    offsets = (0, begin) if load else (begin, 0)
    checkpoints = Checkpoints(directory)
    if load:
        shard = Shard(tensor=torch.zeros_like(part), global_shape=(5, 6), offsets=offsets)
        checkpoints.load(sharded={"w": shard})
        assert torch.equal(shard.tensor, part)
    else:
        checkpoints.save(1, sharded={"w": Shard(tensor=part, global_shape=(5, 6), offsets=offsets)})
    return done()


def test_another_layout_of_data_and_tensor_parallelism_reads_it(tmp_path):
    run(layout, 4, str(tmp_path), {"dp": 2, "tp": 2}, False)
    index = json.loads((tmp_path / "step-00000001" / "index.json").read_text())
    assert len(index["w"]["boxes"]) == 2  # replicas are written once
    run(layout, 3, str(tmp_path), {"tp": 3}, True)
    run(layout, 4, str(tmp_path), {"dp": 2, "tp": 2}, True)


# -- several ranks -------------------------------------------------------------------------------


def save_and_load(directory):
    rank, _ = init()
    checkpoints = Checkpoints(directory)
    shared, local = Value("from rank 0" if rank == 0 else "wrong"), Value(rank)
    checkpoints.save_async(1, shared={"s": shared}, local={"l": local})
    # Training's own collectives go on meanwhile.
    for _ in range(50):
        dist.all_reduce(torch.ones(10))
    checkpoints.save(2, shared={"s": shared}, local={"l": local})
    shared.value, local.value = None, None
    assert checkpoints.load(shared={"s": shared}, local={"l": local}) == 2
    return done((shared.value, local.value, checkpoints.steps()))


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_state_is_rank_0s_and_local_state_ones_own(tmp_path, world_size):
    results = run(save_and_load, world_size, str(tmp_path))
    assert results == [("from rank 0", rank, [1, 2]) for rank in range(world_size)]
    with pytest.raises(CheckpointError, match=f"saved by {world_size} ranks.*any_world_size"):
        Checkpoints(tmp_path).load(shared={"s": Value(0)}, local={"l": Value(0)})
    local = Value("untouched")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load(shared={"s": Value(0)}, local={"l": local}, any_world_size=True) == 2
    assert local.value == "untouched"


class Broken:
    def state_dict(self):
        raise RuntimeError("out of memory")


def one_rank_has_no_state(directory, asynchronous):
    rank, _ = init()
    checkpoints = Checkpoints(directory)
    save = checkpoints.save_async if asynchronous else checkpoints.save
    with pytest.raises(CheckpointError) as caught:
        save(1, local={"l": Broken() if rank == 1 else Value(0)})
    return done(str(caught.value))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_if_one_rank_cannot_give_its_state_all_say_so(tmp_path, asynchronous):
    texts = run(one_rank_has_no_state, 3, str(tmp_path), asynchronous)
    assert all("take the states: rank 1: RuntimeError: out of memory" in text for text in texts)
    assert list(tmp_path.iterdir()) == []


def no_space(*_):
    raise OSError("no space left")


def one_rank_cannot_write(directory):
    rank, _ = init()
    checkpoints = Checkpoints(directory)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch, "save", no_space)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(1, local={"l": Value(0)})
    dist.all_reduce(torch.ones(1))  # nobody hangs, and the run can go on
    return done(str(caught.value))


def test_if_one_rank_cannot_write_all_say_so(tmp_path):
    texts = run(one_rank_cannot_write, 3, str(tmp_path))
    for rank, text in enumerate(texts):
        assert text.startswith(f"[rank {rank}] could not write")
        assert "rank 1: " in text
        assert "rank 2: " not in text
    assert list(tmp_path.iterdir()) == []


def fsdp(directory, load):
    from torch.distributed.fsdp import fully_shard

    init()
    mesh = make_mesh(dp=dist.get_world_size()).device_mesh["dp"]
    torch.manual_seed(1 if load else 0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(directory + "/dcp")
    ours = Checkpoints(directory + "/ours")
    if load:
        assert load_dcp(checkpoints, model, optimizer) == 7
        by_dcp = [p.full_tensor().detach() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert ours.load(sharded=shards_of(model)) == 7
        again = [p.full_tensor().detach() for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(by_dcp, again, strict=True))
    for _ in range(1 if load else 2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not load and not ours.steps():
            save_dcp(checkpoints, 7, model, optimizer)
            ours.save(7, sharded=shards_of(model))
    return done([p.full_tensor().detach() for p in model.parameters()])


def test_fsdp2_goes_on_at_another_world_size(tmp_path):
    """Parameters and AdamW's moments of 4 ranks are loaded by 2, 3 and 1."""
    want = run(fsdp, 4, str(tmp_path), False)[0]
    for world_size in (2, 3, 1):
        for got in run(fsdp, world_size, str(tmp_path), True):
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


# -- what ranks do differently -----------------------------------------------------------------


def test_steps_are_whole_numbers_of_any_kind(tmp_path):
    for step in (np.int64(3), torch.tensor(4)):
        checkpoints = Checkpoints(tmp_path)
        save(checkpoints, step, "x")
        assert checkpoints.load(shared={"x": Value(0)}) == int(step)
    for wrong in (-1, 5.0):
        with pytest.raises(CheckpointError, match=r"at least 0|'float'"):
            save(Checkpoints(tmp_path), wrong)
    assert Checkpoints(tmp_path).steps() == [3, 4]


def refused_on_every_rank(directory):
    early = Checkpoints(directory)
    rank, _ = init()
    for use in (lambda: save(early, 1), lambda: early.load(shared={"x": Value(0)})):
        with pytest.raises(CheckpointError, match="made before init_process_group"):
            use()
    with pytest.raises(CheckpointError, match=r"one step.*got \[1, 2\]"):
        Checkpoints(directory).save(1 + rank, shared={"x": Value(0)})
    apart = directory / str(rank)
    with pytest.raises(CheckpointError, match=r"rank 1: .*not there, which rank 0 has just made"):
        Checkpoints(apart).save(1, shared={"x": Value(0)})
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = ShardedOptimizer(nn.Linear(3, 3).parameters(), torch.optim.Adam, lr=0.1)
    zero = Zero3(model, units=list(model))
    adam = torch.optim.Adam(model.parameters())
    masters = MasterWeights(model.parameters(), torch.optim.Adam)
    for part in (sharded, adam, masters, WeightAverage(model.parameters())):
        for use in (Checkpoints(directory).save, lambda _, **kw: Checkpoints(directory).load(**kw)):
            Checkpoints(directory).save(7, shared={"part": Value(0)})
            with pytest.raises(
                CheckpointError, match=f"{type(part).__name__}, holds a different part"
            ):
                use(8, shared={"part": part})
    del zero
    done()


def test_what_would_mix_ranks_up_is_refused_on_every_rank(tmp_path):
    run(refused_on_every_rank, 2, tmp_path)


class Gathered(Value):
    """Its state is put together by all ranks, like a full state dict."""

    def state_dict(self):
        total = torch.tensor(self.value)
        dist.all_reduce(total)
        return {"value": total.item()}


def save_gathered(directory):
    rank, _ = init()
    checkpoints = Checkpoints(directory, timeout_s=60)
    checkpoints.save(1, shared={"x": Gathered(rank + 1)})
    checkpoints.save_async(2, shared={"x": Gathered(rank + 2)}).wait(60)
    x = Value(None)
    checkpoints.load(shared={"x": x})
    return done(x.value)


def test_a_collective_state_dict_may_be_shared(tmp_path):
    assert run(save_gathered, 2, tmp_path, deadline_s=150) == [5, 5]


HOLES = {  # what two ranks hold of 4 elements
    "the same begin": ((0, 3), (0, 1)),
    "as many as there are": ((0, 2), (1, 3)),
    "one has all but the last": ((0, 3), (1, 3)),
}


@pytest.mark.parametrize("held", HOLES.values(), ids=HOLES)
@pytest.mark.parametrize("wide", [False, True])
def test_parts_that_overlap_hide_no_hole(tmp_path, held, wide):
    whole = torch.arange(1.0, 9).view(2, 4)

    def parts(*slices):
        return [
            Shard(tensor=whole[:, b:e], global_shape=(2, 4), offsets=(0, b))
            if wide
            else Shard(tensor=whole[0, b:e], global_shape=(4,), offsets=(b,))
            for b, e in slices
        ]

    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match=r"the ranks hold \d of the \d elements of 'w'"):
        checkpoints.save(1, sharded={"w": parts(*held)})
    checkpoints.save(1, sharded={"w": parts(*held, (3, 4), (0, 4))})
    got = torch.zeros_like(whole) if wide else torch.zeros(4)
    checkpoints.load(
        sharded={"w": Shard(tensor=got, global_shape=tuple(got.shape), offsets=(0,) * got.dim())}
    )
    assert torch.equal(got, whole if wide else whole[0])


@pytest.mark.parametrize("values", [torch.tensor([1.5]), torch.tensor([1 + 2j])])
def test_what_the_tensor_to_fill_cannot_hold_is_refused(tmp_path, values):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, sharded=shards_of({"w": values}))
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.complex64):
        target = shards_of({"w": torch.zeros(1, dtype=dtype)})
        if torch.can_cast(values.dtype, dtype):
            checkpoints.load(sharded=target)
            assert target["w"].tensor == values
        else:
            with pytest.raises(CheckpointError, match="cannot hold its values"):
                checkpoints.load(sharded=target)


def test_a_save_in_the_background_that_fails_is_told_though_nobody_asks(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "step-00000001.writing").write_text("a file is in the way")
    with pytest.warns(UserWarning, match=r"was not saved in the background: .*FileExistsError"):
        checkpoints.save_async(1, shared={"x": Value(0)})._thread.join()
    with pytest.raises(CheckpointError, match="FileExistsError"):
        checkpoints.latest()
