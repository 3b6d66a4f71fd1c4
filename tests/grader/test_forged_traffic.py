"""Answers and traces without the work behind them: what the judges of traffic say of each.

A trace is made in this process from what a rank would send, so no form needs ranks. Beside
the forged ones stands an honest one, made in the same way, which has to pass.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from autograder.criteria import find_criterion
from autograder.criteria.bonus_pipeline import emulated, messages
from autograder.criteria.bonus_pipeline import parts as pipe_parts
from autograder.criteria.bonus_tensor_parallel import model
from autograder.criteria.common import oracle
from autograder.criteria.criterion import Case, Draw, Finding, Values
from autograder.criteria.lab5_multinode import hierarchy
from autograder.referee.judging import judge
from minidist.emulate.session import Session
from minidist.emulate.trace import Event, Trace

N = 4
EVERYBODY = tuple(range(N))
NOTHING = np.empty(0, np.uint8)
Action = tuple[str, Values, np.ndarray]  # a frame's type, its fields, its payload
Program = Callable[[int], Iterator[Action]]


def _seed(purpose: str) -> int:
    return int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:16], "big")


def handed_out(name: str) -> list[Values]:
    return find_criterion(name)[1].draw(Draw(N, _seed))


def findings(name: str, answers: Sequence[Values], program: Program | None = None) -> list[Finding]:
    """What the judge says of these answers, when each rank has asked the broker for this."""
    criterion, draw = find_criterion(name)[1], Draw(N, _seed)
    plan = criterion.plan(draw) if criterion.plan else None
    session = Session(
        1, N, plan, lambda *_: None, keep_payloads=True, deadline_s=30.0, max_bytes=1 << 28
    )
    requests = itertools.count()
    for rank in range(N):
        session.handle(rank, {"t": "join", "q": next(requests)}, NOTHING)
        counts: dict[str, int] = {}
        for kind, fields, payload in program(rank) if program else ():
            if kind == "issue" and fields["kind"] not in ("send", "recv"):
                fields = {"k": counts.get(fields["g"], 0)} | fields
                counts[fields["g"]] = fields["k"] + 1
            session.handle(rank, {"t": kind, "q": next(requests)} | fields, payload)
    case = Case(N, criterion.draw(draw), answers, session.trace(), plan)
    assert not session.faults, session.faults
    return judge(criterion, case)


def charge(direction: str) -> Action:
    return "charge", {"layer": 0, "dir": direction}, NOTHING


def collective(kind: str, array: np.ndarray, ranks: Sequence[int] = EVERYBODY) -> Action:
    size = array.size // len(ranks) if kind == "reduce_scatter" else array.size
    fields = {
        "g": f"g{list(ranks)}",
        "r": list(ranks),
        "kind": kind,
        "dtype": str(array.dtype),
        "shape": [size],
        "op": "" if kind == "all_gather" else "sum",
    }
    return "issue", fields, np.ascontiguousarray(array).ravel().view(np.uint8)


def message(kind: str, array: np.ndarray, peer: int) -> Action:
    fields = {
        "g": "world",
        "r": list(EVERYBODY),
        "kind": kind,
        "dtype": str(array.dtype),
        "shape": [array.size],
        "peer": peer,
        "tag": 0,
    }
    raw = np.ascontiguousarray(array).ravel().view(np.uint8)
    return "issue", fields, raw if kind == "send" else NOTHING


# --- pipeline ------------------------------------------------------------------------------------


def gradients(name: str) -> list[np.ndarray]:
    return pipe_parts.solve(Case(N, handed_out(name), [{}] * N), 0)[1]


def before(values: Values) -> np.ndarray:
    return np.concatenate([values[f"before/{name}"].ravel() for name in "wb"])


def test_gradients_beside_those_that_were_there():
    name = "pipe_accumulate"
    inputs, new = handed_out(name), gradients(name)
    there = [before(values) for values in inputs]

    def judged(added: list[np.ndarray]) -> list[Finding]:
        return findings(name, [{"g/0": a + b} for a, b in zip(there, added, strict=True)])

    assert not judged(new)
    assert not judged([3.0 * each for each in new])  # a factor is another check's
    for forged in (
        [0.0 * each for each in new],
        [-each for each in new],
        [np.abs(each) for each in new],
        [*new[:-1], new[-1] + 1e-3 * np.abs(new[-1]).max() * np.sign(there[-1])],
    ):
        assert judged(forged)


def test_room_that_nothing_was_kept_in():
    name = "pipe_limit"
    right = gradients(name)

    def judged(grads: list[np.ndarray]) -> list[Finding]:
        return findings(name, [{"done": True, "g/0": each} for each in grads])

    assert not judged(right)
    assert not judged([0.25 * each for each in right])
    assert judged([0.0 * each for each in right])
    assert judged([np.ones_like(each) for each in right])
    assert judged([*(0.0 * each for each in right[:-1]), right[-1]])


def test_gradients_that_travel_before_they_are_there():
    passed = Event(kind="compute", direction="backward")
    sends = Event(kind="issue", ranks=(1, 0), nbytes=emulated.MESSAGE_BYTES)

    def judged(*events: Event) -> list[Finding]:
        trace = Trace(world_size=2, events=[[], list(events)])
        return list(emulated._wrong_gradients(Case(2, [{}] * 2, [{}] * 2, trace)))

    assert not judged(passed, sends, passed, sends)
    assert not judged(passed, passed, sends, sends)
    for forged in ((passed, passed), (passed, sends, sends, passed), (passed, passed, sends)):
        assert judged(*forged)


def test_messages_with_nothing_in_them():
    name = "pipe_messages"
    inputs = handed_out(name)
    case = Case(N, inputs, [{}] * N)
    crossing = messages._crossing(case)
    on, back = ([each.float() for each in way] for way in crossing)
    m = len(inputs[0]["cases"][0]["sizes"])
    first = pipe_parts.Stage(inputs[0]["w"], inputs[0]["b"], False)  # for the call with one rank
    x = pipe_parts.batch_of(case, 0)[0][: messages.ALONE * emulated.SAMPLES]
    oracle.mse(first(x), x).backward()
    answers = [{"done": True} | pipe_parts.gradients_of(first, 0), *[{"done": True}] * (N - 1)]

    def judged(
        factor_on: Sequence[float], factor_back: Sequence[float], waits: bool = True
    ) -> list[Finding]:
        def program(rank: int) -> Iterator[Action]:
            for i in range(m):
                rows = slice(i * emulated.SAMPLES, (i + 1) * emulated.SAMPLES)
                if rank < N - 1:
                    yield message("send", factor_on[rank] * on[rank][rows].numpy(), rank + 1)
                    yield message("recv", back[rank][rows].numpy(), rank + 1)
                if rank > 0:
                    yield message("recv", on[rank - 1][rows].numpy(), rank - 1)
                    grad = back[rank - 1][rows].numpy()
                    yield message("send", factor_back[rank - 1] * grad, rank - 1)
            for peer in {rank - 1, rank + 1} & {*EVERYBODY} if waits else ():
                for i in range(m):
                    yield "wait", {"key": f"world/{rank}>{peer}/0/{i}"}, NOTHING

        return findings(name, answers, program)

    once = [1.0] * (N - 1)
    assert not judged(once, once)
    assert not judged(once, [float(m)] * (N - 1))
    assert "has not waited for their handles" in judged(once, once, waits=False)[0].message
    for factor_on, factor_back in (
        ([0.0] * (N - 1), [0.0] * (N - 1)),
        (once, [0.0] * (N - 1)),
        ([1.0, 1.0, 0.0], once),
        ([2.0, 1.0, 1.0], once),
    ):
        assert "was not in what" in judged(factor_on, factor_back)[0].message


# --- tensor parallelism --------------------------------------------------------------------------

HALVES = {"btp_mlp_traffic": "transform", "btp_attention_traffic": "attend"}


@pytest.mark.parametrize("name", HALVES)
def test_a_half_of_the_layer_that_every_rank_computes_alone(name):
    values, what = handed_out(name)[0], HALVES[name]
    right, shares = model.solve(values, what), model.summands(values, N, what)
    whole = {"forward": right["y"], "backward": right["x"]}
    for direction, total in whole.items():
        assert np.allclose(np.sum([share[direction][0] for share in shares], axis=0), total)

    def judged(calls: Callable[[int, str], list[Action]]) -> list[Finding]:
        def program(rank: int) -> Iterator[Action]:
            for direction in whole:
                yield charge(direction)
                yield from calls(rank, direction)

        return findings(name, [{"y": right["y"], "x": right["x"]}] * N, program)

    def summed(array: np.ndarray, ranks: Sequence[int] = EVERYBODY) -> list[Action]:
        return [collective("all_reduce", array, ranks)]

    assert not judged(lambda rank, way: summed(shares[rank][way][0]))
    assert not judged(lambda rank, way: summed(shares[rank][way][0].transpose(1, 0, 2)))
    for forged in (
        lambda rank, way: [],
        lambda rank, way: summed(0.0 * whole[way]),
        lambda rank, way: summed(whole[way] / N),
        lambda rank, way: summed(whole[way] * (rank == 0)),
        lambda rank, way: summed(shares[rank][way][0], [rank]),
        lambda rank, way: summed(shares[rank][way][0], [0, 1] if rank < 2 else [2, 3]),
        lambda rank, way: summed(shares[rank][way][0]) if way == "forward" else [],
    ):
        assert "own part of the weights gives was not in it" in judged(forged)[0].message


def test_a_layer_on_a_part_of_the_tokens_that_every_rank_computes_alone():
    name = "btp_sequence_traffic"
    values = handed_out(name)[0]
    right, shares = model.solve(values)["y"], model.summands(values, N)
    answers = [{"y": part} for part in np.split(right, N, axis=1)]

    def judged(calls: Callable[[int, np.ndarray], list[Action]]) -> list[Finding]:
        def program(rank: int) -> Iterator[Action]:
            for direction in ("forward", "backward"):
                yield charge(direction)
                for share in shares[rank][direction]:
                    yield from calls(rank, share)

        return findings(name, answers, program)

    def halves(share: np.ndarray, ranks: Sequence[int] = EVERYBODY) -> list[Action]:
        part = np.split(values["x"], N, axis=1)[0]
        whole = np.ascontiguousarray(share.transpose(1, 0, 2))
        return [
            collective("all_gather", part, ranks),
            collective("reduce_scatter", whole, ranks),
        ]

    assert not judged(lambda rank, share: halves(share))
    for forged in (
        lambda rank, share: [],
        lambda rank, share: halves(0.0 * share),
        lambda rank, share: halves(share, [rank]),
        lambda rank, share: halves(share)[1:],
        lambda rank, share: halves(share)[:1],
    ):
        assert "own part of the weights gives was not in it" in judged(forged)[0].message


# --- the ring ------------------------------------------------------------------------------------

RING = ("ring_bytes", "ring_neighbours", "ring_messages", "ring_time")


def ring_payloads(tensors: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Per rank what it sends in a ring all-reduce."""
    parts = [np.array_split(x.copy(), N) for x in tensors]
    sent: list[list[np.ndarray]] = [[] for _ in range(N)]
    for step in range(2 * (N - 1)):
        going = [parts[rank][(rank - step) % N].copy() for rank in range(N)]
        for rank in range(N):
            sent[rank].append(going[rank])
            target = parts[rank][(rank - 1 - step) % N]
            target[:] = going[rank - 1] + (target if step < N - 1 else 0)
    return sent


@pytest.mark.parametrize("name", RING)
def test_a_ring_that_carries_nothing(name):
    inputs = handed_out(name)
    sent = ring_payloads([values["x"] for values in inputs])

    def judged(change: Callable[[int, np.ndarray], np.ndarray]) -> list[Finding]:
        def program(rank: int) -> Iterator[Action]:
            for step in range(2 * (N - 1)):
                coming = sent[rank - 1][step]
                yield message("send", change(step, sent[rank][step]), (rank + 1) % N)
                yield message("recv", coming, (rank - 1) % N)
                key = f"world/{(rank - 1) % N}>{rank}/0/{step}"
                yield "wait", {"key": key}, NOTHING

        return findings(name, [{"beside": 0}] * N, program)

    assert not judged(lambda step, chunk: chunk)
    for forged in (
        lambda step, chunk: 0 * chunk,
        lambda step, chunk: np.full_like(chunk, inputs[0]["x"][0]),
        lambda step, chunk: chunk if step < 2 else 0 * chunk,
        lambda step, chunk: np.arange(chunk.size, dtype=chunk.dtype),
    ):
        assert "messages held" in judged(forged)[0].message


# --- nodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hier_slow_bytes", "hier_local_bytes"])
def test_a_hierarchy_that_carries_nothing(name):
    inputs = handed_out(name)
    assert inputs[0]["local_sizes"] == [2]
    tensors = [values["x"] for values in inputs]
    nodes = [[0, 1], [2, 3]]

    def judged(change: Callable[[np.ndarray], np.ndarray]) -> list[Finding]:
        def program(rank: int) -> Iterator[Action]:
            node, across = nodes[rank // 2], [rank % 2, rank % 2 + 2]
            part = np.split(sum(tensors[r] for r in node), 2)[rank % 2]
            total = np.split(sum(tensors), 2)[rank % 2]
            for _ in range(hierarchy.CALLS):
                yield collective("reduce_scatter", change(tensors[rank]), node)
                yield collective("all_reduce", change(part), across)
                yield collective("all_gather", change(total), node)
            yield collective("all_reduce", np.zeros(hierarchy.MARK, dtype=np.int64))

        return findings(name, [{"done": True}] * N, program)

    assert not judged(lambda array: array)
    forms: list[Any] = [np.zeros_like, np.ones_like, lambda array: 2 * array]
    for forged in forms:
        assert "different numbers" in judged(forged)[0].message
