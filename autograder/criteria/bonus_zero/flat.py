"""Criteria for two parts of a sharded optimiser: the flat vector and the parameter groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common.answers import item_of, read, read_array, same_array, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, per_rank

# --- flat vectors --------------------------------------------------------------------------------

SHAPES = (
    ((3, 4), (5,), ()),
    ((0,), (2, 3)),
    ((7,),),
    ((2, 2), (0,), (3, 1, 2), ()),
    ((4, 6), (9,), (1,)),
    ((0,),),
)
PARTS = (1, 2, 3, 4, 5, 8)


def draw_flat(draw: Draw) -> list[Values]:
    """Lists of tensors; the number of parts divides their total size or does not."""
    inputs = []
    for rank in range(draw.world_size):
        rng, cases, values = draw.private(rank), [], {}
        for shapes in SHAPES:
            chosen = [int(parts) for parts in rng.choice(PARTS, size=3, replace=False)]
            if len(shapes) == 1:
                chosen[0] = int(rng.choice([1, 7]))  # one tensor of 7 numbers: needs no padding
            for place, parts in enumerate(chosen):
                number = len(cases)
                dtype = str(rng.choice(["float32", "float64"]))
                if shapes is SHAPES[0] and place == 0:
                    # float16, which padding of a different dtype would turn into float32.
                    parts, dtype = int(rng.choice([4, 5, 8])), "float16"
                cases.append(
                    {
                        "shapes": [list(shape) for shape in shapes],
                        "parts": parts,
                        "dtype": dtype,
                        "turned": bool(rng.integers(2)),
                    }
                )
                for i, shape in enumerate(shapes):
                    array = np.asarray(rng.normal(size=shape), dtype=cases[-1]["dtype"])
                    values[f"t{number}/{i}"] = array
                count = sum(int(np.prod(shape)) for shape in shapes)
                padded = rng.normal(size=count + -count % parts).astype(cases[-1]["dtype"])
                values[f"f{number}"] = padded
        inputs.append({"cases": cases} | values)
    return inputs


def _tensors(inputs: Values, number: int, device: torch.device) -> list[torch.Tensor]:
    case = inputs["cases"][number]
    tensors = []
    for i in range(len(case["shapes"])):
        tensor = torch.from_numpy(np.array(inputs[f"t{number}/{i}"])).to(device)
        if case["turned"] and tensor.dim() == 2:
            tensor = tensor.t().contiguous().t()
        tensors.append(tensor)
    return tensors


def observe_flatten(flatten: Any, inputs: Values, context: Context) -> Values:
    """The flat vector, and the arguments after the vector was overwritten."""
    answer: Values = {}
    for number, case in enumerate(inputs["cases"]):
        tensors = _tensors(inputs, number, context.device)
        flat = flatten(tensors, case["parts"])
        answer[f"f{number}"] = read_array(flat, "flatten")
        with torch.no_grad():
            flat.fill_(7.0)
        for i, tensor in enumerate(tensors):
            answer[f"t{number}/{i}"] = tensor.cpu().numpy()
    return answer


def _said(case: Values) -> str:
    return f"{case['dtype']} {[tuple(s) for s in case['shapes']]} for {case['parts']} parts"


def judge_flatten(case: Case) -> Iterator[Finding]:
    """Requires all numbers in order, the fewest padding zeros, and a vector with its own memory."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, each in enumerate(inputs["cases"]):
            arrays = [inputs[f"t{number}/{i}"] for i in range(len(each["shapes"]))]
            values = np.concatenate([array.ravel() for array in arrays])
            expected = np.concatenate([values, np.zeros(-len(values) % each["parts"])])
            if problem := _flat_problem(answer.get(f"f{number}"), expected, len(values), each):
                yield Finding(f"flatten, {_said(each)}: {problem}", rank)
                break
            after = [answer.get(f"t{number}/{i}") for i in range(len(arrays))]
            if not all(np.array_equal(a, b) for a, b in zip(after, arrays, strict=True)):  # type: ignore[arg-type]
                yield Finding(
                    f"flatten, {_said(each)}: what was written into the result changed an "
                    "argument. It shall have memory of its own, also where there is but one "
                    "tensor.",
                    rank,
                )
                break


def _flat_problem(got: Any, expected: np.ndarray, count: int, each: Values) -> str | None:
    if not isinstance(got, np.ndarray) or got.ndim != 1:
        return "expected a 1-D tensor."
    if got.shape != expected.shape:
        return f"expected {len(expected)} numbers ({count} and padding), got {len(got)}."
    if str(got.dtype) != each["dtype"]:
        return f"expected dtype {each['dtype']}, got {got.dtype}."
    if not np.array_equal(got[:count], expected[:count]):
        return "the numbers are not those of the tensors, one tensor after the other."
    if not np.array_equal(got[count:], expected[count:]):
        return f"the padding is {got[count:].tolist()}, expected zeros."
    return None


def observe_unflatten(unflatten: Any, inputs: Values, context: Context) -> Values:
    """The parameters after the copy, and whether they are still leaves in the same memory."""
    answer: Values = {}
    for number in range(len(inputs["cases"])):
        parameters = [nn.Parameter(t) for t in _tensors(inputs, number, context.device)]
        places = [p.data_ptr() for p in parameters]
        flat = torch.from_numpy(inputs[f"f{number}"].copy()).to(context.device)
        unflatten(flat, parameters)
        copied = [parameter.detach().clone() for parameter in parameters]
        flat.fill_(7.0)
        answer[f"points{number}"] = [
            i for i, p in enumerate(parameters) if not torch.equal(p.detach(), copied[i])
        ]
        answer[f"leaf{number}"] = all(p.is_leaf and p.requires_grad for p in parameters)
        answer[f"stayed{number}"] = [p.data_ptr() for p in parameters] == places
        for i, parameter in enumerate(parameters):
            answer[f"t{number}/{i}"] = parameter.detach().cpu().numpy()
    return answer


def judge_unflatten(case: Case) -> Iterator[Finding]:
    """Requires that each parameter has its numbers of the vector, copied in place."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, each in enumerate(inputs["cases"]):
            flat, at, problem = inputs[f"f{number}"], 0, ""
            for i, shape in enumerate(each["shapes"]):
                size = int(np.prod(shape))
                expected = flat[at : at + size].reshape(shape)
                got = answer.get(f"t{number}/{i}")
                if not same_array(got, expected):
                    problem = f"tensor {i} does not have its numbers of the vector."
                    points = told(answer, f"points{number}")
                    if isinstance(points, list) and i in points:
                        problem = (
                            f"tensor {i} changed when the vector was overwritten afterwards: copy "
                            "the numbers, do not point into the vector."
                        )
                    break
                at += size
            if not problem and answer.get(f"leaf{number}") is not True:
                problem = "a parameter is no leaf any more: copy under torch.no_grad()."
            if not problem and answer.get(f"stayed{number}") is not True:
                problem = "a parameter has other memory than before, expected a copy in place."
            if problem:
                yield Finding(f"unflatten, {_said(each)}: {problem}", rank)
                break


# --- groups --------------------------------------------------------------------------------------

COUNT = 9


@per_rank
def draw_groups(rng: np.random.Generator) -> Values:
    """Groups of parameter numbers; some parameters are frozen, some occur twice."""
    frozen = sorted(int(i) for i in rng.choice(np.arange(1, COUNT), size=2, replace=False))
    order = [int(i) for i in rng.permutation(COUNT)]
    third = COUNT // 3
    parts = [order[:third], order[third : 2 * third], order[2 * third :]]
    again = next(i for i in parts[0] if i not in frozen)
    lr = float(rng.uniform(0.1, 1))
    cases: list[Values] = [
        {"plain": True, "groups": [[order, {}]]},
        {"plain": True, "groups": [[[*order, again, order[0]], {}]]},
        {
            "plain": False,
            "groups": [
                [parts[0], {"lr": lr, "weight_decay": 0.0}],
                [[*parts[1], again, again], {"betas": [0.5, 0.6]}],
                [frozen, {"lr": 2 * lr}],
                [[again], {"eps": lr}],
                [parts[2], {}],
            ],
        },
        {"plain": False, "single": True, "groups": [[[again], {"lr": lr}]]},
    ]
    return {"cases": cases, "frozen": frozen}


def observe_groups(trainable_groups: Any, inputs: Values, context: Context) -> Values:
    """The parameters and options of each returned group; the function is given iterators."""
    told: list[Any] = []
    unchanged = True
    for case in inputs["cases"]:
        # All parameters hold the same numbers, and half of them are empty, so without an address:
        # only their identity distinguishes them.
        parameters = [nn.Parameter(torch.ones(2 * (1 - i % 2))) for i in range(COUNT)]
        for i in inputs["frozen"]:
            parameters[i].requires_grad_(False)
        number_of = {id(p): i for i, p in enumerate(parameters)}
        if case["plain"]:
            groups = trainable_groups(parameters[i] for i in case["groups"][0][0])
        else:
            given: list[dict[str, Any]] = []
            for place, (numbers, options) in enumerate(case["groups"]):
                inside: Any = [parameters[i] for i in numbers]
                if case.get("single"):
                    inside = inside[0]
                elif place % 2:
                    inside = iter(inside)
                given.append({"params": inside} | options)
            before = [dict(group) for group in given]
            groups = trainable_groups(iter(given))
            unchanged = unchanged and all(
                a.keys() == b.keys() and all(a[k] is b[k] for k in a)
                for a, b in zip(given, before, strict=True)
            )
        groups = read(groups, list, "trainable_groups", "a list of dicts")
        told.append([_describe(group, number_of) for group in groups])
    return {"told": told, "unchanged": unchanged}


def _describe(group: Any, number_of: dict[int, int]) -> list[Any]:
    if not isinstance(group, dict) or not isinstance(group.get("params"), list):
        raise TypeError('trainable_groups: expected dicts whose "params" is a list')
    numbers = [number_of.get(id(p), -1) for p in group["params"]]
    return [numbers, {str(k): v for k, v in group.items() if k != "params"}]


def judge_groups(case: Case) -> Iterator[Finding]:
    """Requires each trainable parameter once, in its first group, and unchanged options."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        told = answer.get("told")
        for number, each in enumerate(inputs["cases"]):
            seen = set(inputs["frozen"])
            expected = []
            for numbers, options in each["groups"]:
                kept = []
                for i in numbers:
                    if i not in seen:
                        seen.add(i)
                        kept.append(i)
                if kept:
                    expected.append([kept, options])
            got = item_of(told, number)
            if got != expected:
                yield Finding(
                    f"groups {each['groups']} of parameters by number, of which "
                    f"{inputs['frozen']} are frozen: expected {expected}, got "
                    f"{str(got)[:300]}.{_slip(got, expected, inputs['frozen'])}",
                    rank,
                )
                break
        else:
            if answer.get("unchanged") is not True:
                yield Finding("a dict that came in was changed.", rank)


def _slip(got: Any, expected: list[Any], frozen: list[int]) -> str:
    """The first thing that is wrong with the groups, in a sentence, or an empty string.

    Args:
        got: the result of `_describe`, or anything else.
    """
    pairs = got if isinstance(got, list) else []
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return ""
    if not all(isinstance(numbers, list) for numbers, _ in pairs):
        return ""
    found = [i for numbers, _ in pairs for i in numbers]
    wanted = [i for numbers, _ in expected for i in numbers]
    if -1 in found:
        return " A -1 is a parameter that was not given: return the parameters, not copies of them."
    for i in found:
        if i in frozen:
            return f" Parameter {i} is frozen, and has to be left out."
        if found.count(i) > 1:
            return f" Parameter {i} is there {found.count(i)} times, expected once."
    if missing := [i for i in wanted if i not in found]:
        return f" Parameter {missing[0]} is missing."
    if any(not numbers for numbers, _ in pairs):
        return " A group without parameters has to be left out."
    for place, (pair, right) in enumerate(zip(pairs, expected, strict=False)):
        if pair[0] != right[0]:
            return f" Group {place} has the parameters {pair[0]}, expected {right[0]}."
        if pair[1] != right[1]:
            return f" Group {place} has the options {pair[1]}, expected {right[1]}."
    return ""
