"""The version of the grader that gave a verdict, and the key of one grading.

A lab's verdicts depend on these files: the grader's folders that handle submissions, the criteria
of the lab with the modules that criteria share, and every part of minidist that any of these files
or the master notebook imports. If a criterion, the referee or the kernel is edited, submissions are
graded again. An edited report, or an edited criterion of a different lab, changes nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import minidist

# The parts of this package that handle submissions: folders, and files at the top of a folder.
_SEEN_BY_SUBMISSIONS = (
    "__init__.py",
    "box",
    "course",
    "criteria/*.py",
    "criteria/common",
    "inside",
    "referee",
    "submission",
)
_IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n#]*)|import[ \t]+([^\n#]*))",
    re.MULTILINE,
)


def submission_key(sha256: str, lab: str, world_size: int, grader_version: str) -> str:
    """Names one grading: the same bytes, lab, world size and grader give the same key (hex)."""
    parts = json.dumps([sha256, lab, world_size, grader_version])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


@functools.cache
def grader_version(lab: str, *also: bytes, code: bytes = b"") -> str:
    """A short hash of all our code that can change a lab's verdicts.

    The versions of Python and torch are part of the hash. The result is cached, because a process
    also loads the code only once.

    Args:
        lab: name of the lab.
        also: further bytes that matter, such as those of the master notebook.
        code: code of the master notebook; the parts of minidist that it imports count too.
    """
    digest = hashlib.sha256()
    for name, content in graded_by(lab, code).items():
        _add(digest, name.encode())
        _add(digest, content)
    _add(digest, platform.python_version().encode())
    _add(digest, metadata.version("torch").encode())
    for more in also:
        _add(digest, more)
    return digest.hexdigest()[:12]


def graded_by(lab: str, code: bytes = b"") -> dict[str, bytes]:
    """Every file of autograder and minidist that a lab's verdicts depend on: name -> content."""
    ours, lib = Path(__file__).parents[1], Path(minidist.__file__).parent

    def places(source: bytes) -> Iterator[Path]:
        for imported in _imports(source):
            match imported.split("."):
                case ["minidist", part, *_]:
                    yield from (lib / part, lib / f"{part}.py")
                case ["autograder", "criteria", folder, *_]:
                    yield ours / "criteria" / folder

    names = (*_SEEN_BY_SUBMISSIONS, f"criteria/{lab}")
    todo = [place for name in names for place in ours.glob(name)]
    todo += [lib / "__init__.py", *places(code)]
    found: dict[str, bytes] = {}
    seen: set[Path] = set()
    while todo:
        place = todo.pop()
        if place in seen:
            continue
        seen.add(place)
        inside = [f for f in place.rglob("*") if f.suffix in (".py", ".pyi")]
        for file in [place] if place.is_file() else inside:
            root = ours if file.is_relative_to(ours) else lib
            name = file.relative_to(root.parent).as_posix()
            if name not in found:
                found[name] = file.read_bytes()
                todo += places(found[name])
    return dict(sorted(found.items()))


def _imports(source: bytes) -> Iterator[str]:
    """Dotted names that Python source imports; `from a import b` counts as a.b."""
    for module, names, plain in _IMPORT.findall(source):
        listed = re.sub(rb"#[^\n]*|[()]", b"", names or plain).decode()
        for name in listed.split(","):
            if first := name.split():
                yield f"{module.decode()}.{first[0]}" if module else first[0]


def _add(digest: Any, data: bytes) -> None:
    digest.update(len(data).to_bytes(8, "big") + data)
