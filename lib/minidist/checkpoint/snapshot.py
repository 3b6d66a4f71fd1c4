"""What a state may hold, and a copy of it that training cannot change any more.

`torch.load(..., weights_only=True)` makes only objects of known classes, since anything else in a
file could run code. So a state is checked before it is written: what cannot be read again is
refused with its place in the state, and not when a run wants to resume.

>>> snapshot({"lr": 0.1, "seen": {1, 2}}, "shared", copy=True)
{'lr': 0.1, 'seen': {1, 2}}
>>> snapshot({"groups": [{"fn": len}]}, "shared", copy=True)
Traceback (most recent call last):
    ...
ValueError: shared['groups'][0]['fn'] is a builtin_function_or_method, which a checkpoint cannot...
"""

from __future__ import annotations

import copy as copying
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_safe_globals

from minidist.unsupported import Unsupported

OBJECTS = Unsupported(
    "Checkpoints.save, Checkpoints.save_async",
    "objects of classes that a checkpoint cannot read again",
    instead="use numbers, strings, tensors, numpy arrays and lists, tuples, dicts, sets or deques "
    "of them, or allow the class with torch.serialization.add_safe_globals",
)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice)
_MAX_BITS = 255 * 8 - 1  # torch.load knows integers of up to 255 bytes
_OF_TORCH = (torch.dtype, torch.device, torch.layout)
_FACTORIES = (None, list, dict, set, int, float, str, bool, tuple)  # of defaultdicts
_DTYPES = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
# In addition to what torch.load allows. `__reduce__` finds two functions that numpy has moved once.
LOADABLE: list[Any] = [
    *(deque, defaultdict, frozenset, range, slice, *_FACTORIES[1:]),
    *(np.ndarray, np.dtype, np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0], *_DTYPES),
]
_HINTS: dict[type, str] = {
    torch.Generator: "save its get_state()",
    np.random.Generator: "save its bit_generator.state",
    np.random.RandomState: "save its get_state()",
    np.ma.MaskedArray: "save its data and its mask",
    np.ndarray: "save np.array(it)",
    torch.nn.Module: "save its state_dict()",
    torch.optim.Optimizer: "save its state_dict()",
    Tensor: "give each rank's part as a `Shard` in `sharded`",
}


def snapshot(value: Any, path: str, *, copy: bool) -> Any:
    """The same structure on the CPU, of types that a checkpoint can hold.

    An object that occurs twice in the state, such as a tied weight, is one object in the result,
    too. A view of a tensor becomes a separate tensor, so that a small part is saved without the
    rest of its storage.

    Args:
        path: the name of the state in messages.
        copy: copy what training may change in place; otherwise only what is on a different device.

    Raises:
        ValueError: a value could not be read again; the message has its path and type.
    """
    return _Snapshot(copy).of(value, path)


class _PickledCall:
    """Is pickled as a call of `function`, so that torch.load can read a deque, say."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self._reduced


class _Snapshot:
    def __init__(self, copy: bool) -> None:
        self.copy = copy
        self._made: dict[Any, Any] = {}  # by identity, and of tensors by place and shape
        self._kept: list[Any] = []  # so that no identity is used twice

    def of(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is int and value.bit_length() > _MAX_BITS:
            raise ValueError(
                f"{path} is an int of {value.bit_length()} bits, which a checkpoint cannot read "
                "again; save it as a string"
            )
        if kind in _PLAIN or kind in _OF_TORCH:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if id(value) in self._made:
            return self._made[id(value)]
        self._kept.append(value)
        if kind in (dict, OrderedDict, Counter):
            return self._dict(value, path)
        if kind is list:
            made = self._made[id(value)] = []
            made.extend(self._items(value, path))
        else:
            made = self._made[id(value)] = self._other(value, path)
        return made

    def _items(self, value: Any, path: str) -> list[Any]:
        return [self.of(item, f"{path}[{i}]") for i, item in enumerate(value)]

    def _dict(self, value: Any, path: str) -> Any:
        made = self._made[id(value)] = type(value)()
        for key, item in value.items():
            made[self.of(key, f"the key {key!r} of {path}")] = self.of(item, f"{path}[{key!r}]")
        if getattr(value, "_metadata", None) is not None:  # the versions in a module's state dict
            made._metadata = copying.deepcopy(value._metadata)
        return made

    def _other(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in (tuple, torch.Size, set, frozenset):
            return kind(self._items(value, path))
        if kind is bytearray:
            return kind(value)
        if kind is deque:
            return _PickledCall(deque, self._items(value, path), value.maxlen)
        if kind is defaultdict and value.default_factory in _FACTORIES:
            self._kept.append(items := dict(value))
            return _PickledCall(defaultdict, value.default_factory, self._dict(items, path))
        if isinstance(value, np.dtype) and not value.hasobject:
            return value
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            if isinstance(value, np.generic):
                return value
            if kind not in (np.ndarray, np.memmap):  # a masked array would lose its mask
                raise ValueError(_refusal(value, path))
            return np.array(value, order="K") if self.copy or kind is not np.ndarray else value
        if kind in get_safe_globals() and not isinstance(value, type):
            return self._own_class(value, path)
        raise ValueError(_refusal(value, path))

    def _own_class(self, value: Any, path: str) -> Any:
        """An object of a class that the user has allowed: a namedtuple, a dataclass, an enum."""
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*self._items(value, path))
        if isinstance(value, Enum):  # Python before 3.11.4 pickles a getattr, which is not loaded
            return _PickledCall(type(value), value._value_)
        if not hasattr(value, "__dict__") or type(value).__reduce_ex__ is not object.__reduce_ex__:
            return copying.deepcopy(value)
        made = copying.copy(value)
        for name, item in vars(value).items():
            made.__dict__[name] = self.of(item, f"{path}.{name}")
        return made

    def _tensor(self, value: Tensor, path: str) -> Tensor:
        value = value.detach()
        if type(value) is not Tensor:
            raise ValueError(_refusal(value, path))
        if value.is_meta:
            raise ValueError(f"{path} is a tensor on the meta device, which has no values to save")
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            return value.to("cpu", copy=True)
        start = value.untyped_storage().data_ptr()
        place = (start, value.device, value.storage_offset(), value.shape, value.stride())
        place = (*place, value.dtype, value.is_conj(), value.is_neg())
        if not start or place not in self._made:
            whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
            made = value.resolve_conj().resolve_neg()
            if made is value and (self.copy or not whole):
                made = value.clone()
            self._made[place] = made.to("cpu")
            self._kept.append(value)
        return self._made[place]


def _refusal(value: Any, path: str) -> str:
    name = type(value).__name__
    if isinstance(value, defaultdict):
        name = f"defaultdict of {value.default_factory!r}"
    hint = next((text for kind, text in _HINTS.items() if isinstance(value, kind)), None)
    hint = hint or OBJECTS.instead
    article = "an" if name[0] in "AEIOUaeiou" else "a"
    return f"{path} is {article} {name}, which a checkpoint cannot read again; {hint}"
