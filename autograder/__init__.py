"""Grades distributed-training labs: the only code of the course that is trusted with a grade."""

from autograder.criteria.not_started import is_not_started
from autograder.inside.probe import check

__all__ = ["check", "is_not_started"]
