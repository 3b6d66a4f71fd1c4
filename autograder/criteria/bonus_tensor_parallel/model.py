"""What the criteria of the tensor-parallel lab share: the whole layers, their parts, the oracle.

The student's code builds a rank's part from one set of weights. Then the checks overwrite the part
with correctly cut slices of a different set of weights. So a wrong slice costs one criterion only,
and code that keeps the whole layer and computes with it gets a wrong result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

HEAD, BATCH = 4, 2  # width of a head, sequences in a batch
DTYPE = torch.float64
LAYERS = ("norm1", "qkv", "out", "norm2", "up", "down")


class FullBlock(nn.Module):
    """A whole transformer block with the attributes that the lab's text names."""

    def __init__(self, width: int, num_heads: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first_hidden = 1  # token i sees no token from i + first_hidden on
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps, dtype=DTYPE) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, dtype=DTYPE)
        self.out = nn.Linear(width, width, dtype=DTYPE)
        self.up = nn.Linear(width, 4 * width, dtype=DTYPE)
        self.down = nn.Linear(4 * width, width, dtype=DTYPE)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal self-attention."""
        heads = [
            each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in self.qkv(x).chunk(3, dim=-1)
        ]
        scores = heads[0] @ heads[1].mT / heads[0].shape[-1] ** 0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(self.first_hidden)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.out((weights @ heads[2]).transpose(1, 2).flatten(2))

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP."""
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the MLP; each reads a normalised x and adds its output to x."""
        x = x + self.attend(self.norm1(x))
        return x + self.transform(self.norm2(x))


def draw_block(
    draw: Draw, sequences: int = BATCH, tokens: int | None = None, *, row_bias: bool = False
) -> list[Values]:
    """Weights of a block, an input and the gradient of the output, the same on all ranks.

    Biases of row-parallel layers are zero unless `row_bias` is set. So a student who adds these
    biases N times fails only the criteria about biases, not all later criteria.
    """
    rng, n = draw.shared(), draw.world_size
    num_heads = n * int(rng.integers(2, 4))
    width = HEAD * num_heads
    tokens = 2 * n if tokens is None else tokens
    values: Values = {"heads": num_heads, "width": width, "eps": 1e-5}
    full = FullBlock(width, num_heads)
    for name in LAYERS:
        layer = getattr(full, name)
        scale = 0.3 if "norm" in name else layer.weight.shape[1] ** -0.5
        values[f"{name}.w"] = rng.normal("norm" in name, scale, layer.weight.shape)
        values[f"{name}.b"] = rng.normal(0, 0.5, layer.bias.shape)
    for name in ("out.b", "down.b"):
        values[name] *= row_bias
    values["x"] = rng.normal(size=(sequences, tokens, width))
    values["gy"] = rng.normal(size=(sequences, tokens, width))
    return [dict(values) for _ in range(n)]


def fill(layer: Any, weight: np.ndarray, bias: np.ndarray | None) -> None:
    """Copies weight and bias into a layer; skips a missing parameter or a different shape."""
    for name, array in (("weight", weight), ("bias", bias)):
        parameter = getattr(layer, name, None)
        if array is None or not isinstance(parameter, torch.Tensor):
            continue
        if tuple(parameter.shape) == array.shape:
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(np.array(array)))


def linear(weight: np.ndarray, bias: np.ndarray | None, context: Context) -> nn.Linear:
    """A whole linear layer."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=torch.float64)
    fill(layer, weight, bias)
    return layer.to(context.device)


def other_block(inputs: Values, context: Context) -> FullBlock:
    """A whole block whose weights differ from the weights that the parts will get."""
    full = FullBlock(inputs["width"], inputs["heads"], inputs["eps"])
    for name in LAYERS:
        rolled = (np.roll(inputs[f"{name}.{kind}"].ravel(), 1) for kind in "wb")
        weight, bias = (
            r.reshape(inputs[f"{name}.{k}"].shape) for r, k in zip(rolled, "wb", strict=True)
        )
        fill(getattr(full, name), weight, bias)
    return full.to(context.device)


def whole_block(values: Values) -> FullBlock:
    """The block that the oracle computes with."""
    full = FullBlock(values["width"], values["heads"], values["eps"])
    for name in LAYERS:
        fill(getattr(full, name), values[f"{name}.w"], values[f"{name}.b"])
    return full


def part_of(name: str, full: np.ndarray, rank: int, n: int) -> np.ndarray:
    """The part of a weight "layer.w" or a bias "layer.b" that `rank` holds."""
    layer, kind = name.split(".")
    if layer in ("up", "column"):
        return np.split(full, n)[rank]
    if layer == "qkv":
        return np.concatenate([np.split(third, n)[rank] for third in np.split(full, 3)])
    if layer in ("down", "out", "row") and kind == "w":
        return np.split(full, n, axis=1)[rank]
    return full


def fill_parts(layers: Mapping[str, Any], inputs: Values, context: Context) -> None:
    """Copies this rank's correct parts into the layers of a module."""
    for name, layer in layers.items():
        weight, bias = (
            part_of(f"{name}.{kind}", inputs[f"{name}.{kind}"], context.rank, context.world_size)
            for kind in "wb"
        )
        fill(layer, weight, bias)


def layers_of(module: Any, names: Iterable[str]) -> dict[str, Any]:
    """The layers `names`, found in the module itself or in its `attention` or `mlp`."""
    places = {"qkv": "attention", "out": "attention", "up": "mlp", "down": "mlp"}
    return {name: getattr(getattr(module, places.get(name, ""), module), name) for name in names}


def tensor(array: np.ndarray, context: Context, *, grad: bool = False) -> torch.Tensor:
    """An input as a tensor on this rank's device."""
    return torch.from_numpy(np.array(array)).to(context.device).requires_grad_(grad)


def numbers(value: Any) -> np.ndarray:
    """A tensor of the student as an array; an empty array if the value is no tensor."""
    if not isinstance(value, torch.Tensor):
        return np.zeros(0)
    return value.detach().cpu().numpy().copy()


def gradients(layers: Mapping[str, Any]) -> Values:
    """The gradients of all weights and biases."""
    return {
        f"{name}.{kind}": numbers(getattr(getattr(layer, what, None), "grad", None))
        for name, layer in layers.items()
        for kind, what in (("w", "weight"), ("b", "bias"))
    }


def solve(values: Values, what: str = "forward") -> Values:
    """Output and all gradients of the whole block (or one half of it), in one process."""
    full = whole_block(values)
    x = torch.from_numpy(np.array(values["x"])).requires_grad_()
    y = (full if what == "forward" else getattr(full, what))(x)
    y.backward(torch.from_numpy(np.array(values["gy"])))
    answer = {"y": numbers(y), "x": numbers(x.grad)}
    return answer | gradients({name: getattr(full, name) for name in LAYERS})


def summands(values: Values, n: int, what: str = "forward") -> list[dict[str, list[np.ndarray]]]:
    """For each rank, the summands that its parts of the weights give, of one half or both halves.

    "forward" lists the rank's summands of each half's output, "backward" its summands of the
    gradient of each half's input.
    """
    full, x = whole_block(values), torch.from_numpy(np.array(values["x"])).requires_grad_()
    ranks = [_part_block(values, rank, n) for rank in range(n)]
    halves: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    h = x
    for name, norm in (("attend", full.norm1), ("transform", full.norm2)):
        if what not in ("forward", name):
            continue
        given = norm(h) if what == "forward" else h
        copies = [given.clone() for _ in ranks]
        outputs = [getattr(part, name)(copy) for part, copy in zip(ranks, copies, strict=True)]
        total = torch.stack(outputs).sum(0)
        h = h + total if what == "forward" else total
        halves.append((copies, outputs))
    gradients_of_inputs = torch.autograd.grad(
        h,
        [copy for copies, _ in halves for copy in copies],
        torch.from_numpy(np.array(values["gy"])),
    )
    return [
        {
            "forward": [numbers(outputs[rank]) for _, outputs in halves],
            "backward": [numbers(g) for g in gradients_of_inputs[rank::n]],
        }
        for rank in range(n)
    ]


def _part_block(values: Values, rank: int, n: int) -> FullBlock:
    """A block that has only one rank's heads and hidden features."""
    part = whole_block(values)
    part.num_heads //= n
    for name in ("qkv", "out", "up", "down"):
        layer = getattr(part, name)
        for kind, what in (("w", "weight"), ("b", "bias")):
            piece = np.array(part_of(f"{name}.{kind}", values[f"{name}.{kind}"], rank, n))
            setattr(layer, what, nn.Parameter(torch.from_numpy(piece)))
    return part


def explain(case: Case, key: str, rank: int, expected: np.ndarray) -> str:
    """The likely reason why a rank's answer is not the expected one, or an empty string."""
    got = [answer.get(key) for answer in case.answers]
    n = case.world_size
    if n == 1 or any(
        not is_floats(a, expected.shape) or not np.abs(a).max(initial=0.0) < 1e100 for a in got
    ):
        return ""
    arrays = [np.asarray(a, dtype=np.float64) for a in got]

    def is_close(array: np.ndarray) -> bool:
        return oracle.agrees(array, expected, dtype="float64")

    alike = all(np.array_equal(array, arrays[0]) for array in arrays)
    if alike and is_close(arrays[rank] * n):
        return f"That is divided by {n}: shares are summed here, not averaged."
    if not arrays[rank].any() and sum(map(is_close, arrays)) == 1:
        whose = [is_close(array) for array in arrays].index(True)
        return f"This rank has nothing of it, rank {whose} has all: is it used on one rank only?"
    if is_close(np.sum(arrays, axis=0)):
        return (
            "Each rank has its own share of it, and the shares add up to what is expected: an "
            "all-reduce is missing, or f is not where it belongs."
        )
    if is_close(arrays[rank] / n):
        return (
            f"That is {n} times too much: what was whole on every rank already has been summed "
            "once more."
        )
    if n != 2 and is_close(arrays[rank] * n / 2):
        return "That fits 2 ranks: is the number of ranks written into the code?"
    differ = len({array.tobytes() for array in arrays}) == n
    if differ and (is_close(arrays[rank - 1]) or is_close(arrays[(rank + 1) % n])):
        return "That is what a neighbour should have: is it rank + 1, or rank - 1, somewhere?"
    return ""


def wrong_answer(
    case: Case,
    key: str,
    rank: int,
    what: str,
    expected: np.ndarray,
    hint: str = "",
) -> Finding | None:
    """A finding unless this rank's array `key` is the expected one."""
    got = case.answers[rank].get(key)
    if isinstance(got, np.ndarray) and not got.size:
        return Finding(f"{what}: there is none.", rank)
    why = explain(case, key, rank, expected) or hint
    return oracle.differs(rank, what, got, expected, dtype="float64", hint=why)


def wrong_part(
    case: Case, rank: int, expected: Values, names: Iterable[str], when: str = ""
) -> Finding | None:
    """A finding unless this rank's gradients `names` are its parts of the expected gradients.

    Args:
        when: which backward pass they come from; the answers' names begin with it.
    """
    for name in names:
        parts = [part_of(name, expected[name], r, case.world_size) for r in range(case.world_size)]
        right, got = parts[rank], case.answers[rank].get(when + name)
        layer, kind = name.split(".")
        what = f"{when}gradient of {layer}.{'weight' if kind == 'w' else 'bias'}"
        is_slice, total, hint = right.size < expected[name].size, np.sum(parts, axis=0), ""
        if is_slice and is_floats(got, right.shape) and oracle.agrees(got, total, "float64"):
            hint = "That is the sum over ranks, and no other rank has a share of this slice."
        if wrong := wrong_answer(case, when + name, rank, what, right, hint):
            return wrong
    return None
