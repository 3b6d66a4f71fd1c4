"""Finds where a notebook patches a module, or reaches into the course's own machinery.

A check measures with clocks, with torch and with the client of the emulated cluster, and all of
these are in the process of the submission. Names are followed through imports, aliases, getattr,
`__dict__`, `sys.modules` and the text of `exec`; an author who wants to hide can avoid all this.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import minidist
from autograder.report.authored import parse

# A notebook may change settings of torch and NumPy, and wrap collectives to see what is sent.
_PATCHED = frozenset({"time", "datetime", "builtins", "minidist", "autograder", "torch", "numpy"})
_MAY_BE_SET = frozenset({"backends", "config", "random", "distributed"})
# Labs use these modules of the emulated cluster; checks measure a rank with the others.
_OPEN_IN_EMULATE = frozenset({"clusters", "plan", "simulate", "teach", "trace"})
_EMULATE = Path(minidist.__file__).parent / "emulate"
_OF_EMULATE = {module.name for module in pkgutil.iter_modules([str(_EMULATE)])}
_MACHINERY = {
    "minidist": frozenset({"kernel", "evidence", "replaced"}),
    "minidist.emulate": frozenset(_OF_EMULATE - _OPEN_IN_EMULATE | {"current_client"}),
}
_CHANGE_ITS_OBJECT = ("update", "pop", "setdefault", "clear", "__setitem__", "__setattr__")
_CHANGE_THEIR_FIRST = ("setattr", "delattr", "object", "dict", "__setattr__", "__delattr__")
_CHANGE_A_PATH = ("patch", "setattr", "delattr")  # mock and pytest take a path such as "time.sleep"
_RUN_TEXT = ("exec", "eval", "compile")
_DOTTED = re.compile(r"\w+(?:\.\w+)+")
_MAX_STEPS = 20


def module_names(sources: Iterable[str]) -> dict[str, str]:
    """Name -> module or part of one that it means, from the imports and aliases of all cells."""
    names: dict[str, str] = {}
    for source in sources:
        for node in ast.walk(parse(source)):
            _note(node, names)
    return names


def reached(tree: ast.AST, names: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """What a cell patches or reaches into, in words, with its line."""
    own = _assigned(tree)
    here = {name: dotted for name, dotted in names.items() if name not in own}
    for node in ast.walk(tree):
        _note(node, here)
    for node, known in _in_scopes(tree, here):
        line = getattr(node, "lineno", 0)
        for dotted in _patched(node, known):
            yield f"patches {dotted}", line
        for dotted in _mentioned(node, known):
            if part := _machinery(dotted):
                yield f"reaches into {part}", line
        if isinstance(node, ast.Call) and _called(node) in _RUN_TEXT:
            for text in _texts(node.args[:1]):
                yield from ((what, line) for what, _ in reached(parse(text), known))


def _in_scopes(
    tree: ast.AST, names: Mapping[str, str]
) -> Iterator[tuple[ast.AST, Mapping[str, str]]]:
    """Every node, with the names' meanings in its scope: in `def f(t)`, t is no module."""
    todo = [(tree, names)]
    while todo:
        node, known = todo.pop()
        yield node, known
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            own = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
            if own & set(known):
                known = {name: dotted for name, dotted in known.items() if name not in own}
        todo += [(child, known) for child in ast.iter_child_nodes(node)]


def _note(node: ast.AST, names: dict[str, str]) -> None:
    """Notes what an import or an alias makes a name mean."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            names[alias.asname or first] = alias.name if alias.asname else first
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    elif isinstance(node, ast.Assign) and (dotted := _resolve(node.value, names)):
        names |= {target.id: dotted for target in node.targets if isinstance(target, ast.Name)}


def _assigned(tree: ast.AST) -> set[str]:
    """Names that a cell assigns."""
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _resolve(node: ast.AST, names: Mapping[str, str]) -> str:
    """The dotted name that an expression means; empty if it does not start at a module."""
    parts: list[str] = []
    for _ in range(_MAX_STEPS):
        if isinstance(node, ast.Name):
            start = names.get(node.id, "")
            return ".".join([start, *reversed(parts)]) if start else ""
        if isinstance(node, ast.Attribute):
            parts += [node.attr] if node.attr != "__dict__" else []
            node = node.value
        elif isinstance(node, ast.Subscript):
            found = _texts([node.slice])
            if _is_modules(node.value) and found:
                return ".".join([found[0], *reversed(parts)])
            parts += found
            node = node.value
        elif isinstance(node, ast.Call):
            name, found = _called(node), _texts(node.args)
            function = node.func
            if name in ("import_module", "__import__") and found:
                return ".".join([found[0], *reversed(parts)])
            if name == "get" and isinstance(function, ast.Attribute):
                if not _is_modules(function.value) or not found:
                    return ""
                return ".".join([found[0], *reversed(parts)])
            if name in ("getattr", "vars", "reload") and node.args:
                parts += found[:1]
                node = node.args[0]
            elif name == "current_client":  # of the emulated cluster
                node = function
            else:
                return ""
        else:
            return ""
    return ""


def _is_modules(node: ast.AST) -> bool:
    name = getattr(node, "attr", "") or getattr(node, "id", "")
    return name == "modules"


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def _texts(nodes: Iterable[ast.AST]) -> list[str]:
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def _patched(node: ast.AST, names: Mapping[str, str]) -> Iterator[str]:
    found: list[str] = []
    if isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node.ctx, ast.Store | ast.Del):
            found.append(_resolve(node, names))
    elif isinstance(node, ast.Call):
        name, texts = _called(node), _texts(node.args)
        if name in _CHANGE_THEIR_FIRST and node.args and (dotted := _resolve(node.args[0], names)):
            found.append(".".join([dotted, *texts[:1]]))
        if name in _CHANGE_ITS_OBJECT and isinstance(node.func, ast.Attribute):
            dotted = _resolve(node.func.value, names)
            keys = texts[:1] + [k.arg for k in node.keywords if k.arg][:1]
            found.append(".".join([dotted, *keys]) if dotted else "")
        if name in _CHANGE_A_PATH:
            found += [text for text in texts[:1] if _DOTTED.fullmatch(text)]
    for dotted in found:
        parts = dotted.split(".")
        if parts[0] in _PATCHED and len(parts) > 1 and not _MAY_BE_SET & set(parts):
            yield dotted


def _mentioned(node: ast.AST, names: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        yield _resolve(node, names)
    else:
        yield from (text for text in _texts([node]) if _DOTTED.fullmatch(text))


def _machinery(dotted: str) -> str:
    """The shortest part of a dotted name that is the course's machinery; empty if none is."""
    parts = dotted.split(".")
    if parts[0] not in ("minidist", "autograder"):
        return ""
    for end in range(2, len(parts) + 1):
        before, last = ".".join(parts[: end - 1]), parts[end - 1]
        hidden = last.startswith("_") and last not in ("__version__", "__doc__", "__name__")
        inner = last in _MACHINERY.get(before, ()) or (before == "autograder" and last != "check")
        if hidden or inner or before == "autograder.check":
            return ".".join(parts[:end])
    return ""
