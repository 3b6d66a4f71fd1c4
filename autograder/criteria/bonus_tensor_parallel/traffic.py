"""Criteria for what tensor parallelism sends, judged from the emulated cluster's trace.

Each rank asks for a charge before its forward pass and for a second charge before its backward
pass, so the trace shows which collective belongs to which pass. The judges also compare the results
with the oracle, so a rank that sends too little fails. But all ranks have the same input, so a rank
that finds the other ranks' weights could compute everything alone. Therefore each rank's own
summands have to be in what the rank sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autograder.criteria.bonus_tensor_parallel.layers import build_attention, build_block, build_mlp
from autograder.criteria.bonus_tensor_parallel.model import (
    draw_block,
    numbers,
    solve,
    summands,
    tensor,
    wrong_answer,
)
from autograder.criteria.common import carried
from autograder.criteria.common.answers import read_tensor
from autograder.criteria.common.charged import reaches_all
from autograder.criteria.common.emulated import of_every_rank
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from minidist.emulate.trace import Collective, Event

SLACK_BYTES = 512  # for small messages by which ranks only agree on something
DIRECTIONS = ("forward", "backward")
WHEN_RIGHT = "What is sent is judged where the numbers are right."
SUMS = {
    "forward": "g adds up the outputs of the row-parallel layers.",
    "backward": "f adds up the gradients of the input of the column-parallel layers.",
}


def draw(source: Draw) -> list[Values]:
    """A block, an input of more than a few bytes, a gradient."""
    return draw_block(source, sequences=3, tokens=4 * source.world_size)


def _run(module: Any, x: np.ndarray, gy: np.ndarray, context: Context) -> Values:
    leaf = tensor(x, context, grad=True)
    context.broker.charge(0, "forward")
    y = read_tensor(module(leaf), "forward()")
    context.broker.charge(0, "backward")
    y.backward(tensor(gy, context))
    return {"y": numbers(y), "x": numbers(leaf.grad)}


def observe_mlp(build: Any, inputs: Values, context: Context) -> Values:
    """One forward and one backward pass of the MLP."""
    return _run(build_mlp(build, inputs, context), inputs["x"], inputs["gy"], context)


def observe_attention(build: Any, inputs: Values, context: Context) -> Values:
    """One forward and one backward pass of attention."""
    return _run(build_attention(build, inputs, context), inputs["x"], inputs["gy"], context)


def observe_sequence(build: Any, inputs: Values, context: Context) -> Values:
    """One forward and one backward pass of a block on this rank's tokens."""
    block = build_block(build, inputs, context)
    x, gy = (np.split(inputs[k], context.world_size, axis=1)[context.rank] for k in ("x", "gy"))
    answer = _run(block, x, gy, context)
    block.finish_gradients()
    return answer


def passes_of(case: Case, rank: int) -> dict[str, list[Event]] | Finding:
    """What a rank sent in each pass, or a finding if a pass did not run."""
    sent: dict[str, list[Event]] = {}
    now: list[Event] = []
    for event in case.trace.events[rank]:
        if event.kind == "compute" and event.direction in DIRECTIONS:
            now = sent.setdefault(event.direction, [])
        elif (
            event.kind == "issue"
            and event.collective not in ("barrier", "recv")
            and len(set(event.ranks)) > 1  # a group of one rank sends nothing
        ):
            now.append(event)
    if list(sent) != list(DIRECTIONS):
        return Finding("the forward and the backward pass were not run.", rank)
    return sent


def cost(events: list[Event]) -> float:
    """The bytes; all collectives but an all-reduce count half, because they send half as much."""
    return sum(e.nbytes * (1.0 if e.collective == "all_reduce" else 0.5) for e in events)


def _words(events: list[Event]) -> str:
    """Per kind of collective, how many there were, and their bytes together."""
    sizes: dict[str, list[int]] = {}
    for event in events:
        sizes.setdefault(event.collective, []).append(event.nbytes)
    words = [f"{len(each)} {kind} ({sum(each)} bytes)" for kind, each in sizes.items()]
    return ", ".join(words) or "nothing"


def shared(case: Case, events: list[Event]) -> dict[str, Collective]:
    """By key, the collectives of `events` that reach all ranks, and the messages that arrived."""
    keys = {event.key for event in events}
    return {
        c.key: c
        for c in case.trace.collectives
        if c.key in keys and reaches_all(c, case.world_size)
    }


def _sent_numbers(case: Case, rank: int, events: list[Event]) -> np.ndarray:
    """The numbers that a rank put into the `shared` collectives of `events`."""
    payloads = carried.payloads_of(shared(case, events).values(), rank)
    return carried.numbers_in(payloads, "float64", 8 * case.inputs[0]["x"].size)


def _holds(sent: np.ndarray, part: np.ndarray) -> bool:
    """Whether `sent` contains all numbers of `part`, in any order."""
    atol = 1e-9 * float(np.abs(part).max())
    return bool(carried.is_among(part.ravel(), sent, rtol=1e-9, atol=atol).all())


def _judge_one_each(case: Case, what: str, hints: dict[str, str]) -> Iterator[Finding]:
    """Requires right results, and one all-reduce of the activations in each direction."""
    right = solve(case.inputs[0], what)
    shares: list[dict[str, list[np.ndarray]]] = []
    whole = case.inputs[0]["x"].nbytes
    for rank, sent in enumerate(of_every_rank(case, passes_of)):
        if isinstance(sent, Finding):
            yield sent
            continue
        if wrong := wrong_answer(case, "y", rank, "output", right["y"], WHEN_RIGHT) or wrong_answer(
            case, "x", rank, "gradient of the input", right["x"], WHEN_RIGHT
        ):
            yield wrong
            continue
        for direction in DIRECTIONS:
            events = sent[direction]
            large = [e for e in events if e.nbytes > SLACK_BYTES]
            if len(large) > 1 or cost(events) > 1.02 * whole + SLACK_BYTES:
                yield Finding(
                    f"{direction} pass: sent {_words(events)}, expected one all_reduce of {whole} "
                    f"bytes. {hints[direction]}",
                    rank,
                )
                break
            shares = shares or summands(case.inputs[0], case.world_size, what)
            share = shares[rank][direction][0]
            if case.world_size > 1 and not _holds(_sent_numbers(case, rank, events), share):
                yield Finding(
                    f"{direction} pass: sent {_words(events)}, expected one all_reduce of {whole} "
                    "bytes over all ranks. What this rank's own part of the weights gives was not "
                    f"in it. {SUMS[direction]}",
                    rank,
                )
                break


def judge_mlp(case: Case) -> Iterator[Finding]:
    """One all-reduce forward, one backward."""
    return _judge_one_each(
        case,
        "transform",
        {
            "forward": "What the column-parallel layer gives is what the row-parallel one wants: "
            "nothing has to be gathered between them.",
            "backward": "The row-parallel layer has nothing to send here, the column-parallel "
            "one its input's gradient.",
        },
    )


def judge_attention(case: Case) -> Iterator[Finding]:
    """One all-reduce forward, one backward."""
    return _judge_one_each(
        case,
        "attend",
        {
            "forward": "A head needs nothing of the others.",
            "backward": "Queries, keys and values come from one input: f once, not three times.",
        },
    )


def _of_others(share: np.ndarray, rank: int, n: int) -> list[np.ndarray]:
    """For each other rank, the part of a summand that belongs to that rank's tokens."""
    return [part for other, part in enumerate(np.split(share, n, axis=1)) if other != rank]


def judge_sequence(case: Case) -> Iterator[Finding]:
    """Requires all-gathers and reduce-scatters, and no all-reduce of activations."""
    n, whole = case.world_size, case.inputs[0]["x"].nbytes
    right = solve(case.inputs[0])
    shares: list[dict[str, list[np.ndarray]]] = []
    passes = of_every_rank(case, passes_of)
    expected = f"expected 2 all_gather and 2 reduce_scatter ({2 * whole} bytes each kind)"
    total: dict[str, float] = {direction: 0.0 for direction in DIRECTIONS}
    for sent in passes:
        for direction, events in {} if isinstance(sent, Finding) else sent.items():
            to_all = shared(case, events)
            total[direction] += cost([e for e in events if e.key in to_all])
    for rank, sent in enumerate(passes):
        if isinstance(sent, Finding):
            yield sent
            continue
        y = np.split(right["y"], n, axis=1)[rank]
        if wrong := wrong_answer(case, "y", rank, "output, this rank's tokens", y, WHEN_RIGHT):
            yield wrong
            continue
        for direction, most in (("forward", 2.0), ("backward", 3.0)):
            events = sent[direction]
            # Gradients of norms may travel here, too; they are far smaller than activations.
            sums = [e for e in events if e.collective == "all_reduce" and e.nbytes >= whole // 2]
            if sums or cost(events) > 1.1 * most * whole + SLACK_BYTES:
                why = "These are more bytes than that."
                scattered = sum(e.nbytes for e in events if e.collective == "reduce_scatter")
                if sums and scattered < 2 * whole:
                    why = "An all-reduce and a slice give the same numbers at twice the price."
                yield Finding(f"{direction} pass: sent {_words(events)}, {expected}. {why}", rank)
                break
            # With any algorithm, each of the four collectives sends at least (n - 1) / n of `whole`
            # per rank. A rank must send its summand of at least one other rank's tokens
            # unchanged: in a ring, the rank adds its other summands to the numbers it received.
            shares = shares or summands(case.inputs[0], n)
            numbers_sent = _sent_numbers(case, rank, events)
            if n > 1 and (
                total[direction] < 0.98 * 2 * (n - 1) * whole
                or not all(
                    any(_holds(numbers_sent, part) for part in _of_others(share, rank, n))
                    for share in shares[rank][direction]
                )
            ):
                yield Finding(
                    f"{direction} pass: sent {_words(events)}, {expected}, over all ranks. What "
                    "this rank's own part of the weights gives was not in it.",
                    rank,
                )
                break
