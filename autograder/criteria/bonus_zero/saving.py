"""Criteria for saving shares of a sharded optimiser, and for loading them again."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autograder.criteria.bonus_zero import harness
from autograder.criteria.bonus_zero.values import FIRST, SECOND, TINY
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

BEFORE, AFTER = 3, 2
ADAMW = {"lr": 0.05, "weight_decay": 0.2}
MOMENTUM = {"lr": 0.05, "momentum": 0.9}  # for RMSprop, which does not use its step count
_worlds = itertools.count()


def _step(optimizer: Any, parameters: Any, inputs: Values, step: int) -> None:
    harness.backward(parameters, inputs, step)
    optimizer.reduce()
    optimizer.step()
    optimizer.zero_grad()


def _written(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _read(blobs: list[bytes]) -> list[Any]:
    return [torch.load(io.BytesIO(blob), weights_only=True) for blob in blobs]


def _gathered(blob: bytes) -> list[bytes]:
    blobs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(blobs, blob)
    return blobs


# --- what is written -----------------------------------------------------------------------------

LARGE = ([(90, 110), (110,)], [(70, 71), (71,)])
FILE_SLACK = 1.1
FILE_OVERHEAD = 8192


def draw_saved(draw: Draw) -> list[Values]:
    """Two large groups."""
    return harness.draw_training(draw, [(shapes, {}) for shapes in LARGE], 2)


def observe_saved(subject: Any, inputs: Values, context: Context) -> Values:
    """The saved state after one step, and the content of the same object after a second step."""
    zero, save_shard = subject
    parameters = harness.make_parameters(inputs, context.device)
    optimizer = zero(harness.make_groups(inputs, parameters), torch.optim.AdamW, **ADAMW)
    _step(optimizer, parameters, inputs, 0)
    context.broker.charge(0, "forward")
    state = save_shard(optimizer)
    context.broker.charge(0, "backward")
    first = _written(state)
    torch.load(io.BytesIO(first), weights_only=True)
    _step(optimizer, parameters, inputs, 1)
    return {
        "first": np.frombuffer(first, dtype=np.uint8),
        "later": np.frombuffer(_written(state), dtype=np.uint8),
    }


def judge_saved(case: Case) -> list[Finding]:
    """Requires that each rank saves a copy of its share, without communication.

    All shares together have to be large enough for the whole state.
    """
    findings: list[Finding] = []
    numel = sum(int(np.prod(shape)) for shape in case.inputs[0]["shapes"])
    # The limit allows two moments and the shard itself.
    most = FILE_SLACK * 3 * 4 * numel / case.world_size + FILE_OVERHEAD
    total = 0
    for rank, answer in enumerate(case.answers):
        first, later = answer.get("first"), answer.get("later")
        if not isinstance(first, np.ndarray) or first.dtype != np.uint8:
            findings.append(Finding("nothing was saved.", rank))
            continue
        total += first.size
        if first.size > most:
            findings.append(
                Finding(
                    f"this rank saves {first.size} bytes, expected about "
                    f"{8 * numel // case.world_size}: its share of two moments of {numel} numbers.",
                    rank,
                )
            )
        elif not isinstance(later, np.ndarray) or not np.array_equal(first, later):
            findings.append(
                Finding(
                    "the state that was saved has changed with the next step: it is no copy.", rank
                )
            )
        events = case.trace.events[rank]
        marks = [i for i, e in enumerate(events) if e.kind == "compute"]
        if len(marks) == 2 and any(e.kind == "issue" for e in events[marks[0] : marks[1]]):
            findings.append(Finding("save_shard communicates: each rank saves its own.", rank))
    if not findings and total < 8 * numel:
        findings.append(
            Finding(f"all ranks together save {total} bytes; AdamW has {8 * numel} of state.")
        )
    return findings


# --- going on ------------------------------------------------------------------------------------


def draw_resume(draw: Draw) -> list[Values]:
    """Steps before and after the checkpoint."""
    groups = [(FIRST, {"lr": 0.03}), (TINY, {}), (SECOND, {})]
    return harness.draw_training(draw, groups, BEFORE + AFTER)


def observe_resume(subject: Any, inputs: Values, context: Context) -> Values:
    """Continues AdamW after the checkpoint: with the same optimiser, and with a loaded one."""
    zero, save_shard, load_shards = subject
    parameters = harness.make_parameters(inputs, context.device)
    optimizer = zero(harness.make_groups(inputs, parameters), torch.optim.AdamW, **ADAMW)
    for step in range(BEFORE):
        _step(optimizer, parameters, inputs, step)
    blobs = _gathered(_written(save_shard(optimizer)))
    weights = {f"p{i}": p.detach().cpu().numpy().copy() for i, p in enumerate(parameters)}
    others = harness.make_parameters(inputs | weights, context.device)
    loaded = zero(harness.make_groups(inputs, others), torch.optim.AdamW, **ADAMW)
    load_shards(loaded, _read(blobs))
    answer: Values = {}
    for step in range(BEFORE, BEFORE + AFTER):
        _step(optimizer, parameters, inputs, step)
        _step(loaded, others, inputs, step)
        answer |= harness.arrays_of(parameters, f"on{step}/")
        answer |= harness.arrays_of(others, f"again{step}/")
    return answer


def judge_resume(case: Case) -> list[Finding]:
    """Requires that the loaded optimiser takes the same steps as the original optimiser."""
    return _judge_again(
        case,
        [f"{step}/" for step in range(BEFORE, BEFORE + AFTER)],
        "after the checkpoint",
        "All of the state has to come back, AdamW's count of steps too.",
    )


def _judge_again(case: Case, places: list[str], what: str, hint: str) -> list[Finding]:
    findings: list[Finding] = []
    for place in places:
        for i, shape in enumerate(case.inputs[0]["shapes"]):
            for rank, answer in enumerate(case.answers):
                name = f"parameter {i}, shape {tuple(shape)}, {what}"
                on = answer.get(f"on{place}{i}")
                if (
                    not is_floats(on, shape)
                    or not np.isfinite(on).all()
                    or np.array_equal(on, case.inputs[0][f"p{i}"])
                ):
                    return [Finding(f"{name}: without a checkpoint it has not moved.", rank)]
                got = answer.get(f"again{place}{i}")
                if wrong := oracle.differs(rank, name, got, on.astype(np.float64), hint=hint):
                    findings.append(wrong)
        if findings:
            break
    return findings


# --- another number of ranks ---------------------------------------------------------------------


def draw_reshard(draw: Draw) -> list[Values]:
    """Gradients for the steps before the checkpoint only; the same on all ranks."""
    one_each: tuple[tuple[int, ...], ...] = ((draw.world_size,),)  # a shard of one number per rank
    groups = [(FIRST, {}), (TINY, {}), (one_each, {}), (SECOND, {})]
    inputs = harness.draw_training(draw, groups, BEFORE)
    for values in inputs[1:]:
        values.update({k: v for k, v in inputs[0].items() if k.startswith("c")})
    return inputs


@contextlib.contextmanager
def _smaller_world(rank: int, num_ranks: int, store: Any) -> Iterator[bool]:
    """A default process group of the first `num_ranks` ranks; yields False on the other ranks."""
    from minidist.device import choose_backend
    from minidist.launch import isolated_world

    if rank >= num_ranks:
        yield False
        return
    base = 7_000_000 + 1000 * next(_worlds)
    with isolated_world(choose_backend(), store=store, rank=rank, world_size=num_ranks, base=base):
        yield True


def observe_reshard(subject: Any, inputs: Values, context: Context) -> Values:
    """Saves on all ranks and loads on one rank less, and the reverse.

    After the checkpoint, only momentum moves the parameters.
    """
    import torch.distributed.distributed_c10d as c10d

    zero, save_shard, load_shards = subject
    smaller = max(1, context.world_size - 1)
    outer, answer = c10d._get_default_store(), {}
    for name, before, after in (
        ("less", context.world_size, smaller),
        ("more", smaller, context.world_size),
    ):
        blobs: list[Any] = [b""]
        weights: Values = {}
        with _world_of(before, context, outer, f"{name}/before") as inside:
            if inside:
                parameters = harness.make_parameters(inputs, context.device)
                groups = harness.make_groups(inputs, parameters)
                optimizer = zero(groups, torch.optim.RMSprop, **MOMENTUM)
                for step in range(BEFORE):
                    _step(optimizer, parameters, inputs, step)
                blobs = _gathered(_written(save_shard(optimizer)))
                weights = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(parameters)}
                weights = {key: value.copy() for key, value in weights.items()}
                _go_on(optimizer, parameters, answer, f"on/{name}/")
        told: list[Any] = [(blobs, weights, {k: v for k, v in answer.items() if name in k})]
        dist.broadcast_object_list(told, src=0)
        blobs, weights, on = told[0]
        answer |= on
        with _world_of(after, context, outer, f"{name}/after") as inside:
            if inside:
                parameters = harness.make_parameters(inputs | weights, context.device)
                groups = harness.make_groups(inputs, parameters)
                optimizer = zero(groups, torch.optim.RMSprop, **MOMENTUM)
                load_shards(optimizer, _read(blobs))
                _go_on(optimizer, parameters, answer, f"again/{name}/")
        told = [{k: v for k, v in answer.items() if k.startswith(f"again/{name}")}]
        dist.broadcast_object_list(told, src=0)
        if f"again/{name}/0" not in answer:  # this rank was not in the smaller group
            answer |= told[0]
    return answer


def _world_of(num_ranks: int, context: Context, outer: Any, name: str) -> Any:
    if num_ranks == context.world_size:
        return contextlib.nullcontext(True)
    return _smaller_world(context.rank, num_ranks, dist.PrefixStore(f"reshard/{name}", outer))


def _go_on(optimizer: Any, parameters: Any, answer: Values, name: str) -> None:
    """One step with zero gradients, so that only momentum moves the parameters."""
    torch.stack([(p * 0).sum() for p in parameters]).sum().backward()
    optimizer.reduce()
    optimizer.step()
    answer |= harness.arrays_of(parameters, name)


def judge_reshard(case: Case) -> list[Finding]:
    """Requires that a step after loading is the same for any number of ranks."""
    return _judge_again(
        case,
        ["/less/", "/more/"],
        "after loading on another number of ranks",
        "Parts of all old ranks are put together, the old padding is cut off, and what there is "
        "is cut for the new number of ranks, which dist knows.",
    )
