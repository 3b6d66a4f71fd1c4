"""The tensors in what a module returns: in containers, data classes and objects of any class.

>>> from types import SimpleNamespace
>>> found = tensors_in({"loss": torch.ones(1), "rest": [SimpleNamespace(logits=torch.ones(2, 3))]})
>>> [tuple(tensor.shape) for tensor in found]
[(1,), (2, 3)]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def tensors_in(output: Any) -> list[Tensor]:
    """Every tensor once, in the order in which it is found; modules are not looked into."""
    found: list[Tensor] = []
    seen: set[int] = set()
    todo = tree_leaves(output)[::-1]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
        else:
            todo += tree_leaves(_parts(value))[::-1]
    return found


def _parts(value: Any) -> list[Any]:
    """What an object that torch does not take for a container holds."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, nn.Module | type | torch.dtype | torch.device | str | bytes):
        return []
    if type(value).__module__ in ("builtins", "torch.distributed.distributed_c10d"):
        return list(value) if isinstance(value, set | frozenset) else []
    slots: list[str] = []
    for kind in type(value).__mro__:
        own = kind.__dict__.get("__slots__", ())
        slots += [own] if isinstance(own, str) else own
    held = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*held, *getattr(value, "__dict__", {}).values()]
