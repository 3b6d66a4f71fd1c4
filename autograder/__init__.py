"""Grades distributed-training labs: the only code of the course that is trusted with a grade."""

import sys

# Reading a notebook imports jsonschema, which imports these two to check kinds of text that no
# notebook has. One of them takes more than a second, in every process. jsonschema does without a
# module that cannot be imported, and None makes it so.
for _name in ("rfc3987_syntax", "isoduration"):
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]

from autograder.inside.probe import check  # noqa: E402

__all__ = ["check"]
