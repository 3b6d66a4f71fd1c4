"""Which parameters a backward can reach; `find_unused` needs this after forward.

Autograd's graph links every result to the operations that made it; its leaves are the parameters. A
parameter that is not a leaf of the outputs' graph gets no gradient, so no rank needs to wait for
its gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def parameters_reached(outputs: list[Tensor]) -> set[Tensor]:
    """The leaves of the graph that get a gradient in a backward from `outputs`.

    >>> import torch
    >>> from torch import nn
    >>> used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> reached = parameters_reached([used(torch.ones(1, 2))])
    >>> used.weight in reached, unused.weight in reached
    (True, False)
    """
    found: set[Tensor] = set()
    seen: set[Any] = set()
    todo: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    found.update(t for t in outputs if t.is_leaf)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad
            found.add(node.variable)
        todo.extend(after for after, _ in node.next_functions if after is not None)
    return found
