"""Explains a missing name by the cell that failed: a SyntaxError there leaves nothing defined.

Without this, a check only says "name 'DDP' is not defined", and the reason is some cells above it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

from autograder.criteria.criterion import Status, Verdict
from autograder.submission.rerun import MAX_SOURCE_CHARS

_MISSING = re.compile(r"(?:\[ranks? [^\]\n]*\] )?(?:NameError: )?name '(\w+)' is not defined")
_WRAPS_PYTHON = ("%%rank", "%%ranks", "%%time", "%%timeit", "%%capture", "%%prun")
_FRAME = re.compile(r"Cell In\[\d+\], line (\d{1,7})")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LABEL = re.compile(r"^\[ranks? [^\]]*\] ")
_PLACE = re.compile(r" \([^()]*, line \d+\)$")
_DEFINES = re.compile(r"(?:\w+\s+){0,2}(\w+)\s*([(:=,\[]|$)")
_NOT_DEFINING = ("return", "raise", "assert", "del", "yield", "await", "print")
_MAX_LINE = 300  # characters of a line that are looked at
_SHOWN = 80


@dataclass(frozen=True)
class FailedCell:
    """A cell of a submission, not a check, that ended with an error.

    Attributes:
        where: its number, and the task that it is.
        error: the error in a few words, with its line.
        source: its code.
    """

    where: str
    error: str
    source: str

    def defines(self, name: str) -> bool:
        """Whether the cell would define `name`; a misspelt keyword before the name counts, too."""
        lines = (line.strip()[:_MAX_LINE] for line in self.source.splitlines() if name in line)
        return any(_defines(line, name) for line in lines)


def read_failure(cell: NotebookNode, outcome: Mapping[str, str]) -> FailedCell | None:
    """What is known of a cell that failed; None if it did not.

    %%capture and its like end well whatever happens in them, so such cells are looked at, too.

    Args:
        outcome: how the cell ended: kind, and ename and why of an error. `why` may begin with the
            ranks that had the error.
    """
    if outcome["kind"] == "ok" and not cell.source.lstrip().startswith("%%"):
        return None
    source = cell.source
    name = cell.metadata.get("minidist", {}).get("grade_id")
    where = f"In[{cell.get('execution_count') or '?'}] ({name or 'own cell'})"
    found = _syntax_error(source)
    if found is not None:
        ename, line, text = found
    elif outcome["kind"] == "ok":
        return None
    else:
        ename, first = outcome["ename"], outcome["why"].partition("\n")[0]
        line, text = _line_of(cell), _PLACE.sub("", _LABEL.sub("", first))
    lines = source.split("\n")
    code = lines[line - 1].strip()[:_SHOWN] if 0 < line <= len(lines) else ""
    at = f" in line {line} (`{code}`)" if code else ""
    return FailedCell(where, f"{ename}{at}: {text}", source)


def explain(
    verdict: Verdict, failed: Sequence[FailedCell], told: Mapping[str, FailedCell]
) -> tuple[Verdict, FailedCell | None]:
    """Puts the error of a failed cell in place of the missing name.

    Args:
        told: criterion -> the failed cell that its message tells of.

    Returns:
        the verdict, and the failed cell that it tells of, if it does.
    """
    missing = _MISSING.search(verdict.message)
    if verdict.status != Status.STUDENT_ERROR or missing is None:
        return verdict, None
    name = missing[1]
    cause = _cause(name, failed)
    if cause is None:
        return verdict, None
    earlier = next((criterion for criterion, cell in told.items() if cell is cause), None)
    words = f"{cause.where} failed, so there is no {name}: {cause.error}"
    if earlier is not None:
        words = f"There is no {name}: this follows from {earlier} ({cause.where}: {cause.error})"
    message = verdict.message[: missing.start()] + words + verdict.message[missing.end() :]
    return replace(verdict, message=message), cause


def _cause(name: str, failed: Sequence[FailedCell]) -> FailedCell | None:
    """The first failed cell of a chain: a cell may fail because another defined nothing."""
    cause = None
    for at in reversed(range(len(failed))):
        if failed[at].defines(name):
            cause = failed[at]
            if (missing := _MISSING.search(cause.error)) is None:
                return cause
            name = missing[1]
    return cause


def _defines(line: str, name: str) -> bool:
    words = re.findall(r"\w+", line)
    if not words or words[0] in _NOT_DEFINING:
        return False
    if words[0] in ("import", "from"):
        return name in words[1:]
    found = _DEFINES.match(line)
    if found is None or found[1] != name:
        return False
    return found.start(1) > 0 or (found[2] not in ("(", "[", "") and not line.startswith("=="))


def _syntax_error(source: str) -> tuple[str, int, str] | None:
    """Name, line and text of an error that keeps the cell's Python from being read, if any."""
    if len(source) > MAX_SOURCE_CHARS:
        return None
    lines = source.split("\n")
    first = next((at for at, line in enumerate(lines) if line.strip()), 0)
    while first < len(lines) and lines[first].split()[:1] and lines[first].startswith("%%"):
        if lines[first].split()[0] not in _WRAPS_PYTHON:
            return None
        first += 1
    try:
        ast.parse(TransformerManager().transform_cell("\n".join(lines[first:])))
    except SyntaxError as error:
        skipped = next((n for n, line in enumerate(lines[first:]) if line.strip()), 0)
        return type(error).__name__, first + skipped + (error.lineno or 1), error.msg
    except Exception:  # untrusted source: too deep, or with odd characters
        return None
    return None


def _line_of(cell: NotebookNode) -> int:
    """The line at which the cell's code was when it raised; 0 if the traceback does not say."""
    for output in cell.outputs:
        if output.output_type == "error":
            trace = _COLOUR.sub("", "\n".join(map(str, output.get("traceback", ()))))
            if found := _FRAME.search(trace):
                lines = cell.source.split("\n")
                empty = next((n for n, line in enumerate(lines) if line.strip()), 0)
                return int(found[1]) + empty
    return 0
