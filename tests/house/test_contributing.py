"""Each file, class and test that CONTRIBUTING.md names is there; the kernel names its files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("autograder", "book", "labs", "lib", "notebooks", "solutions", "tests")
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


def test_the_kernels_readme_names_each_of_its_files():
    kernel = ROOT / "lib" / "minidist" / "kernel"
    said = (kernel / "README.md").read_text("utf-8")
    files = [path for path in kernel.rglob("*.py") if not path.name.startswith("__")]
    names = [path.relative_to(kernel).as_posix() for path in files]
    assert names
    assert [name for name in sorted(names) if f"`{name}`" not in said] == []


def test_each_class_that_it_names_is_there():
    names = {word for word in _named() if re.fullmatch(r"([A-Z][a-z]+){2,}", word)}
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    there = set(re.findall(r"^class (\w+)", "".join(p.read_text("utf-8") for p in files), re.M))
    assert names
    assert names - there == set()
