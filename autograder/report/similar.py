"""Finds near-identical submissions: something for a person to look at, never a verdict.

Two notebooks are compared by what their authors wrote. The template's cells, comments, layout and
the names that an author chose are left out. The rest is cut into runs of tokens. The similarity of
two notebooks is the share of the shorter one's runs that the longer one has, too.

    for param in self.module.parameters():   # all of them      for v in self.v.parameters():
        dist.all_reduce(param.grad)                       ->         dist.all_reduce(v.grad)

Short tasks have few right answers, so a high share is a reason to read both, but no proof. A run
that many different notebooks of a class have belongs to the task's idiom and does not count. For
this, copies count as one notebook, else a notebook that half a class copied would be the idiom. In
comparisons with our answers and with earlier terms, every run counts that is not in the template.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import keyword
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from nbformat import NotebookNode

from autograder.report.authored import code_of, is_given, name_of, parse, read_class
from autograder.submission.class_run import ClassRun
from autograder.submission.find import find_submissions

RUN = 8  # number of consecutive tokens in a run
MIN_RUNS = 60  # a notebook with fewer runs is too short to be compared
NEAR = 0.85  # pairs are shown from this share of common runs on
# A run does not count if more than this share of the class's different notebooks have it, and more
# than this number of them.
COMMON = 0.25
MIN_COMMON = 6
# Notebooks that share this much are copies of one. Independent right answers share less. A copy
# that was rewritten so far that it shares less counts as a different notebook.
COPY = 0.93
MAX_ROWS = 200  # rows in the report
MAX_CHARS = 200_000  # of a notebook's code cells; the rest is not compared
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_KEPT = frozenset({*keyword.kwlist, *dir(builtins), "self"})


@dataclass(frozen=True)
class Pair:
    """Two near-identical notebooks.

    Attributes:
        one: a student.
        other: a different student, or the name of one of the course's own answers.
        share: share of common runs, 0 to 1: of the shorter notebook's runs, or of the student's
            runs if `ours`.
        cells: tasks that are equal in both except for names, comments and layout.
        ours: whether `other` is one of the course's own answers.
    """

    one: str
    other: str
    share: float
    cells: tuple[str, ...]
    ours: bool = False


@dataclass(frozen=True)
class _Work:
    """The compared part of a notebook: runs of all code cells, and the tokens of each task cell."""

    runs: frozenset[int]
    cells: Mapping[str, tuple[str, ...]]


def find_similar(
    notebooks: Mapping[str, NotebookNode],
    master: NotebookNode,
    ours: Mapping[str, NotebookNode] | None = None,
    *,
    near: float = NEAR,
) -> list[Pair]:
    """Near-identical pairs, the most similar first: two students, or a student and our answer.

    Args:
        notebooks: student -> the submission as `intake` read it.
        master: the released lab.
        ours: name -> the course's solution, or a different right answer.
    """
    template = _read(master, own=False)

    def read(notebook: NotebookNode) -> _Work:
        return _without(_read(notebook, own=True), template.runs)

    whole = _long_enough({name: read(notebook) for name, notebook in notebooks.items()})
    known = {name: read(notebook) for name, notebook in (ours or {}).items()}
    common = _common(_copies(whole, template))
    works = _long_enough({name: _without(work, common) for name, work in whole.items()})
    pairs = []
    for one, work in sorted(whole.items()):
        # Our answers are variants of one solution, so only the most similar one is named.
        each = [_pair(one, work, n, k, template, True) for n, k in known.items() if k.runs]
        pairs += [max(each, key=lambda pair: pair.share)] if each else []
    for one, other in combinations(sorted(works), 2):
        pairs.append(_pair(one, works[one], other, works[other], template))
    found = [pair for pair in pairs if pair.share >= near]
    return sorted(found, key=lambda pair: (not pair.ours, -pair.share, pair.one, pair.other))


def similar_in_class(class_run: ClassRun, notebooks: Mapping[str, NotebookNode]) -> list[Pair]:
    """`find_similar` for the notebooks of a class, from `read_class`."""
    ours = course_answers(class_run) | earlier_terms(class_run)
    return find_similar(notebooks, class_run.master, ours)


def earlier_terms(class_run: ClassRun) -> dict[str, NotebookNode]:
    """The submissions of earlier terms, from the folders `build/earlier/TERM`, as handed in."""
    found: dict[str, NotebookNode] = {}
    for term in sorted((class_run.course.build / "earlier").glob("*/")):
        try:
            submissions = find_submissions([term], class_run.lab_name).submissions
        except ValueError:
            continue  # nothing of this lab
        read = read_class(class_run, [(each.student, each.path) for each in submissions])
        found |= {f"{term.name}: {student}": notebook for student, notebook in read.items()}
    return found


def rows(pairs: Sequence[Pair]) -> list[tuple[str, str, str, str]]:
    """One row per pair for the report: one, other, share, equal cells."""
    shown = [
        (pair.one, pair.other, f"{100 * pair.share:.0f} %", ", ".join(pair.cells))
        for pair in pairs[:MAX_ROWS]
    ]
    if len(pairs) > MAX_ROWS:
        shown.append((f"and {len(pairs) - MAX_ROWS} more pairs", "", "", ""))
    return shown


def course_answers(class_run: ClassRun) -> dict[str, NotebookNode]:
    """The lab's solution and the right submissions of the bundled class, if they exist here."""
    from autograder.authoring.percent import BuildError
    from autograder.proof.zoo import load_zoo

    found = {}
    if class_run.solution is not None:
        found["the solution"] = class_run.solution
    with contextlib.suppress(BuildError):
        found |= {
            f"tests/zoo: {entry.name}": entry.notebook
            for entry in load_zoo(class_run.lab_name, "right_*")
        }
    return found


def _pair(
    one: str, work: _Work, other: str, its: _Work, template: _Work, ours: bool = False
) -> Pair:
    share = len(work.runs & its.runs) / max(1, min(len(work.runs), len(its.runs)))
    if ours:  # our answer is complete: what counts is how much of the student's work is in it
        share = len(work.runs & its.runs) / max(1, len(work.runs))
    cells = tuple(
        name
        for name, tokens in work.cells.items()
        if len(tokens) >= 3 * RUN
        and its.cells.get(name) == tokens
        and template.cells.get(name) != tokens
    )
    return Pair(one, other, share, cells, ours)


def _copies(works: Mapping[str, _Work], template: _Work) -> list[list[_Work]]:
    """Groups of works that are near-identical, directly or through works in between."""
    group = {name: [name] for name in works}
    for one, other in combinations(works, 2):
        if group[one] is group[other]:
            continue
        if _pair(one, works[one], other, works[other], template).share >= COPY:
            group[one].extend(group[other])
            for name in group[other]:
                group[name] = group[one]
    distinct = {id(names): names for names in group.values()}.values()
    return [[works[name] for name in names] for names in distinct]


def _common(groups: Sequence[Sequence[_Work]]) -> frozenset[int]:
    """Runs that many groups of copies have: the idiom of a task."""
    runs = [frozenset[int]().union(*(work.runs for work in group)) for group in groups]
    count = Counter(run for each in runs for run in each)
    many = max(MIN_COMMON, COMMON * len(groups))
    return frozenset(run for run, number in count.items() if number > many)


def _long_enough(works: Mapping[str, _Work]) -> dict[str, _Work]:
    return {name: work for name, work in works.items() if len(work.runs) >= MIN_RUNS}


def _without(work: _Work, common: frozenset[int]) -> _Work:
    return _Work(work.runs - common, work.cells)


# --- from a notebook to tokens ------------------------------------------------------------------


def _read(notebook: NotebookNode, *, own: bool) -> _Work:
    """Tokens and runs of the code cells; `own` leaves out the cells that the master provides."""
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
        # A name stays if it is defined only in a cell that is not Python.
        for node in ast.walk(parse(source)):
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
    """Tokens without comments, docstrings and layout, and with `v` for every chosen name."""
    reader = io.StringIO(source).readline
    begins = True  # at the beginning of a statement, where a string is a docstring
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
