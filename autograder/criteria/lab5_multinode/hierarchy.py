"""Criteria for task 7 of lab 5: the hierarchical all-reduce, on the emulated cluster.

The ranks of one node are consecutive, as torchrun numbers them. The traffic is judged from the
broker's trace: the broker carried every collective and knows its ranks, its bytes and its payloads.
The right number of bytes is not enough, because the bytes must also hold the right numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autograder.criteria.common import carried, oracle
from autograder.criteria.common.answers import is_floats, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from minidist.emulate.trace import Event

CALLS = 2
FLOATS_PER_RANK = 12_000  # times the world size = a length that every local size divides
SLACK = 1.02
# The other tensors: small ones, and ones of bfloat16; no node size but 1 divides their lengths.
SMALL, SMALL_CALLS, HALF, HALF_CALLS = 613, 8, 20_003, 2
MARK = 101  # elements of the first small all-reduce that marks the end of a node size; then 102, …
SLACK_BYTES = 6_000  # allowed for small messages by which ranks agree on something
ROUNDING = 2e-7  # error of a few float32 sums: relative, and twice that absolute near zero


def local_sizes(world_size: int) -> list[int]:
    """All possible node sizes if all nodes are equally large."""
    return [n for n in range(1, world_size + 1) if world_size % n == 0]


# --- hier_values ---------------------------------------------------------------------------------


def draw_values(draw: Draw) -> list[Values]:
    """Three private tensors per node size: two with lengths that need padding, a float64 matrix.

    The second tensor is a single number without a dimension. The matrix has as many numbers as the
    first tensor, so a reused buffer must also have the right dtype.
    """
    world_size = draw.world_size
    sizes = draw.shared()
    shapes = [[[int(sizes.integers(20, 60)) * world_size + 1], []] for _ in local_sizes(world_size)]
    for per_case in shapes:
        per_case.append([per_case[0][0], 1])
    inputs = []
    for rank in range(world_size):
        rng = draw.private(rank)
        values: Values = {"shapes": shapes}
        for case, per_case in enumerate(shapes):
            for number, shape in enumerate(per_case):
                dtype = np.float64 if number == 2 else np.float32
                values[f"{case}/{number}"] = np.asarray(rng.normal(size=shape), dtype)
        inputs.append(values)
    return inputs


def observe_values(reducer_class: Any, inputs: Values, context: Context) -> Values:
    """The sums, read from the tensors that were passed to the all-reduce."""
    answer: Values = {"returned": [], "groups": []}
    for case, local_size in enumerate(local_sizes(context.world_size)):
        all_reduce = reducer_class(local_size)
        made = 0
        for number in range(len(inputs["shapes"][case])):
            numbers = inputs[f"{case}/{number}"].copy()
            tensor = torch.from_numpy(numbers)  # shares its memory: the sum must be in place
            returned = all_reduce(tensor)
            if number == 0:
                made = _num_groups()
            same = isinstance(returned, torch.Tensor) and torch.equal(returned, tensor)
            answer["returned"].append(same or type(returned).__name__)
            answer[f"{case}/{number}"] = numbers
        answer["groups"].append(_num_groups() - made)
    return answer


def _num_groups() -> int:
    """How many process groups this rank has made so far."""
    return len(dist.distributed_c10d._world.pg_map)


def judge_values(case: Case) -> Iterator[Finding]:
    """The tensors hold the sum over all ranks, for every node size.

    Groups may be made in __init__ or in the first call.
    """
    shapes = case.inputs[0]["shapes"]
    for rank, answer in enumerate(case.answers):
        for number, local_size in enumerate(local_sizes(case.world_size)):
            nodes = case.world_size // local_size
            layout = f"{nodes} node{'s' * (nodes > 1)} × {local_size}"
            wrong = None
            for k, shape in enumerate(shapes[number]):
                key = f"{number}/{k}"
                everyone = [i[key].astype(np.float64) for i in case.inputs]
                total = np.sum(everyone, axis=0)
                dtype = "float64" if k == 2 else "float32"
                wrong = wrong or oracle.differs(
                    rank,
                    f"{layout}, tensor of shape {shape}",
                    answer.get(key),
                    total,
                    dtype=dtype,
                    hint=_why(answer.get(key), total, case, key, rank),
                    terms=everyone,
                )
            if wrong:
                yield wrong
                break
        else:
            returned = told(answer, "returned")
            for what in returned if isinstance(returned, list) and returned else ["nothing"]:
                if what is not True:
                    yield Finding(
                        "the tensor holds the sum, as it should; the call should also return this "
                        f"tensor, it returned {'another' if what == 'Tensor' else what}.",
                        rank,
                    )
                    break
            else:
                groups = told(answer, "groups")
                if not isinstance(groups, list) or any(groups):
                    yield Finding(
                        f"later calls of the same object made new process groups: {groups}, by "
                        "node size. Make them once, in __init__: each one costs connections and "
                        "has to be agreed upon by all ranks.",
                        rank,
                    )


def _why(got: Any, total: np.ndarray, case: Case, key: str, rank: int) -> str:
    if not is_floats(got, total.shape):
        return ""
    if np.allclose(got, case.inputs[rank][key], rtol=1e-4):
        return "The tensor is as it was: the sum must be written into it."
    if np.allclose(got * case.world_size, total, rtol=1e-3, atol=1e-5):
        return "That is the mean; the sum was asked for."
    is_double = case.inputs[rank][key].dtype == np.float64
    if is_double and np.allclose(got, total, rtol=1e-5, atol=1e-6):
        return (
            "It is right to float32's digits only: this tensor is float64, and so must be every "
            "buffer that it passes through."
        )
    if total.size and np.isclose(got.flat[0], total.flat[0], rtol=1e-3):
        return "Its beginning is right: pad what does not divide by the ranks of a node."
    return ""


# --- hier_slow_bytes and hier_local_bytes --------------------------------------------------------


def draw_bytes(draw: Draw) -> list[Values]:
    """Node sizes between 1 and the world size (if none, the world size), and a private tensor."""
    choices = local_sizes(draw.world_size)[1:-1] or [draw.world_size]
    count = FLOATS_PER_RANK * draw.world_size
    return [
        {"local_sizes": choices, "x": draw.private(r).normal(size=count).astype(np.float32)}
        for r in range(draw.world_size)
    ]


def draw_slow(draw: Draw) -> list[Values]:
    """As `draw_bytes`, with small and bfloat16 tensors: they need the hierarchy, too."""
    return [values | {"others": True} for values in draw_bytes(draw)]


def observe_bytes(reducer_class: Any, inputs: Values, context: Context) -> Values:
    """All-reduces a large tensor twice with the same reducer, for every node size."""
    for number, local_size in enumerate(inputs["local_sizes"]):
        all_reduce = reducer_class(local_size)
        for _ in range(CALLS):
            all_reduce(torch.from_numpy(inputs["x"].copy()))
        if "others" in inputs:
            for _ in range(SMALL_CALLS):
                all_reduce(torch.ones(1, SMALL))
            for _ in range(HALF_CALLS):
                all_reduce(torch.ones(HALF, dtype=torch.bfloat16))
        dist.all_reduce(torch.zeros(MARK + number, dtype=torch.int64))  # ends this node size
    return {"done": True}


def _by_size(events: Iterable[Event], count: int) -> list[list[Event]]:
    """One rank's events per node size, cut at the marks."""
    parts: list[list[Event]] = [[]]
    for event in events:
        if (
            event.kind == "issue"
            and "int64" in event.dtype
            and event.numel == MARK - 1 + len(parts)
        ):
            parts.append([])
        else:
            parts[-1].append(event)
    return (parts + [[]] * count)[:count]


def sent_bytes(events: Iterable[Event], rank: int, local_size: int) -> tuple[float, float]:
    """Bytes that one rank sent inside its node and to other nodes, if collectives run in rings."""
    inside = outside = 0.0
    for event in events:
        if event.kind != "issue" or event.collective == "recv":
            continue
        for target, num_bytes in _flows(event, rank):
            if target // local_size == rank // local_size:
                inside += num_bytes
            else:
                outside += num_bytes
    return inside, outside


def _flows(event: Event, rank: int) -> list[tuple[int, float]]:
    """(target rank, bytes) of everything that a rank sends in one collective."""
    ranks, n, num_bytes = event.ranks, len(event.ranks), float(event.nbytes)
    if event.collective == "send":
        return [(ranks[1], num_bytes)] if ranks[0] == rank else []
    if n == 1 or rank not in ranks:
        return []
    follower = ranks[(ranks.index(rank) + 1) % n]
    root = ranks[0] if event.root is None else event.root
    others = [r for r in ranks if r != rank]
    match event.collective:
        case "all_reduce":
            return [(follower, 2 * (n - 1) / n * num_bytes)]
        case "all_gather" | "reduce_scatter":
            return [(follower, (n - 1) / n * num_bytes)]
        case "all_to_all":
            return [(r, num_bytes / n) for r in others]
        case "broadcast":
            return [(follower, num_bytes)] if follower != root else []
        case "reduce":
            return [(follower, num_bytes)] if rank != root else []
        case "gather":
            return [(root, num_bytes / n)] if rank != root else []
        case "scatter":
            return [(r, num_bytes / n) for r in others] if rank == root else []
    return []


def _sent(case: Case) -> list[tuple[int, list[tuple[float, float]]]]:
    """Per node size: (size, the bytes that each rank sent inside and outside its node)."""
    sizes = case.inputs[0]["local_sizes"]
    parts = [_by_size(events, len(sizes)) for events in case.trace.events]
    return [
        (size, [sent_bytes(part[number], rank, size) for rank, part in enumerate(parts)])
        for number, size in enumerate(sizes)
    ]


def _runs(tensors: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Every sum of one or more consecutive tensors in a ring."""
    n = len(tensors)
    for size in range(1, n + 1):
        for first in range(n if size < n else 1):
            yield np.sum([tensors[(first + k) % n] for k in range(size)], axis=0)


def _found(case: Case, number: int, rank: int, local_size: int, *, inside: bool) -> int:
    """How many different right numbers a rank has sent, inside its node or to other nodes.

    Inside a node, right numbers are in the tensors of the node's ranks and in sums of these
    tensors. Between nodes, they are in the sums over whole nodes and in sums of these sums. In both
    cases the sum over all ranks is right, too.
    """
    sizes = case.inputs[0]["local_sizes"]
    node = rank // local_size
    keys = {
        event.key
        for event in _by_size(case.trace.events[rank], len(sizes))[number]
        if event.kind == "issue"
        and event.collective != "recv"
        and any((to // local_size == node) == inside for to, _ in _flows(event, rank))
    }
    sent = [c for c in case.trace.collectives if c.key in keys and c.completed]
    tensors = [values["x"].astype(np.float64) for values in case.inputs]
    starts = range(0, case.world_size, local_size)
    nodes = [np.sum(tensors[first : first + local_size], axis=0) for first in starts]
    own = tensors[node * local_size : (node + 1) * local_size]
    right = [*_runs(own), np.sum(nodes, axis=0)] if inside else list(_runs(nodes))
    most = 4 * CALLS * tensors[0].size
    numbers = carried.numbers_in(carried.payloads_of(sent, rank), "float32", most)
    return carried.count_among(numbers, right, rtol=ROUNDING, atol=2 * ROUNDING)


def judge_slow(case: Case) -> list[Finding]:
    """No rank sends more between nodes than a ring all-reduce of its 1/local_size needs.

    A tensor may be padded so that the ranks of a node divide its length. Sums may be made by any
    collectives or by messages.
    """
    findings: list[Finding] = []
    for number, (local_size, sent) in enumerate(_sent(case)):
        nodes = case.world_size // local_size
        num_bytes = 4 * FLOATS_PER_RANK * case.world_size
        small, half = (4 * -(-SMALL // local_size), 2 * -(-HALF // local_size))
        own_bytes = CALLS * num_bytes // local_size + SMALL_CALLS * small + HALF_CALLS * half
        ideal = 2 * (nodes - 1) / nodes * own_bytes
        layout = f"{nodes} nodes × {local_size}"
        total = sum(outside for _, outside in sent)
        if total < 0.49 * ideal * case.world_size:
            return [
                Finding(
                    f"{layout}: only {_mb(total)} crossed between nodes, too little for a sum over "
                    "all of them."
                )
            ]
        for rank, (_, outside) in enumerate(sent):
            if outside > SLACK * ideal + SLACK_BYTES:
                findings.append(
                    Finding(
                        f"{layout}, {CALLS} all-reduces of {_mb(num_bytes)}, {SMALL_CALLS} of "
                        f"{SMALL} numbers and {HALF_CALLS} of {HALF} numbers in bfloat16: this "
                        f"rank sent {_mb(outside)} to other nodes"
                        f"{_by_kind(case, number, rank, local_size, inside=False)}, at most "
                        f"{_mb(ideal)} is needed. "
                        f"Reduce-scatter inside the node first: then each rank has 1/{local_size} "
                        "of the sum, and only that has to meet its counterparts on the other "
                        "nodes, whatever the tensor's size and dtype.",
                        rank,
                    )
                )
        if findings or nodes == 1:
            continue
        part = FLOATS_PER_RANK * case.world_size // local_size
        for rank in range(case.world_size):
            found = _found(case, number, rank, local_size, inside=False)
            if found < part // 2:
                findings.append(
                    Finding(
                        f"{layout}: what this rank sent to other nodes held {found} different "
                        f"numbers of the nodes' sums, expected {part}: its 1/{local_size} of what "
                        "the ranks of its node add up to.",
                        rank,
                    )
                )
    return findings


def judge_local(case: Case) -> list[Finding]:
    """Inside a node, no rank sends more than a reduce-scatter and an all-gather need."""
    findings: list[Finding] = []
    for number, (local_size, sent) in enumerate(_sent(case)):
        num_bytes = 4 * FLOATS_PER_RANK * case.world_size
        ideal = CALLS * 2 * (local_size - 1) / local_size * num_bytes
        total = sum(inside for inside, _ in sent)
        if total < 0.45 * ideal * case.world_size:
            return [Finding(f"only {_mb(total)} moved inside the nodes, too little for a sum.")]
        for rank, (inside, _) in enumerate(sent):
            if inside > SLACK * ideal + SLACK_BYTES:
                findings.append(
                    Finding(
                        f"nodes of {local_size}, {CALLS} all-reduces of {_mb(num_bytes)}: this "
                        f"rank sent {_mb(inside)} inside its node"
                        f"{_by_kind(case, number, rank, local_size, inside=True)}, at most "
                        f"{_mb(ideal)} is needed: a reduce-scatter and an all-gather, each (n-1)/n "
                        "of the tensor. An all-reduce is both already.",
                        rank,
                    )
                )
        if findings or local_size == 1:
            continue
        least = (local_size - 1) * FLOATS_PER_RANK * case.world_size // local_size
        for rank in range(case.world_size):
            found = _found(case, number, rank, local_size, inside=True)
            if found < 0.98 * least:
                findings.append(
                    Finding(
                        f"nodes of {local_size}: what this rank sent inside its node held {found} "
                        "different numbers of the ranks' tensors or of their sums, expected at "
                        f"least {least}.",
                        rank,
                    )
                )
    return findings


def _by_kind(case: Case, number: int, rank: int, local_size: int, *, inside: bool) -> str:
    """Such as " (all_reduce 2.30 MB, send 0.10 MB)": what a rank sent, the most first."""
    sums: dict[str, float] = {}
    for event in _by_size(case.trace.events[rank], len(case.inputs[0]["local_sizes"]))[number]:
        sent = sent_bytes([event], rank, local_size)[0 if inside else 1]
        sums[event.collective] = sums.get(event.collective, 0.0) + sent
    most_first = sorted(((n, kind) for kind, n in sums.items() if n), reverse=True)
    return f" ({', '.join(f'{kind} {_mb(n)}' for n, kind in most_first)})"


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f} MB"
