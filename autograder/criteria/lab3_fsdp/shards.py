"""Criterion for FSDP from scratch: what a rank keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import read_tensor, told
from autograder.criteria.common.places import LAST_ALONE
from autograder.criteria.criterion import Case, Context, Finding, Values
from autograder.criteria.lab3_fsdp import parts


def observe_shards(fsdp_class: Any, inputs: Values, context: Context) -> Values:
    """The shards before a step, and the bytes that a rank holds after the step."""
    model = oracle.mlp(inputs).to(context.device)
    fsdp = fsdp_class(model, parts.linears(model))
    given = fsdp.local_parameters()
    shards = parts.local_parameters(fsdp)
    answer: Values = {f"s{i}": parts.array_of(p) for i, p in enumerate(shards)}
    answer["is"] = type(given).__name__ if not hasattr(given, "__getitem__") else ""
    optimizer = torch.optim.AdamW(shards, lr=1e-3)
    x, y = (torch.from_numpy(inputs[f"{name}/0"]).to(context.device) for name in "xy")
    with parts.naming_faults():
        oracle.mse(read_tensor(fsdp(x), "fsdp(x)"), y).backward()
    optimizer.step()
    everything = [*shards, *model.parameters()]
    seen: set[int] = set()
    states = [
        v
        for s in optimizer.state.values()
        for v in s.values()
        if isinstance(v, torch.Tensor) and v.numel() > 1
    ]
    own = {id(p) for p in shards}
    answer["left"] = [
        name
        for name, p in model.named_parameters()
        if id(p) not in own and isinstance(p.grad, torch.Tensor)
    ]
    answer["parameters"] = parts.resident_bytes(everything, seen)
    answer["gradients"] = parts.resident_bytes([p.grad for p in everything], seen)
    answer["optimizer"] = parts.resident_bytes(states, seen)
    return answer


def judge_shards(case: Case) -> Iterator[Finding]:
    """Every value is on one rank; each rank holds 1/N of parameters, gradients and state.

    The student chooses how a unit is cut and padded, and how many parameters hold a rank's shards.
    """
    yield from _wrong_values(case)
    for rank, answer in enumerate(case.answers):
        if (kind := told(answer, "is")) != "":
            yield Finding(f"local_parameters() returned a {kind}, expected a list.", rank)
        elif (left := told(answer, "left")) != []:
            why = f"after backward() there are whole gradients: {left}."
            yield Finding(f"{why} Let them go, p.grad = None, once reduced.", rank)
    yield from _too_much(case)


def _wrong_values(case: Case) -> Iterator[Finding]:
    """Findings unless each value of the model is in one shard, and all the rest is zeros."""
    model = oracle.parameters_of(case.inputs[0])
    values, order = parts.lookup([], model)
    held = np.zeros(len(values), dtype=int)
    wrong = False
    for rank, answer in enumerate(case.answers):
        why = ""
        for key in (k for k in answer if k[0] == "s" and k[1:].isdigit()):
            shard = parts.floats_of_shard(answer[key], held.size)
            if shard is None:
                why = "local_parameters: not finite fp32 numbers, or more than the model has."
                break
            places = parts.find(values, order, shard)
            np.add.at(held, places[places >= 0], 1)
            if shard[places < 0].any():
                why = "shards hold numbers that are not the model's: fill up with zeros."
        if why:
            wrong = True
            yield Finding(why, rank)
    if wrong:
        return
    if (held > 1).any():
        yield Finding(
            f"{int((held > 1).sum())} values of the model are on several ranks, or twice. "
            f"{LAST_ALONE}"
        )
    if not held.all():
        yield Finding(
            f"{int((held == 0).sum())} of {held.size} values of the model are in no rank's shards. "
            "Are they cut before they are freed, and is the remainder kept when N does not divide?"
        )


def _too_much(case: Case) -> Iterator[Finding]:
    """A finding for each kind of memory of which a rank holds more than its share.

    One unit may stay whole: `fsdp_limit` and `fsdp_units` judge that, and nobody passes the lab
    without this criterion.
    """
    model = oracle.parameters_of(case.inputs[0])
    share = parts.shard_bound([v.shape for v in model], case.world_size)
    unit = max(w.nbytes + b.nbytes for w, b in zip(model[::2], model[1::2], strict=True))
    for rank, answer in enumerate(case.answers):
        for kind, times in _HELD:
            got, most = answer.get(kind), times * share + (unit if kind == "parameters" else 0)
            if type(got) is not int:
                yield Finding(f"{kind}: no bytes were counted.", rank)
            elif got > most:
                yield Finding(
                    f"{kind} after a step: {got} bytes on this rank, expected about {times * share}"
                    f" (1/{case.world_size} of {times * sum(v.nbytes for v in model)}, plus "
                    f"padding). {_WHY[kind]}",
                    rank,
                )


_HELD = (("parameters", 1), ("gradients", 1), ("optimizer", 2))
_WHY = {
    "parameters": "Is a shard a clone of its own part only, and is the whole unit's storage freed "
    "after backward?",
    "gradients": "Are the whole gradients let go (p.grad = None) once they are reduced?",
    "optimizer": "Does local_parameters() return shards only?",
}
