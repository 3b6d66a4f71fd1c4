"""A student's feedback page: lost points and why, answers that a person grades, the notebook.

`TellStudents` collects the rows from nbgrader's gradebook, templates/student/index.html.j2 draws
them. The page has no scripts and loads nothing; `safe_html` cleans what a student wrote.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from nbconvert.exporters import HTMLExporter
from nbconvert.filters.highlight import Highlight2HTML
from nbformat import NotebookNode
from traitlets import default
from traitlets.config import Config

from autograder.criteria.criterion import Lab, Status
from autograder.plain_text import MARKS, Mark, clean, is_hidden
from autograder.report.safe_html import SAFE
from minidist.kernel.highlight import highlight_rank_cells

NOT_YET = "Not graded yet: a person will read this. Until then it counts as nothing, not as wrong."
_HERE = Path(__file__).parent
TEMPLATES = _HERE / "templates"
_NOT_PLAIN = re.compile(r"[^ -~\t\n]")


@dataclass(frozen=True)
class Check:
    """One criterion on the page.

    Attributes:
        task: the heading of the task to reread.
        score: the points in the gradebook; None if it could not be tested.
        points: full points, 0 for extra points.
        message: why points are lost, or a remark if none are lost.
        ranks: the status of each rank.
    """

    name: str
    title: str
    task: str
    score: float | None
    points: float
    status: Status
    message: str
    ranks: tuple[Status, ...]

    @property
    def mark(self) -> Mark:
        """Symbol and meaning of the status."""
        return MARKS[self.status]

    @property
    def shown_points(self) -> str:
        """`3 of 5`, `+ 4 extra`, or a dash where nothing was tested."""
        if self.score is None:
            return "–"
        given = f"{round(self.score, 2):g}"
        return f"{given} of {self.points:g}" if self.points else f"+ {given} extra"


@dataclass(frozen=True)
class Answer:
    """A question that a person grades.

    Attributes:
        score: None until somebody has graded it.
        given: whether there is an answer.
    """

    name: str
    question: str
    score: float | None
    points: float
    given: bool

    @property
    def shown_points(self) -> str:
        """`1.5 of 2`, or why there are no points."""
        if not self.given:
            return "not answered"
        return "not graded yet" if self.score is None else f"{self.score:g} of {self.points:g}"


@dataclass(frozen=True)
class Feedback:
    """What the page's template reads."""

    lab: Lab
    student: str
    score: float
    max_score: float
    late_penalty: float
    checks: Sequence[Check]
    answers: Sequence[Answer]

    @property
    def total(self) -> str:
        """`49 of 100`."""
        return f"{round(self.score, 2):g} of {self.max_score:g}"

    @property
    def invalid(self) -> str:
        """Why nothing could be graded; empty if the submission was a notebook."""
        return next((c.message for c in self.checks if c.status is Status.INVALID), "")

    @property
    def lost(self) -> list[list[Check]]:
        """What went wrong; checks with equal status and message are in one group."""
        told: dict[tuple[Status, str], list[Check]] = {}
        for check in self.checks:
            if check.status.is_lost and check.status is not Status.INVALID:
                told.setdefault((check.status, check.message), []).append(check)
        return list(told.values())

    @property
    def others(self) -> list[Check]:
        """What is right or could not be tested."""
        return [c for c in self.checks if not c.status.is_lost]

    @property
    def is_limited(self) -> bool:
        """Whether a gate has reduced the points of checks that passed (`course.gates`)."""
        return any(c.status == Status.PASS and (c.score or 0) < c.points for c in self.checks)

    @property
    def waiting(self) -> int:
        """How many answers nobody has graded yet."""
        return sum(answer.given and answer.score is None for answer in self.answers)

    @property
    def style(self) -> str:
        """The style sheets of the report and of this page."""
        sheets = (_HERE / "page.css", TEMPLATES / "student" / "page.css")
        return "\n".join(sheet.read_text("utf-8") for sheet in sheets)

    def check_of(self, cell: NotebookNode) -> Check | None:
        """The criterion that a code cell tests."""
        name = cell.metadata.get("nbgrader", {}).get("grade_id")
        return next((check for check in self.checks if check.name == name), None)


def read_check(lab: Lab, cell: NotebookNode) -> Check | None:
    """The criterion of a graded code cell, with nbgrader's points and the saved verdict.

    None if the lab has no criterion of that name any more.
    """
    about = cell.metadata.nbgrader
    criterion = next((c for c in lab.criteria if c.name == about["grade_id"]), None)
    if criterion is None:
        return None
    score, points = about.get("score") or 0.0, about["points"]
    saved = cell.metadata.get("minidist", {}).get("verdict", {})
    status = Status(saved.get("status", Status.PASS if score >= points else Status.WRONG))
    untested = status in (Status.BLOCKED, Status.INFRA)
    return Check(
        name=criterion.name,
        title=criterion.title,
        task=criterion.task,
        score=None if untested else score,
        points=points,
        status=status,
        message=clean(saved.get("message", "")).strip(),
        ranks=tuple(Status(rank["status"]) for rank in saved.get("ranks", ())),
    )


def question_of(source: str) -> str:
    """The first sentences of a question's cell, without Markdown's marks.

    >>> question_of("**1. What happens\\nwith `DDP`?** Say why.\\n\\nYOUR ANSWER HERE")
    '1. What happens with DDP? Say why.'
    """
    paragraph = re.sub(r"[*_`#]", "", clean(source.strip().partition("\n\n")[0]))
    return shorten(paragraph, 120, placeholder=" …")


def show_hidden(html: str) -> str:
    """The page with code points in place of characters that reorder or hide text.

    >>> show_hidden("a\\u202eb")
    'a⟨U+202E⟩b'
    """
    return _NOT_PLAIN.sub(_visible, html)


def _visible(found: re.Match[str]) -> str:
    character = found[0]
    if character in "\u2028\u2029":  # ends of lines and paragraphs
        return " "
    return f"⟨U+{ord(character):04X}⟩" if is_hidden(character) else character


class FeedbackExporter(HTMLExporter):
    """Draws the page; nbgrader's GenerateFeedback calls it."""

    @default("exclude_anchor_links")
    def _no_anchors(self) -> bool:
        return True

    @property
    def default_config(self) -> Config:
        """nbconvert's, with our template; pictures are preferred to outputs that need a script."""
        shown = [
            *("image/png", "image/jpeg", "image/svg+xml"),
            *("text/html", "text/markdown", "text/plain"),
        ]
        ours = {"template_name": "student", "extra_template_basedirs": [str(TEMPLATES)], **SAFE}
        config = Config(super().default_config)
        config.merge(
            Config(
                {
                    "FeedbackExporter": ours,  # overrides nbgrader's options of HTMLExporter
                    "NbConvertBase": {"display_data_priority": shown},
                }
            )
        )
        return config

    def from_notebook_node(
        self, nb: NotebookNode, resources: dict[str, Any] | None = None, **kw: Any
    ) -> tuple[str, dict[str, Any]]:
        """The page, and nbconvert's resources."""
        highlight_rank_cells()
        self.register_filter("highlight_code", _coloured)
        # HTMLExporter's own method would parse the page again, to add what our template has.
        # This would more than double the time.
        html, made = super(HTMLExporter, self).from_notebook_node(nb, resources, **kw)
        return show_hidden(html), made


def _coloured(source: str, metadata: Mapping[str, Any]) -> str:
    """A cell's code as HTML with pygments' classes."""
    return _colour(source, str(metadata.get("magics_language", "")))


@functools.lru_cache(maxsize=128)  # most cells of a class are equal
def _colour(source: str, language: str) -> str:
    return Highlight2HTML()(source, metadata={"magics_language": language} if language else {})
