"""Criteria for task 4 of bonus_elastic: resharding an optimiser's state from M ranks to N."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import (
    described,
    is_floats,
    item_of,
    plain,
    read,
    read_array,
    returned,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, per_rank

SLACK_BYTES = 64
BEFORE, AFTER = 3, 2
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


# --- elastic_reshard, elastic_own ----------------------------------------------------------------


@per_rank
def draw_reshard(rng: np.random.Generator) -> Values:
    """Cases [ranks before, ranks after, numel], each with two vectors of drawn names and values.

    The first vector of a case is float64, the second float32.
    """
    asked = [[4, 2, 4 * int(rng.integers(3, 9))]]
    asked += [[m, n, int(rng.integers(30, 70)) * m + 1] for m, n in ((2, 3), (3, 2), (5, 3))]
    asked += [
        [3, 5, int(rng.integers(2, 4))],
        [1, 4, int(rng.integers(9, 30))],
        [4, 1, int(rng.integers(9, 30))],
        [3, 3, int(rng.integers(9, 30))],
    ]
    names = [f"v{n}" for n in rng.permutation(100)[:2]]
    values: Values = {"asked": asked, "names": names, "no_parts": True}
    for number, (_, _, numel) in enumerate(asked):
        for name, dtype in zip(names, (np.float64, np.float32), strict=True):
            values[f"{name}/{number}"] = rng.normal(size=numel).astype(dtype)
    return values


def _more(number: int) -> int:
    """How much more padding than needed each old part of a case has: the text allows any."""
    return number % 2


def _shards(whole: np.ndarray, num_ranks: int, more: int) -> list[torch.Tensor]:
    """Equal shards, with `more` numbers of padding than needed in each.

    The padding is 77, not 0, so that old padding in a result can be seen.
    """
    size = -(-len(whole) // num_ranks) + more
    padded = np.full(size * num_ranks, 77.0, dtype=whole.dtype)
    padded[: len(whole)] = whole
    return [torch.from_numpy(padded[r * size : (r + 1) * size].copy()) for r in range(num_ranks)]


def draw_own(draw: Draw) -> list[Values]:
    """As `draw_reshard`, but with parts only: `elastic_reshard` judges all other entries."""
    return [inputs | {"no_parts": False} for inputs in draw_reshard(draw)]


def _no_parts(number: int) -> dict[str, Any]:
    """Entries that are the same on all ranks. `elastic_adam` judges the new state's step."""
    return {
        "step": torch.tensor(float(number + 1)),
        "count": number,
        "word": f"w{number}",
        "table": torch.arange(6.0).view(2, 3) + number,
    }


def _are_equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    return bool(one == two)


def _dicts(states: Any, num_ranks: int, names: list[str]) -> Any:
    """What `reshard` has returned, if it is a dict with these names for each rank."""
    if not isinstance(returned(states, "reshard"), list | tuple) or len(states) != num_ranks:
        raise TypeError(f"reshard: expected a list of {num_ranks} dicts")
    for state in states:
        if not isinstance(state, dict):
            raise TypeError(f"reshard: expected dicts in the list, got {described(state)}")
        if missing := [name for name in names if name not in state]:
            raise TypeError(f"reshard: a state has no {missing[0]!r}, only {list(state)}")
    return states


def observe_reshard(reshard: Any, inputs: Values, context: Context) -> Values:
    """The vectors of every new rank, and how many bytes their storage has."""
    answer: Values = {"bytes": [], "unchanged": [], "same": []}
    for number, (before, after, numel) in enumerate(inputs["asked"]):
        states: list[dict[str, Any]] = [
            _no_parts(number) if inputs["no_parts"] else {} for _ in range(before)
        ]
        for name in inputs["names"]:
            for state, shard in zip(
                states, _shards(inputs[f"{name}/{number}"], before, _more(number)), strict=True
            ):
                state[name] = shard
        kept = copy.deepcopy(states)
        fresh = _dicts(reshard(states, numel, after), after, inputs["names"])
        sizes = []
        answer["same"].append(
            all(
                set(state) == set(kept[0])
                and all(
                    _are_equal(state[key], kept[0][key])
                    for key in set(kept[0]) - {*inputs["names"], "step"}
                )
                for state in fresh
            )
        )
        for rank, state in enumerate(fresh):
            for name in inputs["names"]:
                part = state[name]
                answer[f"{number}/{rank}/{name}"] = read_array(part, f"reshard, {name!r}")
                sizes.append([part.numel(), part.untyped_storage().nbytes()])
        answer["bytes"].append(sizes)
        answer["unchanged"].append(
            all(
                set(one) == set(two) and torch.equal(one[name], two[name])
                for one, two in zip(states, kept, strict=True)
                for name in inputs["names"]
            )
        )
    return answer


def judge_reshard(case: Case) -> Iterator[Finding]:
    """The new shards are equal parts of the old vector without its padding, padded with zeros.

    All other entries may be copied, or shared with the old states and among the new ones.
    """
    for rank, answer in enumerate(case.answers):
        for number, (before, after, numel) in enumerate(case.inputs[rank]["asked"]):
            size = -(-numel // after)
            old = -(-numel // before) + _more(number)
            story = (
                f"{numel} numbers, from {before} ranks, each with {old} "
                f"({'more than needed, ' * bool(_more(number))}padding included), to "
                f"{after}, each with {size}"
            )
            for name in case.inputs[rank]["names"]:
                whole = case.inputs[rank][f"{name}/{number}"]
                right = np.zeros(size * after, dtype=whole.dtype)
                right[:numel] = whole
                parts = [answer.get(f"{number}/{new}/{name}") for new in range(after)]
                if problem := _wrong_part(parts, right, size):
                    yield Finding(f"{story}: {problem}", rank)
                    break
            else:
                if item_of(answer.get("same"), number) is not True:
                    yield Finding(
                        f"{story}: every new rank should get what is no 1-D tensor, as it is: "
                        "numbers, text, and tensors with no or two dimensions.",
                        rank,
                    )
                    break
                if item_of(answer.get("unchanged"), number) is True:
                    continue
                yield Finding(f"{story}: the old states have been changed.", rank)
            break


def _wrong_part(parts: list[Any], right: np.ndarray, size: int) -> str:
    for new, part in enumerate(parts):
        expected = right[new * size : (new + 1) * size]
        if not is_floats(part):
            return f"the new rank {new} has no vector."
        if part.shape != expected.shape:
            return (
                f"the new rank {new} has {list(part.shape)} numbers, expected [{size}]: all ranks "
                "have as many, and what is missing at the end is padded."
            )
        if part.dtype != expected.dtype:
            return f"{expected.dtype} has become {part.dtype}."
        if np.array_equal(part, expected):
            continue
        if (part == 77.0).any():
            return (
                f"the new rank {new} has numbers of the old padding: cut it off before you cut "
                "anew, it lies at the end of the whole vector."
            )
        at = int(np.argmax(part != expected))
        found = np.flatnonzero(right == part[at])
        if part[at] and len(found) == 1:
            return (
                f"the new rank {new} has at {at} the number {found[0]} of the whole vector, where "
                f"number {new * size + at} belongs."
            )
        return f"the new rank {new} has {part[at]:.4g} at {at}, expected {expected[at]:.4g}."
    return ""


def judge_own(case: Case) -> Iterator[Finding]:
    """A shard does not hold the whole vector in memory, so its file does not hold it either."""
    for rank, answer in enumerate(map(plain, case.answers)):
        for number, (before, after, numel) in enumerate(case.inputs[rank]["asked"]):
            sizes = item_of(answer.get("bytes"), number)
            pairs = sizes if isinstance(sizes, list) else []
            right = len(pairs) == after * len(case.inputs[rank]["names"]) and all(
                isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
                for pair in pairs
            )
            if not right:
                yield Finding("no parts came back.", rank)
                break
            # All numbers must be there, because an empty part would be small, too.
            enough = sum(count for count, _ in pairs) >= numel * len(case.inputs[rank]["names"])
            if enough and all(0 <= held <= 8 * count + SLACK_BYTES for count, held in pairs):
                continue
            held = max(held for _, held in pairs)
            yield Finding(
                f"{numel} numbers from {before} ranks to {after}: a part of {-(-numel // after)} "
                f"holds {held} bytes. It is a view of the whole vector, and torch.save writes all "
                "of what a view looks at: clone it.",
                rank,
            )
            break


# --- elastic_adam --------------------------------------------------------------------------------


@per_rank
def draw_adam(rng: np.random.Generator) -> Values:
    """Parameters whose count is divisible by both numbers of ranks, and their gradients."""
    before, after = (int(n) for n in rng.permutation([1, 2, 3, 4])[:2])
    numel = 12 * int(rng.integers(2, 6))
    values: Values = {"ranks": [before, after], "p": rng.normal(size=numel)}
    values |= {f"g{step}": rng.normal(size=numel) for step in range(BEFORE + AFTER)}
    return values


def observe_adam(reshard: Any, inputs: Values, context: Context) -> Values:
    """Sharded AdamW; after some steps its state is resharded to a different number of ranks.

    Each new rank gets a copy of its state, as from a file: the states may share the tensor of the
    step, which an optimiser changes in place.
    """
    before, after = inputs["ranks"]
    whole = torch.from_numpy(inputs["p"].copy())
    numel = whole.numel()
    shards, optimizers = _sharded_adamw(whole, before)
    for step in range(BEFORE):
        _step(shards, optimizers, inputs[f"g{step}"])
    states = [o.state[s] for s, o in zip(shards, optimizers, strict=True)]
    fresh = reshard(copy.deepcopy(states), numel, after)
    fresh = _dicts(read(fresh, list, "reshard", "a list"), after, list(states[0]))
    shards, optimizers = _sharded_adamw(torch.cat([s.detach() for s in shards]), after)
    for shard, optimizer, state in zip(shards, optimizers, fresh, strict=True):
        # `elastic_reshard` judges the dtypes of parts.
        state = copy.deepcopy(state)
        own = {k: v.to(shard.dtype) if torch.is_tensor(v) else v for k, v in state.items()}
        optimizer.state[shard] = own | {"step": state["step"]}
    for step in range(BEFORE, BEFORE + AFTER):
        _step(shards, optimizers, inputs[f"g{step}"])
    return {"p": torch.cat([s.detach() for s in shards]).numpy()}


def _sharded_adamw(whole: torch.Tensor, num_ranks: int) -> tuple[list[Any], list[Any]]:
    shards = [torch.nn.Parameter(part.clone()) for part in whole.chunk(num_ranks)]
    return shards, [torch.optim.AdamW([shard], **ADAMW) for shard in shards]


def _step(shards: list[Any], optimizers: list[Any], gradient: np.ndarray) -> None:
    parts = torch.from_numpy(gradient).chunk(len(shards))
    for shard, optimizer, part in zip(shards, optimizers, parts, strict=True):
        shard.grad = part.clone()
        optimizer.step()


def judge_adam(case: Case) -> Iterator[Finding]:
    """The parameters are those of one AdamW that was never sharded."""
    for rank, answer in enumerate(case.answers):
        given = case.inputs[rank]
        parameter = torch.nn.Parameter(torch.from_numpy(given["p"].copy()))
        optimizer = torch.optim.AdamW([parameter], **ADAMW)
        for step in range(BEFORE + AFTER):
            parameter.grad = torch.from_numpy(given[f"g{step}"].copy())
            optimizer.step()
        before, after = given["ranks"]
        if wrong := oracle.differs(
            rank,
            f"parameters after {BEFORE} steps of AdamW on {before} ranks and {AFTER} on {after}",
            answer.get("p"),
            parameter.detach().numpy(),
            hint="AdamW's count of steps is no vector: it is not cut, and every new rank gets it.",
        ):
            yield wrong
