"""What full marks are, in one place: the points of a lab's criteria that everybody can get.

    Lab.max_score       what the course sets: 100, unless [points] in course.toml says otherwise
    Record.max_score    the same, of one grading: terminal, report and JSON show it
    max_score below     the same, in nbgrader's gradebook: formgrader, feedback and `publish`

Two things give points beyond full marks: a reflection, which a person grades, and a criterion that
needs a GPU. Both are worth 0 in the gradebook. If they were worth their points, nbgrader would add
these to the full marks, which nobody could reach before a person has read the answers. formgrader
still offers a reflection's points to whoever grades.
"""

from __future__ import annotations

from typing import Any

from nbgrader.api import Grade, Gradebook, MissingEntry

from autograder.authoring.notebooks import REFLECT_POINTS
from autograder.criteria import lab_names


def leave_reflections_out(book: Gradebook, lab: str) -> None:
    """Sets the maximum of reflections to 0 in the gradebook, if the lab is there."""
    try:
        notebooks: Any = book.find_assignment(lab).notebooks
    except MissingEntry:
        return
    for notebook in notebooks:
        for cell in notebook.grade_cells:
            if cell.cell_type == "markdown" and cell.max_score:
                cell.max_score = 0
    book.db.commit()


def max_score(assignment: Any) -> float:
    """Full marks of an assignment, also in a gradebook that an older version has filled.

    An assignment that is no lab of this course has the full marks that nbgrader gives it.
    """
    if assignment.name in lab_names():
        return float(assignment.max_code_score)
    return float(assignment.max_score)


def offer_reflection_points() -> None:
    """Lets formgrader offer a reflection's points, which it would cap at 0.

    formgrader reads a cell's maximum from `Grade.to_dict`. Everything else reads the cell's share
    of the full marks, which stays 0.
    """
    plain = Grade.to_dict
    if getattr(plain, "offers_reflections", False):
        return

    def to_dict(self: Any) -> dict[str, Any]:
        fields = plain(self)
        ours = self.assignment.name in lab_names()
        if ours and fields["cell_type"] == "markdown" and not fields["max_score"]:
            fields["max_score"] = float(REFLECT_POINTS)
        return fields

    to_dict.offers_reflections = True  # type: ignore[attr-defined]
    Grade.to_dict = to_dict  # type: ignore[method-assign]
