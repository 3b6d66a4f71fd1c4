"""The version stands in three files, and they agree; so do the versions of what is installed."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pinned import pin

import minidist

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert project["version"] == minidist.__version__ == cited[1]


def test_every_dependency_has_a_tested_version_that_pyproject_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["dev"]])
    lines = (ROOT / "versions.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    tested = {canonicalize_name(each.name): str(each.specifier)[2:] for each in pins}
    assert len(tested) > 100
    for each in wanted:
        if each.name != "torch":  # of which builds differ
            assert each.specifier.contains(tested[canonicalize_name(each.name)]), each


def test_the_oldest_python_can_have_what_is_pinned_for_it():
    lines = (ROOT / "versions.txt").read_text().splitlines()
    for each in distributions():
        if f"{each.name}=={each.version}" in {line.partition(";")[0] for line in lines}:
            assert pin(each) in lines, "make upgrade writes it"


def test_no_pattern_repeats_a_group_possessively():
    """Python 3.11.0 to 3.11.4 match that wrongly (gh-106052): right notebooks were INVALID."""
    for path in [*(ROOT / "autograder").rglob("*.py"), *(ROOT / "lib").rglob("*.py")]:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            found = re.search(r"r[bf]?['\"].*(\)[*+?}]\+|\(\?>)", line)
            assert found is None, f"{path}:{number}: {line.strip()}"
