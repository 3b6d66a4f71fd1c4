"""Which version of the grader a verdict is from, and the key of one grading.

What a lab's verdicts depend on is read off the folders: those of the grader that see a submission,
the lab's own criteria with what they share, and every part of minidist that these or the master
notebook import. An edited criterion, referee or kernel grades again; an edited report does not, and
neither does what belongs to another lab.
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

# What a submission goes through, as files and folders of this package.
_SEEN_BY_SUBMISSIONS = (
    "__init__.py",
    "box",
    "course",
    "criteria/__init__.py",
    "criteria/common",
    "criteria/criterion.py",
    "criteria/limits.py",
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
    """A short hash of all our code that can change a verdict of a lab, and of torch's version.

    Computed once per process, like the code that it stands for.

    Args:
        lab: name of the lab.
        also: further bytes that matter, such as the master notebook's.
        code: of the master notebook: what it imports of minidist counts, too.
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
    """Every file of ours that a lab's verdicts depend on: name below our packages -> content."""
    ours, lib = Path(__file__).parents[1], Path(minidist.__file__).parent

    def places(source: bytes) -> Iterator[Path]:
        for imported in _imports(source):
            match imported.split("."):
                case ["minidist", part, *_]:
                    yield from (lib / part, lib / f"{part}.py")
                case ["autograder", "criteria", folder, *_]:
                    yield ours / "criteria" / folder

    todo = [ours / name for name in (*_SEEN_BY_SUBMISSIONS, f"criteria/{lab}")]
    todo += [lib / "__init__.py", *places(code)]
    found: dict[str, bytes] = {}
    seen: set[Path] = set()
    while todo:
        place = todo.pop()
        if place in seen:
            continue
        seen.add(place)
        for file in [place] if place.is_file() else place.rglob("*.py"):
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
