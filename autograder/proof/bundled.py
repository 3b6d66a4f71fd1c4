"""Recognises the course's own submissions, which need no sandbox."""

from __future__ import annotations

from pathlib import Path


def is_bundled(path: Path, lab: str) -> bool:
    """Whether the file equals, byte for byte, a submission of the bundled class."""
    from autograder.authoring.notebooks import to_bytes
    from autograder.proof.zoo import load_zoo

    content = path.read_bytes()
    return any(to_bytes(entry.notebook) == content for entry in load_zoo(lab))
