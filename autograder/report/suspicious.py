"""Finds what a person should look at in a submission: evidence with its line, never a verdict.

Evidence is a name or string that the notebook uses and the course's own solution of the same task
does not. Examples are a ready-made class of torch if the task is to write one, and tools to inspect
the process, the machine or the grader; `reaching` adds patched modules, and uses of the course's
machinery. There may be good reasons to use these, and an author who wants to hide can write such
names in a different way. So a finding is a reason to ask, and a lack of findings proves nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbformat import NotebookNode

from autograder.criteria.criterion import Status
from autograder.records.record import Record
from autograder.report.authored import code_of, is_given, name_of, parse
from autograder.report.reaching import module_names, reached
from autograder.submission.class_run import ClassRun

MAX_ROWS = 200  # rows in the report
MAX_PER_STUDENT = 8
MAX_CHARS = 300_000  # characters of a notebook that are searched
_READY_MADE = """
    DistributedDataParallel Reducer DataParallel FullyShardedDataParallel fully_shard
    ZeroRedundancyOptimizer GradScaler DistributedSampler PostLocalSGDOptimizer powerSGD_hook
    batched_powerSGD_hook fp16_compress_hook bf16_compress_hook allreduce_hook PipelineStage
    ScheduleGPipe Schedule1F1B ScheduleInterleaved1F1B parallelize_module DTensor distribute_tensor
    distribute_module ColwiseParallel RowwiseParallel SequenceParallel loss_parallel
"""
_LOOKS_AROUND = """
    _getframe currentframe get_objects get_referrers get_referents settrace setprofile f_locals
    f_back ctypes shared_memory memfd_create mmap socket sitecustomize displayhook run_code prctl
    _get_backend __globals__ __closure__ __code__
    ast_node_transformers input_transformers_cleanup input_transformers_post user_ns ptrace
"""
READY_MADE = frozenset(_READY_MADE.split())
LOOKS_AROUND = frozenset(_LOOKS_AROUND.split())
PLACES = ("/proc", "/dev/shm", "MINIDIST_", "referee", "course.key", "gradebook", "journal.jsonl")
GIVEN_IMPORTS = {"autograder": {"check"}}


@dataclass(frozen=True)
class Evidence:
    """One thing to look at.

    Attributes:
        student: the student who handed the notebook in.
        task: the cell; "own cell" for a cell that the author added, empty for the whole notebook.
        line: line in this cell, from 1; 0 if there is no line.
        what: description in words.
    """

    student: str
    task: str
    line: int
    what: str


def usual_in(solution: NotebookNode) -> dict[str, set[str]]:
    """What the course's solution uses, by task; students may use it there, too."""
    names = _names_in(solution)
    return {
        name_of(cell): set(_traces(cell.source, names))
        for cell in solution.cells
        if cell.cell_type == "code"
    }


def find_evidence(
    student: str, notebook: NotebookNode, usual: Mapping[str, set[str]]
) -> list[Evidence]:
    """The evidence in a notebook that intake has read, in the order of its cells.

    Args:
        usual: from `usual_in`.
    """
    everywhere = set[str]().union(*usual.values())
    names = _names_in(notebook)
    found: list[Evidence] = []
    left = MAX_CHARS
    for cell in notebook.cells:
        if cell.cell_type != "code" or is_given(cell):
            continue
        name = name_of(cell)
        if len(cell.source) > left:
            what = f"{MAX_CHARS} characters of code, and more that was not looked at"
            found.insert(0, Evidence(student, "", 0, what))
            break
        left -= len(cell.source)
        # A cell that the author added may use what the solution uses in any task.
        allowed = usual.get(name, everywhere)
        for what, line in _traces(cell.source, names).items():
            if what not in allowed:
                found.append(Evidence(student, name or "own cell", line, what))
    return found[:MAX_PER_STUDENT]


def evidence_in_record(record: Record) -> list[Evidence]:
    """Evidence in the verdicts: ranks that ended during checks of a submission with points."""
    lost = [c.criterion for c in record.criteria if c.status == Status.RANK_LOST]
    if not lost or not record.score:
        return []
    checks = "1 check" if len(lost) == 1 else f"{len(lost)} checks"
    what = f"ranks ended during {checks}: {', '.join(lost[:3])}"
    return [Evidence(record.student, "", 0, what)]


def suspicious_in_class(
    class_run: ClassRun,
    notebooks: Mapping[str, NotebookNode],
    records: Sequence[Record],
) -> list[Evidence]:
    """Evidence for all students of a class; empty if the course has no solution here.

    Args:
        notebooks: student -> notebook, from `read_class`.
    """
    if class_run.solution is None:
        return []
    usual = usual_in(class_run.solution)
    found = []
    for record in records:
        if (notebook := notebooks.get(record.student)) is not None:
            found += find_evidence(record.student, notebook, usual)
        found += evidence_in_record(record)
    return found


def rows(evidence: Sequence[Evidence]) -> list[tuple[str, str, str]]:
    """One row per piece of evidence for the report: student, where, what."""
    shown = [
        (e.student, f"{e.task}, line {e.line}" if e.line else e.task, e.what)
        for e in evidence[:MAX_ROWS]
    ]
    if len(evidence) > MAX_ROWS:
        shown.append((f"and {len(evidence) - MAX_ROWS} more", "", ""))
    return shown


def _names_in(notebook: NotebookNode) -> dict[str, str]:
    """Name -> module that it means, in the first cells of a notebook that are looked at."""
    sources, left = [], MAX_CHARS
    for cell in notebook.cells:
        if cell.cell_type == "code" and (left := left - len(cell.source)) >= 0:
            sources.append(code_of(cell.source))
    return module_names(sources)


def _traces(source: str, names: Mapping[str, str]) -> dict[str, int]:
    """Description -> first line, for everything in the code that is worth a look."""
    tree = parse(code_of(source))
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        for what in _words(node):
            line = getattr(node, "lineno", 0)
            found[what] = min(found.get(what, line), line)
    for what, line in reached(tree, names):
        found[what] = min(found.get(what, line), line)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _words(node: ast.AST) -> Iterator[str]:
    names: list[str] = []
    if isinstance(node, ast.Name | ast.Attribute):
        names = [node.id if isinstance(node, ast.Name) else node.attr]
        if names == ["check"] and isinstance(node.ctx, ast.Store):
            yield "gives the name check another meaning"
    elif isinstance(node, ast.Import):
        names = [part for alias in node.names for part in alias.name.split(".")]
    elif isinstance(node, ast.ImportFrom):
        names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from (f"names {place}" for place in PLACES if place in node.value)
    if isinstance(node, ast.Import | ast.ImportFrom):
        given = GIVEN_IMPORTS.get(names[0]) if names else None
        if given is not None and not (len(names) == 2 and names[1] in given):
            yield f"imports from {names[0]}"
    for name in names:
        if name in READY_MADE:
            yield f"uses torch's {name}"
        elif name in LOOKS_AROUND:
            yield f"uses {name}"
