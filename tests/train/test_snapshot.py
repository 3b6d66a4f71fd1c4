"""What `save` accepts, `load` reads, and training cannot change what is being saved."""

from __future__ import annotations

import collections
import dataclasses
import enum
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidist.checkpoint import CheckpointError, Checkpoints
from minidist.launch import run
from minidist.model import GPT, GPTConfig


class Value:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


class Point(NamedTuple):
    x: int
    t: torch.Tensor


@dataclasses.dataclass
class Settings:
    rate: float
    seen: set[int]
    weight: torch.Tensor


class Colour(enum.Enum):
    RED = 1


class Slow(enum.IntEnum):
    YES = 1


def same(got: Any, wanted: Any) -> bool:
    """Equal, of the same type, all the way down."""
    if isinstance(wanted, torch.Tensor):
        wanted = wanted.detach()
        if wanted.layout is not torch.strided:
            got, wanted = got.to_dense(), wanted.to_dense()
        return got.dtype == wanted.dtype and torch.equal(
            got.to(torch.complex128), wanted.to(torch.complex128)
        )
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, np.ndarray):
        return got.dtype == wanted.dtype and np.array_equal(got, wanted)
    if isinstance(wanted, dict):
        pairs = zip(got.items(), wanted.items(), strict=True)
        factory = getattr(got, "default_factory", 0) == getattr(wanted, "default_factory", 0)
        return factory and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(wanted, list | tuple | deque):
        length = len(got) == len(wanted) and getattr(got, "maxlen", 0) == getattr(
            wanted, "maxlen", 0
        )
        return length and all(same(a, b) for a, b in zip(got, wanted, strict=True))
    return bool(got == wanted)


base = torch.arange(6.0)
STATES: dict[str, Any] = {
    "None": None,
    "large numbers": [2**2039 - 1, -(2**2039) + 1, {2**100: 1}],
    "numbers": [True, 1, -(2**70), 1.5, float("inf"), 1j, "ü", b"a", bytearray(b"ab")],
    "containers": [(1, (2,)), {1, "a"}, frozenset({1}), deque([1, 2], maxlen=3), range(3)],
    "keys": {1: 2, (1, 2): 3, None: 4, 1.5: 5, b"a": 7, frozenset({1}): 8},
    "dicts": [OrderedDict(b=1, a=2), Counter("aab"), defaultdict(list, a=[1]), defaultdict(int)],
    "default of nothing": defaultdict(None, a=1),
    "of torch": [torch.Size([1, 2]), torch.bfloat16, torch.device("cpu"), torch.strided],
    "dtypes": [
        torch.ones(2).to(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool)
    ],
    "8 bits": torch.ones(3).to(torch.float8_e4m3fn).float(),
    "complex": torch.ones(2, dtype=torch.complex64) * 1j,
    "conjugate": (torch.ones(2, dtype=torch.complex64) * 1j).conj(),
    "negative": (torch.ones(2, dtype=torch.complex64) * 1j).conj().imag,
    "shapes": [torch.tensor(3.0), torch.empty(0, 3), torch.ones(1).expand(4)],
    "views": [base[2:4], base.view(2, 3).T, base[::2]],
    "parameter": nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(3).to_sparse(),
    "generators": [
        torch.get_rng_state(),
        torch.Generator().manual_seed(3).get_state(),
        np.random.RandomState(0).get_state(),
        np.random.default_rng(0).bit_generator.state,
    ],
    "numpy": [np.arange(3), np.float32(1), np.float64(2), np.bool_(True), np.dtype("int16")],
    "numpy arrays": [np.zeros(()), np.ones((2, 3), order="F"), np.array(["a"])],
    "a record array": np.zeros(2, dtype=[("a", "i4")]),
    "optimizer": torch.optim.AdamW([torch.ones(2, requires_grad=True)]).state_dict(),
    "batch norm": nn.BatchNorm1d(3).state_dict(),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_saved_can_be_loaded(tmp_path, name, asynchronous):
    value, checkpoints, loaded = STATES[name], Checkpoints(tmp_path), Value()
    if asynchronous:
        checkpoints.save_async(1, shared={"x": Value(value)}, local={"y": Value(value)}).wait()
    else:
        checkpoints.save(1, shared={"x": Value(value)}, local={"y": Value(value)})
    for kind in ("shared", "local"):
        loaded = Value()
        assert checkpoints.load(**{kind: {"x" if kind == "shared" else "y": loaded}}) == 1
        assert same(loaded.value, value), (loaded.value, value)


REFUSED: dict[str, Any] = {
    "function": lambda: 0,
    "Generator": torch.Generator(),
    "Linear": nn.Linear(1, 1),
    "Colour": Colour.RED,
    "Slow": Slow.YES,
    "Settings": Settings(0.1, {1}, torch.ones(1)),
    "Point": Point(1, torch.ones(1)),
    "PosixPath": Path("a"),
    "ndarray": np.array([None]),
    "memory_format": torch.channels_last,
    "meta device": torch.ones(1, device="meta"),
    "defaultdict of <function": defaultdict(lambda: 0),
    "UntypedStorage": torch.ones(1).untyped_storage(),
    "type": nn.Linear,
    "lock": threading.Lock(),
    "dict_keys": {}.keys(),
    "MaskedArray, .* its data and its mask": np.ma.array([1, 2], mask=[True, False]),
    "recarray": np.zeros(2, dtype=[("a", "i4")]).view(np.recarray),
    "int of 2040 bits": -(2**2039),
    "Generator, save": np.random.default_rng(0),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_cannot_be_loaded_is_refused_when_it_is_saved(tmp_path, name, asynchronous):
    checkpoints = Checkpoints(tmp_path)
    save = checkpoints.save_async if asynchronous else checkpoints.save
    wrong = Value({"groups": [1, (2, REFUSED[name])]})
    where = r"shared\['x'\]\['value'\]\['groups'\]\[1\]\[1\] is "
    with pytest.raises(CheckpointError, match=f"{where}.*{name.split(',')[0]}"):
        save(1, shared={"x": wrong})
    assert checkpoints.steps() == []
    with pytest.raises(CheckpointError, match=r"the key .* of shared\['x'\]\['value'\] is a"):
        save(1, shared={"x": Value({Slow.YES: 1})})


def test_classes_that_a_user_allows(tmp_path):
    checkpoints, loaded = Checkpoints(tmp_path), Value()
    value = [Point(1, base[:2]), Settings(0.1, {1}, base[:2]), Colour.RED, {Slow.YES: Slow.YES}]
    with torch.serialization.safe_globals([Point, Settings, Colour, Slow]):
        saving = checkpoints.save_async(1, shared={"x": Value(value)})
        value[1].seen.add(2)
        value[1].weight += 0.0
        saving.wait()
        checkpoints.load(shared={"x": loaded})
    point, settings, *rest = loaded.value
    assert rest == [Colour.RED, {Slow.YES: Slow.YES}]
    assert isinstance(point, Point)
    assert torch.equal(point.t, base[:2])
    assert (settings.rate, settings.seen) == (0.1, {1})


def test_training_does_not_change_what_is_being_saved(tmp_path, monkeypatch):
    start, real = threading.Event(), torch.save

    def late(*arguments: Any, **named: Any) -> None:
        start.wait(30)
        real(*arguments, **named)

    monkeypatch.setattr(torch, "save", late)
    tensor, array = torch.zeros(6), np.zeros(3)
    live: dict[str, Any] = {
        "list": [[0]],
        "set": {0},
        "deque": deque([0]),
        "bytes": bytearray(b"a"),
        "default": defaultdict(list, a=[0]),
        "counter": Counter("a"),
        "ordered": OrderedDict(a=[0]),
        "tuple": ([0], {0}, collections.deque([{0}])),
        "tensor": tensor,
        "view": tensor[2:4],
        "transposed": tensor.view(2, 3).T,
        "array": array,
        "row": array[1:],
        "nested": {"a": [{"t": tensor[:1]}]},
    }
    checkpoints, loaded = Checkpoints(tmp_path), Value()
    saving = checkpoints.save_async(1, shared={"x": Value(live)})
    tensor += 1
    array += 1
    live["list"][0].append(1)
    live["set"].add(1)
    live["deque"].append(1)
    live["bytes"] += b"b"
    live["default"]["a"].append(1)
    live["default"]["b"].append(1)
    live["counter"].update("b")
    live["ordered"]["a"].append(1)
    live["tuple"][0].append(1)
    live["tuple"][1].clear()
    live["tuple"][2][0].clear()
    live["new"] = 1
    start.set()
    saving.wait()
    checkpoints.load(shared={"x": loaded})
    zeros = {name: torch.zeros_like(live[name]) for name in ("tensor", "view", "transposed")}
    wanted = {
        "list": [[0]],
        "set": {0},
        "deque": deque([0]),
        "bytes": bytearray(b"a"),
        "default": defaultdict(list, a=[0]),
        "counter": Counter("a"),
        "ordered": OrderedDict(a=[0]),
        "tuple": ([0], {0}, deque([{0}])),
        **zeros,
        "array": np.zeros(3),
        "row": np.zeros(2),
        "nested": {"a": [{"t": torch.zeros(1)}]},
    }
    assert same(loaded.value, wanted), loaded.value


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_one_stays_one_and_a_view_is_small(tmp_path, asynchronous):
    large, twice = torch.zeros(100_000), [0]
    state: Any = {"a": large[:3], "b": large[:3], "c": large[3:6], "l": twice, "m": twice}
    state["self"] = [state["l"]]
    checkpoints, loaded = Checkpoints(tmp_path), Value()
    save = checkpoints.save_async if asynchronous else checkpoints.save
    path = save(1, shared={"x": Value(state)})
    path = path if isinstance(path, Path) else path.wait()
    assert (path / "shared.pt").stat().st_size < 10_000
    checkpoints.load(shared={"x": loaded})
    got = loaded.value
    assert got["a"].data_ptr() == got["b"].data_ptr()
    assert got["c"].tolist() == [0, 0, 0]
    assert got["l"] is got["m"] is got["self"][0]
    ring: Any = [1]
    ring.append(ring)
    checkpoints.save(2, shared={"x": Value(ring)})
    checkpoints.load(shared={"x": loaded})
    assert loaded.value[1] is loaded.value


def test_a_tied_model_stays_tied(tmp_path):
    config = GPTConfig(vocab_size=7, context=4, width=4, num_layers=1, num_heads=1, tied=True)
    torch.manual_seed(0)
    model = GPT(config)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_async(1, shared={"m": model}).wait()
    before = model.head.weight.detach().clone()
    other = GPT(config)
    checkpoints.load(shared={"m": other})
    assert other.head.weight is other.token_embedding.weight
    assert torch.equal(other.head.weight, before)
    got = Value()
    got.load_state_dict = lambda state: setattr(got, "value", state)  # type: ignore[method-assign]
    checkpoints.load(shared={"m": got})
    head, embedding = got.value["head.weight"], got.value["token_embedding.weight"]
    assert head.data_ptr() == embedding.data_ptr()
    assert isinstance(got.value, OrderedDict)
    assert got.value._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


def check_one_rank(folder: str) -> None:
    dist.init_process_group("gloo")
    checkpoints = Checkpoints(folder)
    value = Value(dist.get_rank() == 1 and (lambda: 0))
    with pytest.raises(CheckpointError, match=r"rank 1: ValueError: local\['x'\]\['value'\] is"):
        checkpoints.save(1, local={"x": value})
    assert checkpoints.steps() == []
    dist.barrier()
    dist.destroy_process_group()


def test_if_one_rank_holds_what_cannot_be_saved_all_say_so(tmp_path):
    run(check_one_rank, 2, str(tmp_path))
