"""Criteria for saving shares of a sharded optimiser, and for loading them again."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autograder.criteria.bonus_zero import harness
from autograder.criteria.bonus_zero.values import FIRST, SECOND
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, same_array
from autograder.criteria.common.resumed import saved
from autograder.criteria.common.tensor_memory import TensorMemory
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

BEFORE, AFTER = 3, 2
OTHER_LR = 0.01
# Of the whole state. A share is at most a half; code that keeps whole vectors keeps all of it.
KEPT_AT_MOST = 0.75
ADAMW = {"lr": 0.05, "weight_decay": 0.2}
MOMENTUM = {"lr": 0.05, "momentum": 0.9}  # for RMSprop, which does not use its step count
_worlds = itertools.count()


def _read(blobs: list[bytes]) -> list[Any]:
    return [torch.load(io.BytesIO(blob), weights_only=True) for blob in blobs]


def _gathered(blob: bytes) -> list[bytes]:
    blobs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(blobs, blob)
    return blobs


# --- what is written -----------------------------------------------------------------------------

LARGE = ([(90, 110), (110,)], [(70, 71), (71,)])
SAVED_SLACK = 1.1
SAVED_OTHERS = 512  # numbers that are none of the state's, such as sizes and options
TEXT_PER_NUMBER = 4  # characters


def draw_saved(draw: Draw) -> list[Values]:
    """Two large groups."""
    return harness.draw_training(draw, [(shapes, {}) for shapes in LARGE], 2)


def observe_saved(subject: Any, inputs: Values, context: Context) -> Values:
    """The saved state after one step, and the content of the same object after a second step."""
    zero, save_shard = subject
    parameters = harness.make_parameters(inputs, context.device)
    optimizer = zero(harness.make_groups(inputs, parameters), torch.optim.AdamW, **ADAMW)
    harness.take_step(optimizer, parameters, inputs, 0)
    context.broker.charge(0, "forward")
    state = save_shard(optimizer)
    context.broker.charge(0, "backward")
    first = saved(state)
    count = _count_numbers(_read([first]), set())
    harness.take_step(optimizer, parameters, inputs, 1)
    return {
        "count": count,
        "first": np.frombuffer(first, dtype=np.uint8),
        "later": np.frombuffer(saved(state), dtype=np.uint8),
    }


def _count_numbers(value: Any, seen: set[int]) -> int:
    """How many numbers a file holds, as tensors (with all of their storage) or by themselves."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes() // value.element_size()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return sum(_count_numbers(each, seen) for each in value)
    return len(value) // TEXT_PER_NUMBER if isinstance(value, str | bytes) else 1


def judge_saved(case: Case) -> list[Finding]:
    """Requires that each rank saves a copy of its share, without communication.

    All shares together must have enough numbers for the whole state. Their form is free, and they
    may contain the padding and the shard or not.
    """
    findings: list[Finding] = []
    numel = sum(int(np.prod(shape)) for shape in case.inputs[0]["shapes"])
    # The limit allows two moments and the shard itself.
    most = SAVED_SLACK * 3 * numel / case.world_size + SAVED_OTHERS
    total = 0
    for rank, answer in enumerate(case.answers):
        first, later, count = (answer.get(name) for name in ("first", "later", "count"))
        if not isinstance(first, np.ndarray) or not isinstance(count, int):
            findings.append(Finding("nothing was saved.", rank))
            continue
        total += count
        if count > most:
            findings.append(
                Finding(
                    f"this rank saves {count} numbers, expected about "
                    f"{2 * numel // case.world_size}: its share of two moments of {numel} numbers.",
                    rank,
                )
            )
        elif not same_array(later, first):
            findings.append(
                Finding(
                    "the state that was saved has changed with the next step: it is no copy.", rank
                )
            )
        events = case.trace.events[rank]
        marks = [i for i, e in enumerate(events) if e.kind == "compute"]
        if len(marks) == 2 and any(e.kind == "issue" for e in events[marks[0] : marks[1]]):
            findings.append(Finding("save_shard communicates: each rank saves its own.", rank))
    if not findings and total < 2 * numel:
        findings.append(
            Finding(f"all ranks together save {total} numbers; AdamW's state has {2 * numel}.")
        )
    return findings


# --- going on ------------------------------------------------------------------------------------


def draw_resume(draw: Draw) -> list[Values]:
    """Steps before and after the checkpoint."""
    groups = [(FIRST, {"lr": 0.03}), (SECOND, {})]
    return harness.draw_training(draw, groups, BEFORE + AFTER)


def observe_resume(subject: Any, inputs: Values, context: Context) -> Values:
    """Continues AdamW after the checkpoint: with the same optimiser, and with a loaded one."""
    zero, save_shard, load_shards = subject
    parameters = harness.make_parameters(inputs, context.device)
    optimizer = zero(harness.make_groups(inputs, parameters), torch.optim.AdamW, **ADAMW)
    for step in range(BEFORE):
        harness.take_step(optimizer, parameters, inputs, step)
    blobs = _gathered(saved(save_shard(optimizer)))
    weights = {f"p{i}": p.detach().cpu().numpy().copy() for i, p in enumerate(parameters)}
    others = harness.make_parameters(inputs | weights, context.device)
    loaded = zero(harness.make_groups(inputs, others), torch.optim.AdamW, **ADAMW)
    load_shards(loaded, _read(blobs))
    answer = _kept_and_changed(subject, inputs | weights, context, blobs)
    for step in range(BEFORE, BEFORE + AFTER):
        harness.take_step(optimizer, parameters, inputs, step)
        harness.take_step(loaded, others, inputs, step)
        answer |= harness.arrays_of(parameters, f"on{step}/")
        answer |= harness.arrays_of(others, f"again{step}/")
    return answer


def _kept_and_changed(subject: Any, inputs: Values, context: Context, blobs: list[bytes]) -> Values:
    """Loads into an optimiser that was made with a different learning rate.

    Returns the bytes of the tensors that it has kept from loading, and its learning rates before
    and after.
    """
    zero, _, load_shards = subject
    parameters = harness.make_parameters(inputs, context.device)
    options = ADAMW | {"lr": OTHER_LR}
    optimizer = zero(harness.make_groups(inputs, parameters), torch.optim.AdamW, **options)
    before, shards = _rates(optimizer), _read(blobs)
    with TensorMemory() as memory:
        load_shards(optimizer, shards)
    gc.collect()
    return {"kept": memory.alive_bytes(), "rates": [before, _rates(optimizer)]}


def _rates(optimizer: Any) -> list[float]:
    """The learning rates; none if `param_groups` is unusable, which is judged elsewhere."""
    try:
        return [float(group["lr"]) for group in optimizer.param_groups]
    except Exception:
        return []


def judge_resume(case: Case) -> Iterator[Finding]:
    """Requires that the loaded optimiser takes the same steps as the original optimiser.

    Loading leaves learning rates alone, and keeps no more of the state than a share.
    """
    findings = _judge_again(
        case,
        [f"{step}/" for step in range(BEFORE, BEFORE + AFTER)],
        "after the checkpoint",
        "All of the state has to come back, AdamW's count of steps too, and to each rank its own.",
    )
    yield from findings
    state_bytes = 2 * 4 * sum(int(np.prod(shape)) for shape in case.inputs[0]["shapes"])
    for rank, answer in enumerate(case.answers) if not findings else ():
        rates, kept = answer.get("rates"), answer.get("kept")
        if not isinstance(rates, list) or len(rates) != 2 or not isinstance(kept, int):
            yield Finding("nothing was loaded.", rank)
        elif rates[0] != rates[1]:
            yield Finding(
                f"the new optimiser was made with learning rates {rates[0]}; load_shards has "
                f"changed them to {rates[1]}. Learning rates are saved by others.",
                rank,
            )
        elif case.world_size > 1 and kept > KEPT_AT_MOST * state_bytes:
            yield Finding(
                f"after load_shards the optimiser keeps {kept} bytes that are new. The whole "
                f"state, of all ranks, has {state_bytes}: expected this rank's share. A part that "
                "is a view keeps the whole vector alive.",
                rank,
            )
        else:
            continue
        return


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


# --- a different number of ranks -----------------------------------------------------------------


def draw_reshard(draw: Draw) -> list[Values]:
    """Gradients for the steps before the checkpoint only; the same on all ranks."""
    one_each: tuple[tuple[int, ...], ...] = ((draw.world_size,),)  # a shard of one number per rank
    groups = [(FIRST, {}), (one_each, {}), (SECOND, {})]
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
                    harness.take_step(optimizer, parameters, inputs, step)
                blobs = _gathered(saved(save_shard(optimizer)))
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
    """One step with gradients of nearly zero, so that only momentum moves the parameters."""
    torch.stack([(p * 1e-20).sum() for p in parameters]).sum().backward()
    optimizer.reduce()
    optimizer.step()
    answer |= harness.arrays_of(parameters, name)


def judge_reshard(case: Case) -> list[Finding]:
    """Requires that a step after loading is the same for any number of ranks."""
    return _judge_again(
        case,
        ["/less/", "/more/"],
        "after loading on a different number of ranks",
        "Parts of all old ranks are put together, the old padding is cut off, and the rest is cut "
        "anew for the number of ranks that dist knows.",
    )
