"""nbgrader: this checkout is the course, and what nbgrader makes of it is in build/nbgrader."""

import contextlib
from pathlib import Path

from autograder.course.course import Course
from autograder.gradebook.database import put_alembic_on_path
from autograder.gradebook.full_marks import offer_reflection_points
from autograder.gradebook.validating import forgive_warnings, tell_points
from autograder.report.safe_html import SAFE

c = get_config()  # type: ignore[name-defined]  # noqa: F821

root = Path(__file__).resolve().parent
made = root / "build" / "nbgrader"
with contextlib.suppress(OSError):  # students validate in an installation that they only read
    made.mkdir(parents=True, exist_ok=True)
    Course(root).make_private()

put_alembic_on_path()
offer_reflection_points()
forgive_warnings()
tell_points()

c.CourseDirectory.course_id = "minidist"
c.CourseDirectory.root = str(root)
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "labs"
c.CourseDirectory.submitted_directory = "build/nbgrader/submitted"
c.CourseDirectory.autograded_directory = "build/nbgrader/autograded"
c.CourseDirectory.feedback_directory = "build/nbgrader/feedback"
c.CourseDirectory.solution_directory = "build/nbgrader/solution"
c.CourseDirectory.db_url = f"sqlite:///{made / 'gradebook.db'}"

# What a student wrote or displayed must not run where an instructor or another student opens it.
c.HTMLExporter.update(SAFE)

# Students get notebooks only: the sources beside them in solutions/ hold the answers.
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "feedback", "*.py"]

# nbgrader's own list; reflections come on top of the full marks.
c.GenerateAssignment.preprocessors = [
    "nbgrader.preprocessors.IncludeHeaderFooter",
    "nbgrader.preprocessors.InstantiateTests",
    "nbgrader.preprocessors.LockCells",
    "nbgrader.preprocessors.ClearSolutions",
    "nbgrader.preprocessors.ClearOutput",
    "nbgrader.preprocessors.CheckCellMetadata",
    "nbgrader.preprocessors.ComputeChecksums",
    "nbgrader.preprocessors.SaveCells",
    "autograder.gradebook.preprocessors.KeepFullMarks",
    "nbgrader.preprocessors.ClearHiddenTests",
    "nbgrader.preprocessors.ClearMarkScheme",
    "nbgrader.preprocessors.ComputeChecksums",
    "nbgrader.preprocessors.CheckCellMetadata",
]

# nbgrader's own list, after our intake: a copied or damaged cell must not stop the class.
c.Autograde.sanitize_preprocessors = [
    "autograder.gradebook.preprocessors.ReadWithIntake",
    "nbgrader.preprocessors.ClearOutput",
    "nbgrader.preprocessors.DeduplicateIds",
    "nbgrader.preprocessors.OverwriteKernelspec",
    "nbgrader.preprocessors.OverwriteCells",
    "nbgrader.preprocessors.CheckCellMetadata",
]

# nbgrader's own list, but a submission is run by our grader and judged from outside of it.
c.Autograde.autograde_preprocessors = [
    # In place of nbgrader.preprocessors.Execute.
    "autograder.gradebook.preprocessors.GradeWithReferee",
    "nbgrader.preprocessors.IgnorePattern",
    "nbconvert.preprocessors.ClearMetadataPreprocessor",
    "nbgrader.preprocessors.LimitOutput",
    "nbgrader.preprocessors.SaveAutoGrades",
    "autograder.gradebook.preprocessors.SavePoints",
    "nbgrader.preprocessors.AssignLatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
]

# Due dates and late penalties are in course.toml, [calendar].
c.AssignLatePenalties.plugin_class = "autograder.gradebook.late.CoursePolicy"

c.GenerateFeedback.exporter_class = "autograder.report.feedback.FeedbackExporter"
c.GenerateFeedback.preprocessors = [
    "nbgrader.preprocessors.GetGrades",
    "autograder.gradebook.preprocessors.TellStudents",
]

# A submission out of a folder has neither a time nor a secret, and its feedback is released, too.
c.ExchangeFactory.release_feedback = "autograder.gradebook.exchange.ReleaseFeedback"

# 'nbgrader validate' runs a notebook on the kernel that it names, as a student does.
c.Execute.startup_timeout = 120  # seconds; a loaded machine needs more than 60 to start ranks
c.Execute.timeout = 300  # seconds of a cell: more than any check may take, so none is cut
