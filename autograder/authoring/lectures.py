"""A lecture as students get it before labs are over: without code that needs withheld modules.

Such code is replaced by its outputs: students see the figures and numbers now, and get the code
when the lab is over. All statements that need no withheld module stay, so that other cells run.
A statement also needs what earlier statements needed to make the names and files that it uses.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import symtable
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import nbformat
import papermill
from nbformat import NotebookNode

from autograder.authoring.cells import parse_cell, split_magic

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_SHOWS = re.compile(r"(display|claim|print|explore|plot_\w+)$")  # change none of their arguments
_WRITES = re.compile(r"^%%writefile\s+(?:-a\s+)?(\S+)")


@dataclass(frozen=True)
class Cell:
    """What becomes of a code cell.

    Attributes:
        source: the code that stays; "" if none does.
        needs: the withheld modules that the removed code needs.
        hidden: whether the removed code shows something; its outputs take its place.
    """

    source: str
    needs: frozenset[str] = frozenset()
    hidden: bool = False


def plan_lecture(lecture: Path, library: Path, missing: Collection[str]) -> list[Cell]:
    """What becomes of each code cell of a lecture.

    Args:
        lecture: the notebook.
        library: the folder of minidist, with all modules.
        missing: modules that students do not have.
    """
    reader = _Reader(library, frozenset(missing))
    notebook = nbformat.read(lecture, as_version=4)
    return [reader.read(cell.source) for cell in notebook.cells if _is_code(cell)]


@dataclass
class _Reader:
    """Reads cells in order and notes which withheld modules each name needs."""

    library: Path
    missing: frozenset[str]
    names: dict[str, frozenset[str]] = field(default_factory=dict)  # name -> modules
    files: dict[str, frozenset[str]] = field(default_factory=dict)  # file name -> modules
    modules: dict[str, str] = field(default_factory=dict)  # name -> module that it was imported as

    def read(self, source: str) -> Cell:
        head, body = split_magic(source)
        if body.startswith("%%"):
            return self._foreign(source)
        tree = _parse(body)
        wanted: dict[ast.stmt, frozenset[str]] = {}
        for node in tree.body:
            wanted[node] = self._needs(node)
            self._learn(node, wanted[node])
        needs = frozenset[str]().union(*wanted.values())
        shows = [n for n, modules in wanted.items() if modules and not isinstance(n, _DEFINITIONS)]
        if shows:  # the outputs of the whole cell are shown, so nothing is shown again
            for node in tree.body:
                if isinstance(node, ast.Expr):
                    wanted[node] |= needs
            self._spoil(tree.body, wanted)
        kept: list[ast.stmt] = []
        for node in tree.body:
            kept += self._rest_of_import(node) if wanted[node] else [node]
        if not needs:
            return Cell(source)
        text = "\n".join(_source_of(body, node) for node in kept)
        return Cell(head + text if text else "", needs, bool(shows))

    def _spoil(self, body: list[ast.stmt], wanted: dict[ast.stmt, frozenset[str]]) -> None:
        """Drops statements that make or read a value that a dropped statement may change."""
        needs = frozenset[str]().union(*wanted.values())
        while True:
            changed = {n for node in body if wanted[node] for n in _changed(node)}
            changed -= self.modules.keys()
            spoilt = [
                node
                for node in body
                if not wanted[node]
                if self._needs(node)
                or (
                    not isinstance(node, _DEFINITIONS)
                    and changed.intersection((*_stored(node), *_global_names(node)))
                )
            ]
            if not spoilt:
                return
            for node in spoilt:
                wanted[node] = needs
                self._learn(node, needs)

    def _foreign(self, source: str) -> Cell:
        """A cell with a magic whose body is text."""
        needs = self._in_text(source)
        if not needs:
            return Cell(source)
        if match := _WRITES.match(source):
            self.files[match[1]] = needs
        return Cell("", needs, hidden=True)

    def _needs(self, node: ast.stmt) -> frozenset[str]:
        """The withheld modules that a statement needs."""
        wanted, mentioned = _global_names(node), _mentioned(node)
        dotted = [
            *(
                f"{self.modules[owner]}.{name}"
                for owner, name in mentioned.attributes
                if owner in wanted and owner in self.modules
            ),
            *mentioned.imported,
        ]
        return frozenset[str]().union(
            *(self.names.get(name, ()) for name in wanted),
            *map(self._module, dotted),
            *map(self._in_text, mentioned.texts),
        )

    def _in_text(self, text: str) -> frozenset[str]:
        """The withheld modules that a script or a command names, or reaches by a file's name."""
        files = [needs for name, needs in self.files.items() if name in text]
        return frozenset[str]().union(*files, *map(self._module, _dotted_in(text)))

    def _module(self, dotted: str) -> frozenset[str]:
        """The withheld module that a dotted name is in, or is."""
        package, _, name = dotted.rpartition(".")
        for origin in (dotted, exports(self.library, package).get(name, "")):
            if module := outermost(origin, self.missing):
                return frozenset({module})
        return frozenset()

    def _learn(self, node: ast.stmt, needs: frozenset[str]) -> None:
        """Notes what a statement defines."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name, dotted in _imported(node):
                self.names[name] = self._module(dotted)
                self.modules[name] = dotted
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.names[node.name] = needs
        else:
            self.names |= dict.fromkeys(_stored(node), needs)

    def _rest_of_import(self, node: ast.stmt) -> list[ast.stmt]:
        """An import without the names that are withheld."""
        if not isinstance(node, ast.ImportFrom):
            return []
        names = [a for a in node.names if not self._module(f"{node.module}.{a.name}")]
        return [ast.ImportFrom(node.module, names, node.level)] if names else []


def outermost(dotted: str, packages: Collection[str]) -> str | None:
    """The outermost of these modules and packages that a dotted name is in, or is."""
    outer = accumulate(dotted.split("."), "{}.{}".format)
    return next((name for name in outer if name in packages), None)


def _changed(node: ast.stmt) -> Iterator[str]:
    """The names whose values a statement may change.

    They are arguments and receivers of its calls, and owners of what it assigns to.
    """
    for part in ast.walk(node):
        roots: list[ast.expr] = []
        if isinstance(part, ast.Call) and not _shows(part.func):
            roots = [part.func, *part.args, *(keyword.value for keyword in part.keywords)]
            roots = [r for r in roots if isinstance(r, ast.Name) or r is part.func]
        elif isinstance(part, ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load):
            roots = [part]
        for root in roots:
            while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                root = root.func if isinstance(root, ast.Call) else root.value
            if isinstance(root, ast.Name):
                yield root.id


def _shows(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and bool(_SHOWS.match(function.id))


def _stored(node: ast.stmt) -> Iterator[str]:
    """The names of data that a statement makes; those of a comprehension end with it."""
    if not isinstance(node, _DEFINITIONS):
        for symbol in _symbols(node).get_symbols():
            if symbol.is_assigned():
                yield symbol.get_name()


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Each name that an import makes, and its dotted origin."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        else:
            yield alias.asname or alias.name.partition(".")[0], alias.name


# Cached, because each lecture is read again for every set of missing modules.
_parse = cache(parse_cell)


@cache
def _global_names(node: ast.stmt) -> frozenset[str]:
    """The names of the notebook that a statement reads, now or when its functions are called."""
    found: set[str] = set()
    todo = [_symbols(node)]
    while todo:
        table = todo.pop()
        todo += table.get_children()
        for symbol in table.get_symbols():
            top = table.get_type() == "module"
            if symbol.is_referenced() and (top or symbol.is_global()):
                found.add(symbol.get_name())
    return frozenset(found) - {n.name for n in ast.walk(node) if isinstance(n, ast.ExceptHandler)}


class _Mentioned(NamedTuple):
    """What a statement mentions; `attributes` are pairs of a name and what is taken from it."""

    attributes: tuple[tuple[str, str], ...]
    imported: tuple[str, ...]
    texts: tuple[str, ...]


@cache
def _mentioned(node: ast.stmt) -> _Mentioned:
    attributes: list[tuple[str, str]] = []
    imported: list[str] = []
    texts: list[str] = []
    for part in ast.walk(node):
        match part:
            case ast.Attribute(ast.Name(owner), name):
                attributes.append((owner, name))
            case ast.Import() | ast.ImportFrom():
                imported += [dotted for _, dotted in _imported(part)]
            case ast.Constant(str(text)):
                texts.append(text)
    return _Mentioned(tuple(attributes), tuple(imported), tuple(texts))


@cache
def _dotted_in(text: str) -> tuple[str, ...]:
    """The dotted names of modules in a script or a command."""
    try:
        nodes = ast.walk(ast.parse(text)) if "import" in text else ()
        imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
        dotted = [name for node in imports for _, name in _imported(node)]
    except SyntaxError:
        dotted = []
    return (*dotted, *re.findall(r"\bminidist(?:\.\w+)+", text))


@cache
def _symbols(node: ast.stmt) -> symtable.SymbolTable:
    return symtable.symtable(ast.unparse(node), "cell", "exec")


@cache
def exports(library: Path, package: str) -> dict[str, str]:
    """Name -> dotted origin, for the names that a package of minidist takes from its modules."""
    folder = library.parent.joinpath(*package.split("."))
    stub = folder / "__init__.pyi"
    if not stub.is_file():
        return {}
    tree = ast.parse(stub.read_text("utf-8"))
    return {
        alias.asname or alias.name: f"{package}.{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _source_of(body: str, node: ast.stmt) -> str:
    """The statement as it was written, or rewritten if it is not from there."""
    if not hasattr(node, "lineno"):
        return ast.unparse(node)
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(body.splitlines()[first - 1 : node.end_lineno])


# --- the notebook --------------------------------------------------------------------------------


def write_for_students(
    lecture: Path, executed: Path, cells: Sequence[Cell], until: Mapping[str, Sequence[str]]
) -> NotebookNode:
    """The lecture with outputs in place of withheld code.

    Args:
        lecture: the notebook, and `executed`: the same notebook with outputs.
        cells: what becomes of each code cell (`plan_lecture`).
        until: withheld module -> the labs that withhold it.
    """
    notebook, ran = (nbformat.read(path, as_version=4) for path in (lecture, executed))
    with_outputs = iter([cell for cell in ran.cells if _is_code(cell)])
    decisions, kept = iter(cells), []
    for cell in notebook.cells:
        if not _is_code(cell):
            kept.append(cell)
            continue
        decision, outputs = next(decisions), next(with_outputs).outputs
        if not decision.hidden or "getsource" in cell.source:  # that would show withheld code
            outputs = []
        if decision.source.strip():
            cell.source = decision.source
            kept.append(cell)
        if outputs:
            labs = sorted({lab for module in decision.needs for lab in until[module]})
            kept.append(_shown(f"{cell.id}-outputs", outputs, labs))
    notebook.cells = kept
    return notebook


def _is_code(cell: NotebookNode) -> bool:
    return cell.cell_type == "code"


def _shown(cell_id: str, outputs: Sequence[NotebookNode], labs: Sequence[str]) -> NotebookNode:
    """A text cell with the outputs of code that students get later."""
    lines = [f"*The code of this step is handed out when {' and '.join(labs)} is over.*"]
    pictures = {}
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            name = f"output{len(pictures) + 1}.png"
            pictures[name] = {"image/png": data["image/png"].strip()}
            lines.append(f"![{_alt(data)}](attachment:{name})")
        elif "text/html" in data:
            lines.append(data["text/html"])
        elif text := output.get("text") or data.get("text/markdown") or data.get("text/plain"):
            lines.append(f"```text\n{text.rstrip()}\n```")
    cell = nbformat.v4.new_markdown_cell("\n\n".join(lines), id=cell_id[:64])
    if pictures:
        cell["attachments"] = pictures
    return cell


def _alt(data: Mapping[str, str]) -> str:
    return re.sub(r"[\[\]\n]", " ", data.get("text/plain", "figure"))[:200]


def run_once(lecture: Path, library: Path, folder: Path, *, pictures: bool = False) -> Path:
    """`run_lecture`, unless this lecture was run before with the same minidist.

    Args:
        lecture: the notebook.
        library: the folder of minidist.
        folder: keeps what has run.
        pictures: also draw figures with controls for each value, into `pictures` beside the result.
    """
    digest = hashlib.sha256(lecture.read_bytes())
    if pictures:
        digest.update(b"pictures")
    for path in sorted(library.rglob("*.py")):
        digest.update(path.read_bytes())
    place = folder / digest.hexdigest()[:16]
    if not (place / lecture.name).is_file():
        print(f"running {lecture.stem}", flush=True)
        with _pictures_in(place / "pictures" if pictures else None):
            unfinished = run_lecture(lecture, place / "unfinished")
        unfinished.replace(place / lecture.name)
    return place / lecture.name


@contextmanager
def _pictures_in(folder: Path | None) -> Iterator[None]:
    """Kernels that start meanwhile draw figures with controls into this folder, value by value."""
    if folder is None:
        yield
        return
    os.environ["MINIDIST_PICTURES"] = str(folder.resolve())
    try:
        yield
    finally:
        del os.environ["MINIDIST_PICTURES"]


def run_lecture(path: Path, folder: Path) -> Path:
    """Executes a lecture; the executed notebook in `folder`.

    Raises:
        papermill.PapermillExecutionError: a cell failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / path.name
    papermill.execute_notebook(
        str(path), str(target), cwd=str(folder), progress_bar=False, start_timeout=120
    )
    return target
