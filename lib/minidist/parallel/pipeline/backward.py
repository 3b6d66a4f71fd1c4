"""A backward pass in two halves: first the gradient of the input, later those of the weights.

The previous stage waits only for the input gradient. So a zero-bubble schedule computes the input
gradient first (B), and computes the weight gradients (W) while it would otherwise wait. Section 2
of arXiv 2401.10241.

Calling autograd twice, for the input and later for the weights, would be right, but would walk the
whole path from output to input twice. Instead:

1. Find the cuts: nodes of the autograd graph that are on the path from the output to the input and
   lead to weights. For y = x W + b this is only the node of the multiplication.
2. B walks down the path, and keeps the gradient that arrives at every cut.
3. W starts from the cuts, and walks from each cut only to its own weights. So B and W together do
   the arithmetic of one backward pass.

A stage with re-entrant checkpoints (torch.utils.checkpoint) computes everything in B.

>>> from torch import nn
>>> layer = nn.Linear(3, 2, bias=False)
>>> x = torch.ones(4, 3, requires_grad=True)
>>> split = SplitBackward(x, layer(x))
>>> split.input_gradient(torch.ones(4, 2)).shape, layer.weight.grad
(torch.Size([4, 3]), None)
>>> split.weight_gradients()
>>> layer.weight.grad
tensor([[4., 4., 4.],
        [4., 4., 4.]])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Cut:
    """A node on the path from output to input that leads to weights."""

    edges: list[GradientEdge]  # into the node: one per output of its operation
    weights: list[Tensor]
    gradients: list[Tensor | None]  # the gradients that arrived at the edges; filled by B


class SplitBackward:
    """The backward pass of one micro-batch through one stage.

    Args:
        x: input of the stage, a leaf that requires a gradient. None for the first stage: it sends
            no gradient, so its whole backward is W.
        y: output of the stage, or the loss (a scalar) on the last stage.
    """

    def __init__(self, x: Tensor | None, y: Tensor) -> None:
        self._x, self._y = x, y
        self._gradient: Tensor | None = None
        self._cuts: list[_Cut] | None = None
        self._is_over = False

    def input_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """B: dL/dx from dL/dy (None for a loss). Parameters get no gradient."""
        self._gradient = gradient
        if self._x is None:
            return None
        try:
            self._cuts = _find_cuts(self._x, self._y)
        except _WholeOnly:
            _accumulate_all(None, self._y, gradient)
            self._is_over = True
            input_gradient, self._x.grad = self._x.grad, None
            return torch.zeros_like(self._x) if input_gradient is None else input_gradient
        edges = [edge for cut in self._cuts or [] for edge in cut.edges]
        wanted: list[Any] = [self._x, *edges]
        input_gradient, *arrived = torch.autograd.grad(
            [self._y],
            wanted,
            None if gradient is None else [gradient],
            retain_graph=True,
            allow_unused=True,
        )
        for cut in self._cuts or []:
            cut.gradients = [arrived.pop(0) for _ in cut.edges]
        return torch.zeros_like(self._x) if input_gradient is None else input_gradient

    def weight_gradients(self) -> None:
        """W: add dL/dw to `.grad` of every weight of the stage."""
        if self._is_over:
            return
        if self._cuts is None:
            _accumulate_all(self._x, self._y, self._gradient)
        else:
            for cut in self._cuts:
                both = zip(cut.edges, cut.gradients, strict=True)
                pairs = [(edge, gradient) for edge, gradient in both if gradient is not None]
                if pairs:
                    edges, gradients = zip(*pairs, strict=True)
                    torch.autograd.backward(edges, gradients, inputs=cut.weights)


class _WholeOnly(Exception):
    """The graph has a re-entrant checkpoint, which torch runs only in one whole backward."""


def _find_cuts(x: Tensor, y: Tensor) -> list[_Cut] | None:
    """The cuts between y and x; None if W must walk the whole path after all.

    There are two such cases. First, two cuts lead to the same weight, because the stage uses it
    twice: from the upper cut, autograd would also reach the weight along the path. Second, y does
    not depend on x.
    """
    # Children before parents, and the edges by which each node is reached.
    root, leaf = get_gradient_edge(y), get_gradient_edge(x).node
    order: list[Node] = []
    outputs: dict[Node, set[int]] = {root.node: {root.output_nr}}
    todo: list[tuple[Node, bool]] = [(root.node, False)]
    entered: set[Node] = set()
    while todo:
        node, children_done = todo.pop()
        if children_done:
            order.append(node)
            continue
        if node in entered:
            continue
        entered.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise _WholeOnly
        todo.append((node, True))
        for child, output_nr in node.next_functions:
            if child is not None:
                outputs.setdefault(child, set()).add(output_nr)
                todo.append((child, False))
    # The nodes that reach x are the path; the other nodes are side branches. Collect the weights
    # below the side branches.
    path: set[Node] = {leaf}
    below: dict[Node, dict[int, Tensor]] = {}
    cuts: list[_Cut] = []
    taken: set[int] = set()
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        weights: dict[int, Tensor] = {}
        for child in children:
            if child not in path:
                weights |= below[child]
        if node is leaf:
            continue
        if any(child in path for child in children):
            path.add(node)
            if weights:
                if taken & weights.keys():
                    return None
                taken |= weights.keys()
                edges = [GradientEdge(node, nr) for nr in sorted(outputs[node])]
                cuts.append(_Cut(edges, list(weights.values()), []))
        else:
            variable: Any = getattr(node, "variable", None)  # AccumulateGrad has one
            below[node] = weights if variable is None else {id(variable): variable}
    return cuts if root.node in path else None


def _accumulate_all(x: Tensor | None, y: Tensor, gradient: Tensor | None) -> None:
    """The whole backward pass. It drops the gradient of x, because B has already returned it."""
    if not y.requires_grad:  # nothing to train in this stage
        return
    torch.autograd.backward([y], None if gradient is None else [gradient])
    if x is not None:
        x.grad = None
