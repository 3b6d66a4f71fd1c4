"""Every file, folder and test that CONTRIBUTING.md names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("autograder", "labs", "lib", "notebooks", "solutions", "tests")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.]+(/[\w.]+)*(\.(py|pyi|md|toml|txt|csv|cff)|/)")
TEST = re.compile(r"\btest_\w+(?![\w.])")
STANDS_FOR = re.compile(r"(^|/)(X|NN_topic|NAME|LAB|GROUP|labN_topic)([/.]|$)")  # any such name


def _named() -> list[str]:
    """What links lead to, and each word that is written as code, outside of examples."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^):#]+)\)", prose)
    return [*links, *(word for code in CODE.findall(prose) for word in code.split())]


def test_each_file_that_it_names_is_there():
    paths = [name for name in _named() if PATH.fullmatch(name) and not STANDS_FOR.search(name)]
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    there = "".join(f"/{path.relative_to(ROOT)}\n" for path in (*found, *ROOT.iterdir()))
    assert len(paths) > 30
    assert [name for name in paths if f"/{name.rstrip('/')}\n" not in there] == []


def test_each_test_that_it_names_is_there():
    names = {name for word in _named() for name in TEST.findall(word)}
    source = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert names
    assert names - set(re.findall(r"^def (test_\w+)", source, re.MULTILINE)) == set()
