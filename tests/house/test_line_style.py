"""The formatter's style is ours: it is switched off only for tables that are read as a whole."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "# fmt: " + "skip"


def test_the_formatter_is_switched_off_only_for_the_labs_tables():
    folders = ("autograder", "benchmarks", "book", "lib", "notebooks", "solutions", "tests")
    marked = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for _ in range(path.read_text("utf-8").count(MARK))
    ]
    tables = [ROOT / "autograder" / "criteria"] * len(marked)
    assert [path.parents[1] for path in marked] == tables
    assert len(marked) <= 20
