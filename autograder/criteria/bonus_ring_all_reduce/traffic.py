"""Criteria for how a ring all-reduce communicates, judged from the emulated cluster's trace.

Meaningless bytes do not count: about half of what a rank sends in a ring has to be numbers of the
drawn tensors, or sums of these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograder.criteria.common import carried, oracle
from autograder.criteria.common.answers import as_number, is_floats
from autograder.criteria.common.comm_hooks import as_future, refused
from autograder.criteria.common.emulated import even_cluster, sends_of
from autograder.criteria.common.tensor_memory import TensorMemory
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, named_ranks
from minidist.emulate import Link, simulate

NUMEL = 24_000  # numbers per rank; the tensor has one less, so equal chunks are impossible
SHARE_OF_HALVES = 3  # every third number in 16 bits, too
SLACK_BYTES = 2_000  # for small collectives by which ranks only agree on something
LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=2.5e-6)
MOST_TIME = 1.05
MOST_CHUNKS = 2.2  # beside the tensor, at any moment


def draw(source: Draw, *, op: str = "sum", then: tuple[str, ...] = ()) -> list[Values]:
    """One large private tensor.

    Args:
        op: the operation of its all-reduce.
        then: which other all-reduces follow; see `_others`.
    """
    count = NUMEL * source.world_size - 1  # one of n chunks is shorter: rounding adds few bytes
    common = {"op": op, "then": list(then)}
    return [
        common | {"x": source.private(rank).normal(size=count).astype(np.float32)}
        for rank in range(source.world_size)
    ]


def observe(ring_all_reduce: Any, inputs: Values, context: Context) -> Values:
    """Runs all-reduces; returns the most bytes that their new tensors had at any moment."""
    x, others = torch.from_numpy(inputs["x"].copy()), _others(inputs, context.world_size)
    with TensorMemory() as memory:
        ring_all_reduce(x, inputs["op"])
    beside = memory.peak_bytes
    for kind in inputs["then"]:
        tensor = others[kind]
        with TensorMemory() as memory:
            ring_all_reduce(tensor, "mean" if kind == "mean" else inputs["op"])
        beside = max(beside, memory.peak_bytes)
    return {"beside": beside}


def _others(inputs: Values, n: int) -> dict[str, torch.Tensor]:
    """More tensors for `n` ranks: for a mean, few rows, few numbers, none, 16 bits."""
    x, rows = torch.from_numpy(inputs["x"]), max(1, n - 1)
    width = (len(x) - 1) // rows
    return {
        "mean": x.clone(),
        "rows": x[: rows * width].view(rows, width).clone(),
        "small": torch.ones(n - 1, dtype=torch.float64),
        "empty": torch.ones(0),
        "half": x[::SHARE_OF_HALVES].half(),
    }


def _runs(tensors: list[np.ndarray], op: str) -> Iterator[np.ndarray]:
    """The tensors, and a ring's partial results in either direction, rounded after each step.

    Sums count for a maximum, too: other criteria judge what is computed.
    """
    for first, tensor in enumerate(tensors):
        yield tensor
        for step in (1, -1):
            for combine in (np.add, np.maximum) if op == "max" else (np.add,):
                total = tensor
                for k in range(1, len(tensors)):
                    total = combine(total, tensors[(first + step * k) % len(tensors)])
                    yield total


def _without_content(case: Case) -> Iterator[Finding]:
    """A finding for the first rank that sent too few of the tensors' numbers and of their sums.

    Half of what a rank sends in a ring is enough, because separate checks detect a wrong sum.
    """
    n, count = case.world_size, len(case.inputs[0]["x"])
    enough = (n - 1) / n * count
    # No tolerance, because among so many numbers some are close to any given number. Equality
    # works: a float32 sum has the same bits in either order of its two summands.
    sums = list(_runs([i["x"] for i in case.inputs], case.inputs[0]["op"]))
    for rank in range(n):
        sent = [c for c in case.trace.collectives if c.kind == "send" and c.ranks[0] == rank]
        numbers = carried.numbers_in(carried.payloads_of(sent, rank), "float32", 4 * count)
        found = carried.count_among(numbers, sums)
        if found < 0.98 * enough:
            yield Finding(
                f"this rank's messages held {found} different numbers of the ranks' tensors or "
                f"of their sums, expected at least {enough:.0f}: what goes round is the chunk "
                "that the rank before has sent, with its own added to it.",
                rank,
            )
            return


def _problem(case: Case) -> list[Finding]:
    """Findings that make it impossible to judge the traffic further."""
    if case.world_size == 1:
        return []
    total = sum(m.nbytes for rank in range(case.world_size) for m in sends_of(case, rank))
    others = sorted(
        {
            e.collective
            for events in case.trace.events
            for e in events
            if e.kind == "issue"
            and e.collective not in ("send", "recv", "barrier")
            and e.numel * 4 > (0 if "empty" in case.inputs[0]["then"] else SLACK_BYTES)
        }
    )
    if others:
        return [
            Finding(
                f"the tensor went through {others[0]}: only sends and receives are allowed here."
            )
        ]
    if total < 4 * len(case.inputs[0]["x"]):
        return [Finding(f"only {total} bytes were sent by all ranks, too few for a sum.")]
    return [*_without_content(case)]


def judge_bytes(case: Case) -> Iterator[Finding]:
    """No rank sends more bytes than 2 (N - 1) of the longest chunks have."""
    findings = _problem(case)
    yield from findings
    n = case.world_size
    count = len(case.inputs[0]["x"])
    halves = -(-count // SHARE_OF_HALVES)
    num_bytes = 4 * count + 2 * halves
    most = 2 * (n - 1) * (4 * math.ceil(count / n) + 2 * math.ceil(halves / n))
    for rank in range(n) if not findings and n > 1 else ():
        messages = sends_of(case, rank)
        sent = sum(m.nbytes for m in messages)
        if sent > most:
            reason = "More than one N-th of them goes on in a step."
            if len(messages) > 2 * 2 * (n - 1):
                reason = "Send nothing but chunks: both sides know how long each of them is."
            elif sent < most + SLACK_BYTES:
                reason = "No chunk is longer than an N-th, rounded up."
            elif sent >= 0.98 * (n - 1) * num_bytes:
                reason = f"That is {sent / num_bytes:.1f} times the whole tensors."
            elif abs(sent - most * (1 + 2 * halves / num_bytes)) < SLACK_BYTES:
                reason = "It would be that many if the 16-bit numbers travelled as 32 bits."
            yield Finding(
                f"a tensor of {count} float32 and one of {halves} float16 on {n} ranks: this "
                f"rank sent {sent} bytes, {most} are enough: 2 (N - 1) / N of the "
                f"{num_bytes} bytes, rounded up to whole chunks. {reason}",
                rank,
            )


def judge_neighbours(case: Case) -> Iterator[Finding]:
    """Rank r sends to rank r + 1 only, and calls no barrier."""
    findings = _problem(case)
    yield from findings
    for rank, events in enumerate(case.trace.events if not findings else ()):
        if any(e.kind == "issue" and e.collective == "barrier" for e in events):
            yield Finding("it calls a barrier: only sends and receives are allowed here.", rank)
            return
    n = case.world_size
    for rank in range(n) if not findings and n > 1 else ():
        reached = sorted({m.ranks[1] for m in sends_of(case, rank)})
        if set(reached) - {(rank + 1) % n}:
            why = "In a ring every rank sends to the next one."
            if len(reached) > 1:
                why = "In a ring each link carries one stream; these share one link among them."
            yield Finding(
                f"this rank sent to {named_ranks(reached)}, expected rank {(rank + 1) % n} "
                f"only. {why}",
                rank,
            )


def judge_messages(case: Case) -> list[Finding]:
    """No message is larger than a chunk, and no second tensor lies beside the first.

    The text allows one chunk. Two are allowed here, because `own + arrived` makes a tensor, too.
    A chunk may travel in pieces.
    """
    findings = _problem(case)
    n = case.world_size
    chunk = math.ceil(len(case.inputs[0]["x"]) / n)
    for rank in range(n) if not findings and n > 1 else ():
        total = len(case.inputs[0]["x"])
        largest = max((m.numel for m in sends_of(case, rank)), default=0)
        if largest > chunk:
            why = "A rank that waits for a whole tensor before it sends leaves its link idle."
            if n > 2 and largest == (total - 1) // (n - 1):
                why = f"(This tensor has {n - 1} rows: cut the flat tensor, not its rows.)"
            findings.append(
                Finding(
                    f"a message carried {largest} of {total} numbers, expected at most {chunk}, a "
                    f"chunk where there are {n} of them. {why}",
                    rank,
                )
            )
            continue
        few = [m.numel for m in sends_of(case, rank) if m.dtype == "float64"]
        if max(few, default=0) > 1:
            findings.append(
                Finding(
                    f"a message carried {max(few)} of {n - 1} numbers, expected one at most: that "
                    f"is what a chunk has where {n} ranks share {n - 1} numbers.",
                    rank,
                )
            )
    for rank, answer in enumerate(case.answers) if not findings and n > 2 else ():
        beside = as_number(answer.get("beside"))
        if beside is None or beside > MOST_CHUNKS * 4 * chunk:
            findings.append(
                Finding(
                    f"the tensor has {len(case.inputs[0]['x'])} numbers, and new tensors had "
                    f"{(beside or 0) / 4:.0f} at once, expected {chunk}: one chunk beside the "
                    "tensor, not a second tensor.",
                    rank,
                )
            )
    return findings


def judge_time(case: Case) -> Iterator[Finding]:
    """Requires the virtual time of 2 (N - 1) steps that each keep all links busy."""
    findings = _problem(case)
    yield from findings
    n = case.world_size
    if findings or n == 1:
        return
    cluster = even_cluster(n, LINK.bandwidth_bytes_per_s, LINK.latency_s)
    took_s = simulate(case.trace, cluster).makespan_s
    chunk_bytes = 4 * math.ceil(len(case.inputs[0]["x"]) / n)
    best_s = 2 * (n - 1) * (LINK.latency_s + chunk_bytes / LINK.bandwidth_bytes_per_s)
    if took_s > MOST_TIME * best_s:
        yield Finding(
            f"the {case.inputs[0]['op']} of all ranks took {took_s * 1e3:.3f} ms of virtual time, "
            f"a ring takes {best_s * 1e3:.3f} ms: {2 * (n - 1)} steps of one chunk, in each of "
            "which every rank sends and receives at the same time."
        )
    elif took_s < 0.9 * best_s:
        yield Finding(f"it took {took_s * 1e3:.3f} ms of virtual time: too little to be true.")


# --- DDP -----------------------------------------------------------------------------------------

SIZES, BATCH, STEPS = (30, 40, 5), 4, 3


def draw_hook(source: Draw) -> list[Values]:
    """One model for all ranks, and a private batch for each rank."""
    start = oracle.draw_parameters(source.shared(), SIZES)
    return [
        start | oracle.draw_batch(source.private(rank), BATCH, SIZES)
        for rank in range(source.world_size)
    ]


def observe_hook(hook: Any, inputs: Values, context: Context) -> Values:
    """Gradients of torch's DDP with the student's hook."""
    model: nn.Module = oracle.mlp(inputs)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)  # several buckets
    if why := refused(ddp, hook):
        raise TypeError(f"ring_hook: {why}")
    ddp.register_comm_hook(None, lambda state, bucket: as_future(hook(state, bucket), "ring_hook"))
    for _ in range(STEPS):
        ddp.zero_grad()
        x, y = (torch.from_numpy(inputs[name]) for name in "xy")
        oracle.mse(ddp(x), y).backward()
    return {f"g{i}": oracle.grad_of(p) for i, p in enumerate(model.parameters())}


def _few_digits(got: Any) -> str:
    if is_floats(got) and got.any() and np.isfinite(got).all():
        values = torch.from_numpy(got.astype(np.float64))
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(values.to(dtype).double(), values):
                name = str(dtype).removeprefix("torch.")
                return f"They have the digits of {name} only: reduce the bucket in its own dtype."
    return ""


def judge_hook(case: Case) -> Iterator[Finding]:
    """Requires the mean gradients over ranks, computed by the ring.

    The future may be finished or not when it is returned, its tensor the bucket's or a new one.
    """
    local = [oracle.gradients(i, i["x"], i["y"]) for i in case.inputs]
    count = sum(grad.size for grad in local[0])
    for rank, answer in enumerate(case.answers):
        for i, own in enumerate(local[rank]):
            mean = oracle.mean([grads[i] for grads in local])
            got = answer.get(f"g{i}")
            hint = oracle.explain_gradient(got, mean, own, case.world_size) or _few_digits(got)
            if wrong := oracle.differs(rank, f"gradient {i}", got, mean, hint=hint):
                yield wrong
                break
        else:
            reduced = [
                e
                for e in case.trace.events[rank]
                if e.kind == "issue"
                and e.collective == "all_reduce"
                and "float" in e.dtype
                and e.numel > 50
            ]
            sent = sum(m.numel for m in sends_of(case, rank))
            if case.world_size > 1 and (reduced or sent < STEPS * count):
                yield Finding(
                    "the gradients did not go through sends and receives: the hook has to call "
                    "your ring_all_reduce on bucket.buffer().",
                    rank,
                )
