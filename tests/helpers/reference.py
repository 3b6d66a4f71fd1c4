"""Rows of benchmarks/reference/*.csv, numbers as numbers."""

from __future__ import annotations

import csv
from pathlib import Path

REFERENCE = Path(__file__).resolve().parents[2] / "benchmarks" / "reference"


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a table, without its comments."""
    lines = (REFERENCE / f"{name}.csv").read_text("utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def ints(row: dict[str, str], *names: str) -> list[int]:
    """Some columns of a row as integers."""
    return [int(row[name]) for name in names]
