"""Whatever a student's functions return, a message is in the student's words and not in Python's.

One rank calls the reference's functions, one of which forgets its return or returns something else.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import socket
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from course import ROOT
from lab_helper import make_case

from autograder.criteria import get_lab, lab_names
from autograder.criteria.criterion import Context, Criterion, Lab, split
from autograder.inside.probe import NOT_IN_STUDENTS_LINES, describe_error
from minidist.emulate.backend import emulated_world
from minidist.emulate.broker import Broker
from minidist.launch import run

ODD = (None, "text", [], float("nan"), 3, ("a", None), 1j, {"a": None}, torch.zeros(2, 3))
PYTHONS_WORDS = (
    *("argument must be", "to unpack", "NoneType'", "KeyError", "has no attribute", "convert"),
    *("not iterable", "not subscriptable", "real number", "unsupported operand"),
)
# They start processes, or need time; the words about the last one are a DataLoader's.
LEFT_OUT = {
    *("elastic_atomic", "fsdp_limit", "fsdp_budget", "zero1_memory", "zero2_memory"),
    *("accum_memory", "prof_record", "prof_overhead", "prof_efficiency", "amp_timing"),
    *("prof_prefetch", "prof_loader_settings"),
}


def solution(lab: str) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """What the solution defines, and for each check the names of what it is given."""
    module = types.ModuleType(f"solution_{lab}")
    sys.modules[module.__name__] = module
    tree = ast.parse((ROOT / "solutions" / lab / f"{lab}.py").read_text("utf-8"))
    subjects = {}
    for statement in tree.body:
        match statement:
            case ast.Expr(ast.Call(ast.Name("check"), [ast.Constant(str(name)), subject])):
                found = subject.elts if isinstance(subject, ast.Tuple) else [subject]
                subjects[name] = tuple(each.id for each in found if isinstance(each, ast.Name))
            case (
                ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.ClassDef() | ast.Assign()
            ):
                code = compile(ast.Module([statement], []), "/a/lab.py", "exec", 0, True)
                try:
                    exec(code, vars(module))
                except Exception:  # the value of an experiment; no function needs it
                    assert isinstance(statement, ast.Assign), ast.unparse(statement)[:80]
    return vars(module), subjects


def returning(name: str, original: Any, value: Any) -> Any:
    """A function of a student's with the same arguments, which has done its work before."""
    names = {"original": original, "value": value}
    source = f"def {name}(*args, **options):\n    original(*args, **options)\n    return value\n"
    exec(compile(source, "/a/lab.py", "exec", 0, True), names)
    return functools.wraps(original)(names[name])


def changed(name: str, original: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """The function that returns this, or the class with a method that does, one after the other."""
    if not inspect.isclass(original):
        yield name, returning(name, original, value)
        return
    if value is not None:  # what torch says of a hook's value, say, is in no words of ours
        return
    for method, function in vars(original).items():
        if inspect.isfunction(function) and not method.startswith("_"):
            new = {method: returning(method, function, value), "__module__": original.__module__}
            yield f"{name}.{method}", type(name, (original,), new)


def said_of(lab: Lab, criterion: Criterion, subject: Any) -> str:
    """The message of a criterion; "" if it passes."""
    case = make_case(lab, criterion, [{}])
    context = Context(0, 1, torch.device("cpu"))
    try:
        if criterion.world != "emulated":
            answer = criterion.observe(subject, case.inputs[0], context)
        else:
            ours, theirs = socket.socketpair()
            with Broker(1, deadline_s=20.0) as broker:
                broker.begin(case.plan)
                broker.attach(0, theirs)
                with emulated_world(ours, 0, 1) as client:
                    context = replace(context, broker=client)
                    answer = criterion.observe(subject, case.inputs[0], context)
                case = replace(case, trace=broker.end())
    except Exception as error:
        return describe_error(error)
    json.dumps(split(answer)[0])  # it can be sent
    return " ".join(f.message for f in criterion.findings(replace(case, answers=[answer])))


def in_pythons_words(name: str, values: tuple[Any, ...]) -> list[str]:
    """What is said about functions of a lab's solution that return these."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lab, found = get_lab(name), []
    names, subjects = solution(name)
    for criterion in lab.criteria:
        given = subjects.get(criterion.name, ())
        if criterion.extra or criterion.name in LEFT_OUT:
            continue
        right = tuple(names[each] for each in given)
        if right and (said := said_of(lab, criterion, right[0] if len(right) == 1 else right)):
            found.append(f"{criterion.name}, with the solution: {said[:300]}")
        for value, one in [(value, one) for value in values for one in given]:
            for what, odd in changed(one, names[one], value):
                parts = [odd if each == one else names[each] for each in given]
                said = said_of(lab, criterion, parts[0] if len(parts) == 1 else tuple(parts))
                theirs = "lab.py, line" in said  # the student's own line is beside it
                words = [w for w in (NOT_IN_STUDENTS_LINES, *PYTHONS_WORDS) if w in said]
                if words and not theirs:
                    found.append(f"{criterion.name}: {what} returns {value!r}: {said[:300]}")
    return found


@pytest.mark.parametrize(
    "values", [ODD[:2], pytest.param(ODD[2:], marks=pytest.mark.nightly)], ids=["often", "others"]
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n.startswith("bonus") else n for n in lab_names()],
)
def test_what_is_returned_is_told_in_the_students_words(name, values):
    [found] = run(in_pythons_words, 1, name, values, deadline_s=300.0)
    assert not found, "\n".join(found)
