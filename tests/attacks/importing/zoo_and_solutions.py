"""Imports the grader's trusted modules, and opens solutions and tests where they would lie.

passes: nothing
"""

# %% put="after imports"
import importlib
from pathlib import Path

import autograder

trusted = "referee.referee proof.zoo records.journal submission.attempt box.sandbox course report"
for name in trusted.split():
    with contextlib.suppress(ImportError):
        importlib.import_module(f"autograder.{name}")
        print("LEAKED:", name)
root = Path(autograder.__file__).parent.parent
for place in ("solutions", "tests", "tests/zoo/lab1_ddp", "labs", "build", ".git", "CHANGELOG.md"):
    with contextlib.suppress(OSError):
        (root / place).stat()
        print("LEAKED:", place)
