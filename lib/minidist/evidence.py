"""What a claim of a lecture rests on, read from the lecture's source: no cell is run.

- **measured**: the value comes from something that ran: ranks, torch, a program, a clock.
- **derived**: it comes from a model, such as `minidist.emulate` or what is more than a formula in
  `minidist.cost`, or from a loop in a function that the lecture defines.
- **arithmetic**: only literals and facts of tables, such as a GPU's memory, and products and
  quotients of them. Such a claim cannot fail, so it is shown and not counted.

The rule follows values: an expression is as strong as the strongest thing that goes into it,
through all variables and functions of the lecture. `claim(..., kind=...)` can only weaken this, for
a value that comes from a run and still says nothing about it.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KINDS = ("arithmetic", "derived", "measured")
_ARITHMETIC, _DERIVED, _MEASURED = range(3)

# Which kind a call into a module gives. The longest entry that fits decides; what is not listed
# adds nothing of its own, such as math, numpy and the built-in functions.
_MODULES = {
    "torch": _MEASURED,
    "torch.finfo": _DERIVED,
    "torch.iinfo": _DERIVED,
    "torch.device": _ARITHMETIC,
    "minidist": _MEASURED,
    "minidist.claims": _ARITHMETIC,
    "minidist.cost": _DERIVED,
    "minidist.data": _DERIVED,
    "minidist.device": _DERIVED,
    "minidist.emulate": _DERIVED,
    "minidist.emulate.teach": _MEASURED,
    "minidist.lr": _DERIVED,
    "minidist.lr.scale_lr": _ARITHMETIC,
    "minidist.mesh.MeshShape": _DERIVED,
    "minidist.parallel.context.ring_bytes": _DERIVED,
    "minidist.parallel.context.ulysses_bytes": _DERIVED,
    "minidist.parallel.expert.all_to_all_bytes": _DERIVED,
    "minidist.parallel.expert.expert_capacity": _DERIVED,
    "minidist.parallel.tensor.block_traffic": _DERIVED,
    "minidist.parallel.tensor.wire_bytes": _DERIVED,
    "minidist.parallel.zero.formula_bytes": _DERIVED,
    "minidist.plots": _ARITHMETIC,
    "minidist.seeding": _DERIVED,
    "minidist.widgets": _ARITHMETIC,
    "numpy.random": _DERIVED,
    "random": _DERIVED,
    "importlib": _MEASURED,
    "inspect": _MEASURED,
    "signal": _MEASURED,
    "subprocess": _MEASURED,
    "time": _MEASURED,
}
# Functions of minidist.cost that look up a fact, or are a line of multiplying, dividing and adding:
# literals in, arithmetic out.
_FORMULAS = {
    *("amdahl_speedup", "bottleneck", "bubble_fraction", "bubble_ratio", "bus_bandwidth"),
    *("bus_factor", "cost_dollars", "cost_saving", "gbit_per_s", "gpu_hours", "karp_flatt"),
    *("pcie", "peak_tokens_per_s", "pipeline_utilization", "seconds_from_bus_bandwidth"),
    *("speedup_with_communication", "state_bytes", "strong_scaling_efficiency"),
    *("throughput_efficiency", "tokens_per_step", "training_flops", "training_seconds"),
    *("training_seconds_from_flops", "utilization", "weak_scaling_efficiency"),
    *("ParallelismConfig", "Wire"),
}
_ASKS_FILES = {"exists", "glob", "iterdir", "read_bytes", "read_text", "stat"}  # of a run's files
_GAP = ".*"  # stands for a part of a text that is known only when it runs
_SHOWS = {"claim", "display", "explore", "print"}


@dataclass(frozen=True)
class Evidence:
    """One claim in the source of a lecture.

    Attributes:
        line: where the call begins, from 1.
        text: a pattern that matches the claim's text; f-strings have a gap for each value.
        kind: measured, derived or arithmetic, by the rule; not yet weakened by `weakened`.
        weakened: the kind that the call names itself, or "".
    """

    line: int
    text: re.Pattern[str]
    kind: str
    weakened: str = ""


def read(source: str, *, where: str = "lecture") -> list[Evidence]:
    """The claims in a lecture's source, in the percent format or any Python, by line.

    Raises:
        ValueError: the source is no Python, or a claim names a kind above what the rule gives.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"{where}, line {error.lineno}: no Python: {error.msg}") from error
    reader = _Reader()
    reader.block(tree.body, _ARITHMETIC)
    found = [reader.found[line] for line in sorted(reader.found)]
    for one in found:
        if one.weakened and one.weakened not in KINDS:
            raise ValueError(
                f"{where}, line {one.line}: a kind is one of {KINDS}, got {one.weakened!r}"
            )
        if one.weakened and KINDS.index(one.weakened) > KINDS.index(one.kind):
            raise ValueError(
                f"{where}, line {one.line}: the claim calls itself {one.weakened}, "
                f"but what its expression reads makes it {one.kind} at most"
            )
    return found


def kind_of(text: str, claims: Sequence[Evidence]) -> str:
    """The kind of the claim with this text, "" if there is none.

    Of several, the one with the longest known text decides; of equally long ones, the weakest."""
    found = [one for one in claims if one.text.fullmatch(text)]
    known = max((len(one.text.pattern.replace(_GAP, "")) for one in found), default=0)
    kinds = [
        one.weakened or one.kind
        for one in found
        if len(one.text.pattern.replace(_GAP, "")) == known
    ]
    return min(kinds, key=KINDS.index, default="")


def kind_of_expression(expression: str) -> str:
    """The kind of an expression over the names of minidist.cost, math and struct."""
    reader = _Reader()
    tree = ast.parse(expression, mode="eval").body
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in ("math", "struct", *dir(builtins)):
            reader.modules[node.id] = f"minidist.cost.{node.id}"
    return KINDS[reader.kind(tree)]


@dataclass
class _Function:
    """A function or class of the lecture; its kind depends on what its names mean when used."""

    node: ast.AST


class _Reader:
    def __init__(self) -> None:
        self.names: dict[str, int | _Function] = {}
        self.modules: dict[str, str] = {}  # name -> dotted name that it stands for
        self.found: dict[int, Evidence] = {}
        self._inside: list[ast.AST] = []

    # ---------------------------------------------------------------------------------- statements

    def block(self, body: Sequence[ast.stmt], floor: int) -> int:
        """Reads statements; what they assign has at least the kind `floor`. Returns the highest."""
        return max((self._statement(node, floor) for node in body), default=_ARITHMETIC)

    def _statement(self, node: ast.stmt, floor: int) -> int:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node)
                return _ARITHMETIC
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.names[node.name] = _Function(node)
                return _ARITHMETIC
            case ast.Assign():
                return self._assign(node.targets, node.value, floor)
            case ast.AnnAssign(value=ast.expr() as value):
                return self._assign([node.target], value, floor)
            case ast.AugAssign():
                kind = max(self.kind(node.value), self.kind(node.target), floor)
                self._bind(node.target, kind, join=True)
                return kind
            case ast.For() | ast.AsyncFor():
                kind = max(self.kind(node.iter), floor)
                self._bind(node.target, kind)
                self.block(node.body, floor)
                inner = self.block(node.body, floor)  # again, with the names that its end assigns
                return max(kind, inner, self.block(node.orelse, floor))
            case ast.While() | ast.If():
                test = max(self.kind(node.test), floor)
                return max(test, self.block(node.body, test), self.block(node.orelse, test))
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    kind = self.kind(item.context_expr)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, kind)
                inner = self.block(node.body, floor)
                for item in node.items:  # such as a log: it holds what the body did
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, inner, join=True)
                return inner
            case ast.Try():
                tried = self.block(node.body, floor)
                for handler in node.handlers:
                    if handler.name:
                        self.names[handler.name] = tried
                    self.block(handler.body, tried)
                return max(tried, self.block(node.orelse, floor), self.block(node.finalbody, floor))
            case ast.Expr():
                return self._call_for_its_effect(node.value)
            case _:
                children = ast.iter_child_nodes(node)
                return max((self.kind(c) for c in children if isinstance(c, ast.expr)), default=0)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                self.modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif alias.asname:
                self.modules[alias.asname] = alias.name
            else:
                root = alias.name.split(".")[0]
                self.modules[root] = root

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr, floor: int) -> int:
        if isinstance(value, ast.Lambda):
            for target in targets:
                if isinstance(target, ast.Name):
                    self.names[target.id] = _Function(value)
            return _ARITHMETIC
        kind = max(self.kind(value), floor)
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else []
            values = value.elts if isinstance(value, ast.Tuple) else []
            if parts and len(parts) == len(values):
                for part, own in zip(parts, values, strict=True):
                    self._bind(part, max(self.kind(own), floor))
            else:
                self._bind(target, kind)
        return kind

    def _bind(self, target: ast.expr, kind: int, *, join: bool = False) -> None:
        match target:
            case ast.Name(id=name):
                old = self.names.get(name, _ARITHMETIC) if join else _ARITHMETIC
                self.names[name] = max(kind, old if isinstance(old, int) else _DERIVED)
            case ast.Tuple() | ast.List():
                for part in target.elts:
                    self._bind(part, kind, join=join)
            case ast.Starred(value=value):
                self._bind(value, kind, join=join)
            case ast.Subscript(value=value) | ast.Attribute(value=value):
                self._bind(value, kind, join=True)  # assigning to a part changes the whole
            case _:
                pass

    def _call_for_its_effect(self, node: ast.expr) -> int:
        """A call such as results.append(x) or dist.all_reduce(x), which changes its arguments."""
        kind = self.kind(node)
        if not isinstance(node, ast.Call) or _name(node.func) in _SHOWS:
            return kind
        if isinstance(node.func, ast.Attribute):
            base = node.func.value
            while isinstance(base, ast.Subscript | ast.Attribute | ast.Call):
                base = base.func if isinstance(base, ast.Call) else base.value
            if isinstance(base, ast.Name) and base.id not in self.modules:
                self._bind(base, kind, join=True)
        if self._kind_of_callee(node.func, kind) == _MEASURED:
            for argument in node.args:
                self._bind(argument, _MEASURED, join=True)
        return kind

    # --------------------------------------------------------------------------------- expressions

    def kind(self, node: ast.AST) -> int:
        match node:
            case ast.Name(id=name):
                return self._kind_of_name(name)
            case ast.Attribute():
                return self._kind_of_attribute(node)
            case ast.Call():
                return self._kind_of_call(node)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._kind_of_comprehension(node)
            case ast.NamedExpr():
                kind = self.kind(node.value)
                self._bind(node.target, kind)
                return kind
            case ast.Lambda():
                return self._used(_Function(node), _ARITHMETIC)
            case _:
                return max((self.kind(c) for c in ast.iter_child_nodes(node)), default=_ARITHMETIC)

    def _kind_of_name(self, name: str) -> int:
        known = self.names.get(name)
        if isinstance(known, _Function):
            return self._used(known, _ARITHMETIC)
        if known is not None:
            return known
        return min(_of_module(self.modules.get(name, "")), _DERIVED)  # read, not called

    def _kind_of_attribute(self, node: ast.Attribute) -> int:
        dotted = self._dotted(node)
        if dotted is None:
            return self.kind(node.value)
        return min(_of_module(dotted), _DERIVED) if dotted.startswith("minidist") else _ARITHMETIC

    def _kind_of_call(self, node: ast.Call) -> int:
        if _name(node.func) == "claim":
            self._claim(node)
            return _ARITHMETIC
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        arguments = max((self.kind(a) for a in given), default=_ARITHMETIC)
        kind = max(arguments, self._kind_of_callee(node.func, arguments))
        for argument in given:  # such as a hook
            known = self.names.get(_name(argument))
            if isinstance(known, _Function):
                self._note_changes(known.node, kind)
            elif isinstance(argument, ast.Lambda):
                self._note_changes(argument, kind)
        return kind

    def _kind_of_callee(self, function: ast.expr, arguments: int) -> int:
        if isinstance(function, ast.Name):
            known = self.names.get(function.id)
            if isinstance(known, _Function):
                loops = any(isinstance(n, ast.For | ast.While) for n in ast.walk(known.node))
                return max(_DERIVED if loops else _ARITHMETIC, self._used(known, arguments))
            if known is not None:
                return known
        if isinstance(function, ast.Attribute) and function.attr in _ASKS_FILES:
            return _MEASURED
        dotted = self._dotted(function)
        return self.kind(function) if dotted is None else _of_module(dotted)

    def _kind_of_comprehension(self, node: ast.AST) -> int:
        outside = dict(self.names)
        kind = _ARITHMETIC
        for part in node.generators:  # type: ignore[attr-defined]
            over = self.kind(part.iter)
            self._bind(part.target, over)
            kind = max(kind, over, *(self.kind(test) for test in part.ifs), _ARITHMETIC)
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]  # type: ignore[attr-defined]
        kind = max(kind, *(self.kind(result) for result in results))
        self.names = outside
        return kind

    def _used(self, function: _Function, arguments: int) -> int:
        """The kind of the result of a function of the lecture, for arguments of a kind."""
        node = function.node
        if node in self._inside:
            return _ARITHMETIC  # it calls itself: the rest of its body decides
        outside = dict(self.names)
        self._inside.append(node)
        for argument in _parameters(node):
            self.names[argument] = arguments
        body = node.body  # type: ignore[attr-defined]
        kind = self.kind(body) if isinstance(node, ast.Lambda) else self.block(body, _ARITHMETIC)
        self._inside.pop()
        self.names = outside
        self._note_changes(node, max(kind, arguments))
        return kind

    def _note_changes(self, function: ast.AST, kind: int) -> None:
        """A function of the lecture was used: it may have changed lists of the lecture."""
        for name in _changed_in(function):
            if isinstance(self.names.get(name), int):
                self._bind(ast.Name(id=name), kind, join=True)

    def _claim(self, node: ast.Call) -> None:
        text, measured = node.args[0], node.args[1]
        kind = self.kind(measured)
        weakened = next((k.value for k in node.keywords if k.arg == "kind"), None)
        before = self.found.get(node.lineno)
        if before is not None:  # in a function that is used twice: the weaker use decides
            kind = min(kind, KINDS.index(before.kind))
        self.found[node.lineno] = Evidence(
            line=node.lineno,
            text=re.compile("".join(_pattern(text)), re.S),
            kind=KINDS[kind],
            weakened=str(getattr(weakened, "value", "")),
        )

    def _dotted(self, node: ast.expr) -> str | None:
        """The full dotted name of a module's attribute, or None."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self.names:
            return None
        root = self.modules.get(node.id)
        if root is None:
            return "" if not parts else None
        return ".".join([root, *reversed(parts)])


def _of_module(dotted: str) -> int:
    if dotted.startswith("minidist.cost."):
        name = dotted.split(".")[2]
        is_table = name.isupper() and not name.startswith(("DEEPSEEK", "GPT", "LLAMA", "MIXTRAL"))
        if is_table or dotted.rpartition(".")[2] in _FORMULAS:
            return _ARITHMETIC
    while dotted:
        if dotted in _MODULES:
            return _MODULES[dotted]
        dotted = dotted.rpartition(".")[0]
    return _ARITHMETIC


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _parameters(node: ast.AST) -> Iterator[str]:
    arguments = getattr(node, "args", None)
    if isinstance(arguments, ast.arguments):
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            yield one.arg


def _changed_in(function: ast.AST) -> Iterator[str]:
    """Names of lists, dicts and the like whose contents a function changes."""
    own = set(_parameters(function))
    for node in ast.walk(function):
        places: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            places = [node.func.value]
        elif isinstance(node, ast.Assign):
            places = [t for t in node.targets if isinstance(t, ast.Subscript | ast.Attribute)]
        elif isinstance(node, ast.AugAssign):
            places = [node.target]
        for place in places:
            while isinstance(place, ast.Subscript | ast.Attribute):
                place = place.value
            if isinstance(place, ast.Name) and place.id not in own:
                yield place.id


def _pattern(text: ast.expr) -> Iterator[str]:
    match text:
        case ast.Constant(value=str(value)):
            yield re.escape(value)
        case ast.JoinedStr(values=values):
            for value in values:
                yield from _pattern(value)
        case _:
            yield _GAP
