"""Questions to autograd: what does the backward that is running now reach?

Autograd's graph links every result to the operations that made it; its leaves are the parameters.
`backward()` adds to the `.grad` of every leaf that it reaches. `autograd.grad` adds to none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def will_accumulate(leaf: Tensor) -> bool:
    """Whether the backward that is running now, in whose hook this is called, adds to `leaf.grad`.

    >>> used, unused = (torch.ones(1, requires_grad=True) for _ in range(2))
    >>> y = used * 2
    >>> _ = y.register_hook(lambda _: print(will_accumulate(used), will_accumulate(unused)))
    >>> y.backward()
    True False
    >>> y = used * 2
    >>> _ = y.register_hook(lambda _: print(will_accumulate(used)))
    >>> _ = torch.autograd.grad(y, used)
    False
    """
    return leaf.requires_grad and _runs(get_gradient_edge(leaf).node)


def accumulates() -> bool:
    """Whether the backward that is running now adds to any leaf below the current operation."""
    here = torch._C._current_autograd_node()
    return any(hasattr(node, "variable") and _runs(node) for node in _below([here]))


def has_python_function(outputs: list[Tensor]) -> bool:
    """Whether the graph has a `torch.autograd.Function`, which may start a backward of its own.

    Reentrant checkpointing is one. What its backward reaches is not in the graph.
    """
    nodes = _below([t.grad_fn for t in outputs if t.grad_fn is not None])
    return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes)


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False  # `autograd.grad` was asked for this leaf, and returns its gradient


def _below(start: list[Any]) -> Iterator[Any]:
    """All operations and leaves from which the results of `start` were made."""
    seen: set[Any] = set()
    todo = list(start)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo.extend(after for after, _ in node.next_functions if after is not None)
