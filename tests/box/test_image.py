"""The image definitions agree with each other and with what the course needs.

`test_image_built.py` builds and uses the Dockerfile; how Apptainer's is tried, says its head.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "autograder" / "box" / "image"
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


LEFT = [
    ".git/config",
    ".venv/bin/python",
    "build/course.key",
    "gradebook.db",
    "work/lab.ipynb",
    "handed_in/ada/lab.ipynb",
    "submitted/ada/lab/lab.ipynb",
]


def test_no_key_gradebook_or_submission_gets_into_an_image(tmp_path):
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {Path(file).parts[0] for file in LEFT} <= set(ignored)
    checkout, image = tmp_path / "checkout", tmp_path / "image"
    for file in [*LEFT, "README.md", "lib/minidist/build/kept.py"]:
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        (checkout / file).write_text("")
    subprocess.run(
        ["sh", "-euc", _section("setup")],
        cwd=checkout,
        check=True,
        env={**os.environ, "APPTAINER_ROOTFS": str(image)},
    )
    course = image / "course"
    files = {str(file.relative_to(course)) for file in course.rglob("*") if file.is_file()}
    assert files == {"README.md", "lib/minidist/build/kept.py"}
    assert (course / "build").is_dir()  # both are bound over
    assert (course / "handed_in").is_dir()


def test_the_definition_has_all_its_sections():
    sections = re.findall(r"^%(\w+)", APPTAINER, re.MULTILINE)
    assert sections == ["setup", "post", "environment", "runscript", "test"]


def test_the_dev_container_has_the_images_packages_beside_the_checkout():
    file = ROOT / ".devcontainer" / "devcontainer.json"
    settings = json.loads(re.sub(r"^\s*//.*$", "", file.read_text(), flags=re.MULTILINE))
    dockerfile = (file.parent / settings["build"]["dockerfile"]).resolve()
    assert dockerfile == IMAGE / "Dockerfile"
    assert (file.parent / settings["build"]["context"]).resolve() == ROOT
    assert settings["workspaceFolder"] == "/course"
    assert "target=/course," in settings["workspaceMount"]
    assert any("target=/course/.venv," in mount for mount in settings["mounts"])
    assert "python3 -m venv /course/.venv" in DOCKERFILE
    assert f"--create-home --uid 1000 {settings['remoteUser']}" in DOCKERFILE


def _section(name: str) -> str:
    found = re.search(rf"^%{name}\n(.*?)^%", APPTAINER, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]
