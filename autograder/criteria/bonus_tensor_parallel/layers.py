"""Criteria for what a parallel MLP, attention and block compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from autograder.criteria.bonus_tensor_parallel.model import (
    BATCH,
    HEAD,
    draw_block,
    fill_parts,
    gradients,
    layers_of,
    linear,
    numbers,
    other_block,
    part_of,
    solve,
    tensor,
    whole_block,
    wrong_answer,
    wrong_part,
)
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, read_tensor
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

MLP, ATTENTION, NORMS = ("up", "down"), ("qkv", "out"), ("norm1", "norm2")
WEIGHTS = ("out.w", "qkv.w", "qkv.b", "down.w", "up.w", "up.b")  # each rank's own parts
NORM_GRADIENTS = ("norm1.w", "norm1.b", "norm2.w", "norm2.b")
REPLICATED = ("out.b", "down.b", *NORM_GRADIENTS)
OTHER_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)  # wrong values, for a hint
FEWER = 3  # tokens of a shorter sequence


def draw(source: Draw) -> list[Values]:
    """A block, an input, a gradient; the same on all ranks."""
    return draw_block(source)


def draw_biased(source: Draw) -> list[Values]:
    """The inputs of `draw`, with biases in the row-parallel layers too."""
    return draw_block(source, row_bias=True)


def draw_attention(source: Draw) -> list[Values]:
    """The inputs of `draw_biased`, with a token for which head 0's scores are all zero."""
    inputs = draw_biased(source)
    for values in inputs:
        values["qkv.b"][:HEAD] = 0
        values["x"][0, 1] = 0
    return inputs


def draw_whole(source: Draw) -> list[Values]:
    """The inputs of `draw`, with norms that add more than usual to the variance."""
    return [values | {"eps": 0.2} for values in draw(source)]


def build_mlp(build: Any, inputs: Values, context: Context) -> Any:
    """A parallel MLP that holds this rank's correct parts."""
    full = other_block(inputs, context)
    mlp = build(full.up, full.down)
    fill_parts(layers_of(mlp, MLP), inputs, context)
    return mlp


def build_attention(build: Any, inputs: Values, context: Context) -> Any:
    """Parallel attention that holds this rank's correct parts."""
    full = other_block(inputs, context)
    attention = build(full.qkv, full.out, inputs["heads"])
    fill_parts(layers_of(attention, ATTENTION), inputs, context)
    return attention


def build_block(build: Any, inputs: Values, context: Context, full: Any = None) -> Any:
    """A parallel block, made of `full`, that holds this rank's correct parts."""
    block = build(full or other_block(inputs, context))
    fill_parts(layers_of(block, (*NORMS, *ATTENTION, *MLP)), inputs, context)
    return block


def _run(module: Any, names: tuple[str, ...], inputs: Values, context: Context) -> Values:
    x = tensor(inputs["x"], context, grad=True)
    y = read_tensor(module(x), "forward()")
    y.backward(tensor(inputs["gy"], context))
    return {"y": numbers(y), "x": numbers(x.grad)} | gradients(layers_of(module, names))


def observe_mlp(build: Any, inputs: Values, context: Context) -> Values:
    """Output and gradients of the MLP."""
    return _run(build_mlp(build, inputs, context), MLP, inputs, context)


def observe_attention(build: Any, inputs: Values, context: Context) -> Values:
    """Output and gradients of attention, and before and after that the output of fewer tokens."""
    attention = build_attention(build, inputs, context)
    fewer = tensor(inputs["x"][:, :FEWER], context)
    with torch.no_grad():
        before = attention(fewer)
    answer = _run(attention, ATTENTION, inputs, context)
    with torch.no_grad():
        after = attention(fewer)
    return answer | {"before": numbers(before), "after": numbers(after)}


def observe_block(build: Any, inputs: Values, context: Context) -> Values:
    """Output and gradients of the block; the parameters of `full` that change with its own."""
    names, full = (*NORMS, *ATTENTION, *MLP), other_block(inputs, context)
    before = {name: p.detach().clone() for name, p in full.named_parameters()}
    block = build_block(build, inputs, context, full)
    shared = [name for name, p in full.named_parameters() if not torch.equal(p, before[name])]
    return _run(block, names, inputs, context) | {"shared": ", ".join(shared)}


Why = Callable[[Values, Any, np.ndarray], str]  # (inputs, got, expected) -> likely reason


def _judge(
    case: Case, what: str, names: tuple[str, ...], why: Why = lambda *_: ""
) -> Iterator[Finding]:
    right = solve(case.inputs[0], what)
    parts = [f"{name}.{kind}" for name in names for kind in "wb"]
    for rank, answer in enumerate(case.answers):
        hint = why(case.inputs[0], answer.get("y"), right["y"])
        if wrong := wrong_answer(case, "y", rank, "output", right["y"], hint) or wrong_part(
            case, rank, right, parts
        ):
            yield wrong


def judge_mlp(case: Case) -> Iterator[Finding]:
    """Requires the whole output on all ranks, and the gradients of each rank's parts."""
    return _judge(case, "transform", MLP, _why_mlp)


def _why_mlp(values: Values, got: Any, expected: np.ndarray) -> str:
    """A hint if GELU is missing, or is not between the layers."""
    full, x = whole_block(values), torch.from_numpy(values["x"])
    if not is_floats(got, expected.shape):
        return ""
    with torch.no_grad():
        plain = full.down(full.up(x))
    for other, why in (
        (plain, "That is without GELU, which comes between the two layers."),
        (F.gelu(plain), "GELU was taken of the output: it comes between the two layers."),
    ):
        if oracle.agrees(got, numbers(other), "float64"):
            return why
    return ""


def judge_attention(case: Case) -> Iterator[Finding]:
    """Requires the whole output on all ranks, and the gradients of each rank's parts.

    Attention is causal, so the first tokens give the same output with and without the others.
    """
    yield from _judge(case, "attend", ATTENTION, _why_attention)
    right = solve(case.inputs[0], "attend")["y"][:, :FEWER]
    for rank in range(case.world_size):
        for key in ("before", "after"):
            what = f"output of the first {FEWER} tokens alone, {key} a call with all of them"
            if wrong := wrong_answer(case, key, rank, what, right):
                yield wrong
                break


def _why_attention(values: Values, got: Any, expected: np.ndarray) -> str:
    """A hint: the wrong mask that gives this output, or the first wrong token."""
    if not is_floats(got, expected.shape) or oracle.agrees(got, expected, "float64"):
        return ""
    full, x = whole_block(values), torch.from_numpy(values["x"])
    num_tokens = x.shape[1]
    for first_hidden, who in (
        (num_tokens, "each token sees all that come later"),
        (2, "each token sees the one after it, too"),
        (0, "no token sees itself"),
    ):
        full.first_hidden = first_hidden
        with torch.no_grad():
            other = numbers(full.attend(x))
        # With a mask without the diagonal, token 0 sees nothing, and implementations differ in its
        # output: compare from token 1 on.
        if oracle.agrees(got[:, 1:], other[:, 1:], "float64"):
            return f"That fits another mask, in which {who}: a token sees itself and those before."
    is_right = np.isclose(got, expected, rtol=1e-8).all(axis=(0, 2))
    first = int(np.argmin(is_right))
    if is_right.all():
        return ""
    why = "Token 0 is wrong already, which sees itself only: its weight is 1, whatever its score."
    if first > 0:
        why = f"Token {first} is the first that is wrong: are its scores, and its mask, right?"
    return why


def _why_block(values: Values, got: Any, expected: np.ndarray) -> str:
    """A hint: the wrong eps that gives this output."""
    if not is_floats(got, expected.shape) or oracle.agrees(got, expected, "float64"):
        return ""
    for eps in OTHER_EPS:
        if oracle.agrees(got, solve(values | {"eps": eps})["y"], "float64"):
            return f"That fits norms with eps {eps:g}; those of `full` have {values['eps']:g}."
    return ""


def judge_block(case: Case) -> Iterator[Finding]:
    """Requires the output and all gradients.

    The output and the gradients of the input and of both norms are whole, and the same on all
    ranks; the gradients of the split weights are each rank's parts.
    """
    right = solve(case.inputs[0])
    for rank, answer in enumerate(case.answers):
        hint = _why_block(case.inputs[0], answer.get("y"), right["y"])
        if wrong := (
            wrong_answer(case, "y", rank, "output", right["y"], hint)
            or wrong_part(case, rank, right, WEIGHTS)
            or wrong_part(case, rank, right, NORM_GRADIENTS)
            or wrong_answer(case, "x", rank, "gradient of the input", right["x"])
        ):
            yield wrong
        elif shared := answer.get("shared"):
            yield Finding(f"Training the block changes `full`, too: {str(shared)[:200]}.", rank)


# --- heads ---------------------------------------------------------------------------------------


def observe_heads(build: Any, inputs: Values, context: Context) -> Values:
    """The parts that a rank takes, and whether it refuses heads that N does not divide."""
    n = context.world_size
    weights = [linear(inputs[f"{name}.w"], inputs[f"{name}.b"], context) for name in ATTENTION]
    answer: Values = {}
    for name, layer in layers_of(build(*weights, inputs["heads"]), ATTENTION).items():
        answer |= {f"{name}.w": numbers(layer.weight), f"{name}.b": numbers(layer.bias)}
    uneven, width = n + 1, n * (n + 1) * HEAD  # N divides the width, but not the heads
    try:
        build(
            linear(np.zeros((3 * width, width)), np.zeros(3 * width), context),
            linear(np.zeros((width, width)), np.zeros(width), context),
            uneven,
        )
        answer["refused"] = False
    except ValueError:
        answer["refused"] = True
    return answer


def judge_heads(case: Case) -> Iterator[Finding]:
    """Requires the rank's own heads, and a ValueError if N does not divide the heads.

    The module's parts may be of any class that has weight and bias.
    """
    n = case.world_size
    for rank, answer in enumerate(case.answers):
        values = case.inputs[rank]
        for name in ("qkv.w", "qkv.b", "out.w", "out.b"):
            right = part_of(name, values[name], rank, n)
            hint, got = "", answer.get(name)
            if name.startswith("qkv") and isinstance(got, np.ndarray):
                hint = "Its rows are queries, then keys, then values, each of this rank's heads."
                if np.array_equal(got, np.split(values[name], n)[rank]):
                    hint = (
                        f"That is part {rank + 1} of {n} of all rows; wanted is part {rank + 1} of "
                        f"{n} of the queries, of the keys and of the values."
                    )
            what = f"attention.{name[:3]}.{'weight' if name[-1] == 'w' else 'bias'}"
            if wrong := wrong_answer(case, name, rank, what, right, hint):
                yield wrong
                break
        else:
            if n > 1 and answer.get("refused") is not True:
                yield Finding(
                    f"{n + 1} heads on {n} ranks: expected a ValueError. That the width divides is "
                    "not enough.",
                    rank,
                )


# --- with sequence parallelism -------------------------------------------------------------------


def _own_tokens(array: np.ndarray, context: Context, *, grad: bool = False) -> torch.Tensor:
    part = np.split(array, context.world_size, axis=1)[context.rank]
    return tensor(part, context, grad=grad)


def observe_sequence(build: Any, inputs: Values, context: Context) -> Values:
    """A block whose input and output are this rank's tokens; its output without gradients, too."""
    block = build_block(build, inputs, context)
    x = _own_tokens(inputs["x"], context, grad=True)
    y = read_tensor(block(x), "forward()")
    y.backward(_own_tokens(inputs["gy"], context))
    answer = {"y": numbers(y), "x": numbers(x.grad)}
    block.finish_gradients()
    answer |= gradients(layers_of(block, (*NORMS, *ATTENTION, *MLP)))
    with torch.no_grad():
        return answer | {"no_grad": numbers(block(_own_tokens(inputs["x"], context)))}


STEPS = ("", "second step: ", "third step, two backward passes: ")


def observe_norms(build: Any, inputs: Values, context: Context) -> Values:
    """Gradients of three steps; in the last one, every sequence has a backward pass of its own."""
    block = build_block(build, inputs, context)
    x, gy = (_own_tokens(inputs[name], context) for name in ("x", "gy"))
    answer: Values = {}
    for step, size in zip(STEPS, (BATCH, BATCH, 1), strict=True):
        block.zero_grad()
        for some, gradient in zip(x.split(size), gy.split(size), strict=True):
            y = read_tensor(block(some.clone().requires_grad_()), "forward()")
            y.backward(gradient)
        block.finish_gradients()
        found = gradients(layers_of(block, (*NORMS, *ATTENTION, *MLP)))
        answer |= {step + name: found[name] for name in REPLICATED}
    return answer


def judge_sequence(case: Case) -> Iterator[Finding]:
    """Requires this rank's tokens, their gradient, and the gradients of its parts."""
    n, right = case.world_size, solve(case.inputs[0])
    for rank in range(n):
        y, x = (np.split(right[name], n, axis=1)[rank] for name in ("y", "x"))
        if wrong := (
            wrong_answer(case, "y", rank, "output, this rank's tokens", y)
            or wrong_part(case, rank, right, WEIGHTS)
            or wrong_answer(case, "x", rank, "gradient of the input", x)
            or wrong_answer(case, "no_grad", rank, "output without gradients (torch.no_grad)", y)
        ):
            yield wrong


def judge_norms(case: Case) -> Iterator[Finding]:
    """Requires gradients of replicated parameters to be sums over the tokens of all ranks.

    All steps have the same sequences, so their gradients are the same. They may be summed in
    `finish_gradients`, together or one by one, or in the backward pass.
    """
    right = solve(case.inputs[0])
    for rank in range(case.world_size):
        for step in STEPS:
            if wrong := wrong_part(case, rank, right, REPLICATED, step):
                yield wrong
                break
