"""One grading that was finished, as the journal tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Grading:
    """One grading that was finished.

    Attributes:
        key: what its record is filed under.
        record: as `autograder grade --json` writes it.
        seed_id: what its draws were made from; empty where nothing was run.
        grader_version: of the grader that judged it; empty where nothing was run.
    """

    key: str
    record: Record
    seed_id: str = ""
    grader_version: str = ""

    @property
    def student(self) -> str:
        """Who handed it in."""
        return self.record["student"]

    @property
    def lab(self) -> str:
        """Name of the lab."""
        return self.record["lab"]
