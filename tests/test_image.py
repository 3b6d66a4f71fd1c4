"""The image definitions agree with each other and with what the course needs.

Whether they build can only be tried where there is an engine and a network; how, says their head.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMAGE = ROOT / "autograder" / "image"
DOCKERFILE = (IMAGE / "Dockerfile").read_text()
APPTAINER = (IMAGE / "minidist.def").read_text()


def _packages(text: str) -> list[str]:
    found = re.search(r"--no-install-recommends \\\n\s+([a-z0-9 .+-]+)", text)
    assert found is not None
    return found[1].split()


def test_both_install_the_same():
    assert _packages(DOCKERFILE) == _packages(APPTAINER)
    assert {"bubblewrap", "python3", "python3-venv"} <= set(_packages(DOCKERFILE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(each for each in project["dependencies"] if each.startswith("torch"))
    assert f'"{torch}"' in DOCKERFILE
    assert f'"{torch}"' in APPTAINER
    assert "debian:bookworm-slim" in DOCKERFILE
    assert "From: debian:bookworm-slim" in APPTAINER


def test_no_key_and_no_gradebook_gets_into_an_image():
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name in (".git", ".venv", "build", "work", "gradebook.db"):
        assert name in ignored
        assert f"--exclude=./{name}" in APPTAINER
    sections = re.findall(r"^%(\w+)", APPTAINER, re.MULTILINE)
    assert sections == ["setup", "post", "environment", "runscript", "test"]
