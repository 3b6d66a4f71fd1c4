"""Near-identical submissions: something for a person to look at, never a verdict.

Two notebooks are compared by what their authors wrote: the template's cells, comments, layout and
the names that an author chose are left out. What is left is cut into runs of tokens, and two
notebooks are as similar as the share of runs that the shorter one has in common with the other.

    for param in self.module.parameters():   # all of them      for v in self.v.parameters():
        dist.all_reduce(param.grad)                       ->         dist.all_reduce(v.grad)

Short tasks have few right answers, so a high share is a reason to read both, and no proof. Runs
that many of a class have are taken for the task's own idiom and do not count.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import keyword
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from autograder.course.course import Course
from autograder.report.authored import code_of, is_given, name_of

RUN = 8  # tokens in a row
MIN_RUNS = 60  # a notebook with less of its own is too short to be compared
NEAR = 0.85  # share of runs in common from which two are shown
COMMON = 0.25  # runs that more of a class have do not count, …
MIN_COMMON = 6  # … if these are at least so many submissions
MAX_ROWS = 200  # of the report
MAX_CHARS = 200_000  # of a notebook's own code; more is cut off
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
_KEPT = frozenset({*keyword.kwlist, *dir(builtins), "self"})


@dataclass(frozen=True)
class Pair:
    """Two that are near-identical.

    Attributes:
        one: a student.
        other: another student, or what is known of the course's own answers.
        share: runs of tokens in common, of the shorter one's; 0 to 1.
        cells: tasks that are the same in both but for names, comments and layout.
        ours: whether the other one is the course's own.
    """

    one: str
    other: str
    share: float
    cells: tuple[str, ...]
    ours: bool = False


@dataclass(frozen=True)
class _Work:
    """What is left of a notebook: runs of all of its cells, and the tokens of each task's."""

    runs: frozenset[int]
    cells: Mapping[str, tuple[str, ...]]


def find_similar(
    notebooks: Mapping[str, NotebookNode],
    master: NotebookNode,
    ours: Mapping[str, NotebookNode] | None = None,
    *,
    near: float = NEAR,
) -> list[Pair]:
    """Pairs of students, and students and the course's own answers, the most similar first.

    Args:
        notebooks: student -> what `intake` made of the submission.
        master: the lab as it was released.
        ours: name -> solution, or another right answer.
    """
    template = _read(master, own=False)
    works = {name: _read(notebook, own=True) for name, notebook in notebooks.items()}
    common = _common(works.values(), template.runs)
    works = {name: _without(work, common) for name, work in works.items()}
    works = {name: work for name, work in works.items() if len(work.runs) >= MIN_RUNS}
    known = {n: _without(_read(nb, own=True), common) for n, nb in (ours or {}).items()}
    pairs = []
    for one, other in combinations(sorted(works), 2):
        pairs.append(_pair(one, works[one], other, works[other], template))
    for one, work in sorted(works.items()):
        # Its many variants are all alike: the nearest of ours says it.
        each = [_pair(one, work, n, k, template, True) for n, k in known.items() if k.runs]
        pairs += [max(each, key=lambda pair: pair.share)] if each else []
    found = [pair for pair in pairs if pair.share >= near]
    return sorted(found, key=lambda pair: (-pair.share, pair.ours, pair.one, pair.other))


def similar_in_class(course: Course, lab: str, notebooks: Mapping[str, NotebookNode]) -> list[Pair]:
    """`find_similar` for a class as `read_class` reads it."""
    return find_similar(notebooks, course.master(lab), course_answers(course.root, lab))


def rows(pairs: Sequence[Pair]) -> list[tuple[str, str, str, str]]:
    """A line per pair for the report: one, the other, share, cells that are the same."""
    shown = [
        (pair.one, pair.other, f"{100 * pair.share:.0f} %", ", ".join(pair.cells))
        for pair in pairs[:MAX_ROWS]
    ]
    if len(pairs) > MAX_ROWS:
        shown.append((f"and {len(pairs) - MAX_ROWS} more pairs", "", "", ""))
    return shown


def course_answers(root: Path, lab: str) -> dict[str, NotebookNode]:
    """The lab's solution and the right ones of the bundled class, as far as they are here."""
    from autograder.authoring.percent import BuildError
    from autograder.proof.zoo import load_zoo

    found = {}
    solution = root / "solutions" / lab / f"{lab}.ipynb"
    if solution.is_file():
        found["the solution"] = nbformat.read(solution, as_version=4)
    with contextlib.suppress(BuildError):
        found |= {
            f"tests/zoo: {entry.name}": entry.notebook
            for entry in load_zoo(lab)
            if not entry.loses and entry.name != "reference"
        }
    return found


def _pair(
    one: str, work: _Work, other: str, its: _Work, template: _Work, ours: bool = False
) -> Pair:
    share = len(work.runs & its.runs) / max(1, min(len(work.runs), len(its.runs)))
    if ours:  # of ours, a whole answer is there: what counts is how much of the student's is in it
        share = len(work.runs & its.runs) / max(1, len(work.runs))
    cells = tuple(
        name
        for name, tokens in work.cells.items()
        if len(tokens) >= 3 * RUN
        and its.cells.get(name) == tokens
        and template.cells.get(name) != tokens
    )
    return Pair(one, other, share, cells, ours)


def _common(works: Collection[_Work], template: frozenset[int]) -> frozenset[int]:
    """Runs that are the template's, or the idiom of a task: many have them."""
    count = Counter(run for work in works for run in work.runs)
    many = max(MIN_COMMON, COMMON * len(works))
    return template | {run for run, number in count.items() if number > many}


def _without(work: _Work, common: frozenset[int]) -> _Work:
    return _Work(work.runs - common, work.cells)


# --- from a notebook to tokens ------------------------------------------------------------------


def _read(notebook: NotebookNode, *, own: bool) -> _Work:
    """Tokens and runs of the code cells; `own` leaves out what the master gives and locks."""
    runs: set[int] = set()
    cells: dict[str, tuple[str, ...]] = {}
    left = MAX_CHARS
    sources = []
    for cell in notebook.cells:
        if cell.cell_type != "code" or (own and is_given(cell)):
            continue
        source = code_of(cell.source[:left])
        left = max(0, left - len(source))
        sources.append((name_of(cell), source))
    chosen = _chosen_names([source for _, source in sources])
    for name, source in sources:
        tokens = tuple(_tokens(source, chosen))
        if name:
            cells[name] = tokens
        runs |= {hash(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)}
    return _Work(frozenset(runs), cells)


def _chosen_names(sources: Sequence[str]) -> frozenset[str]:
    """Names that the author gave to variables, arguments, attributes, functions and classes."""
    names: set[str] = set()
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # then only layout and comments are left out
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.alias) and node.asname:
                names.add(node.asname)
    return frozenset(names) - _KEPT


def _tokens(source: str, chosen: frozenset[str]) -> Iterator[str]:
    """Names, numbers, strings and signs, with every chosen name as `v`; docstrings are comments."""
    reader = io.StringIO(source).readline
    begins = True  # of a statement, where a string alone says nothing
    with contextlib.suppress(tokenize.TokenError, SyntaxError, IndentationError):
        for token in tokenize.generate_tokens(reader):
            if token.type in _LAYOUT:
                begins = begins or token.type == tokenize.NEWLINE
            elif token.type == tokenize.STRING and begins:
                continue
            else:
                begins = False
                is_chosen = token.type == tokenize.NAME and token.string in chosen
                yield "v" if is_chosen else token.string
