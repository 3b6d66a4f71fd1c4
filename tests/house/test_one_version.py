"""The version stands in three files, and they agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import minidist

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert project["version"] == minidist.__version__ == cited[1]
