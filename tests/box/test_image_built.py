"""The image is built and used as its users do: as a dev container, and by `docker run`.

No registry is asked: mmdebstrap makes the base out of Debian's packages.
"""

from __future__ import annotations

import ast
import json
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from minidist.processes.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "autograder" / "box" / "image" / "Dockerfile"
DEV_CONTAINER = ROOT / ".devcontainer" / "devcontainer.json"
CERTIFICATES = "/run/certificates.crt"
# Podman asks for more than some machines let it give.
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
LIMITS = [f"--ulimit=nofile={FILES}:{FILES}", "--ulimit=nproc=4096:4096"]
MISSING = [name for name in ("podman", "mmdebstrap", "catatonit") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed"),
]


def run(*command: object) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(words)}\n{(done.stdout + done.stderr)[-3000:]}"
    return done.stdout


def pip_options() -> list[str]:
    """What this machine's pip knows of certificates and places of packages, for `podman build`."""
    options = []
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        name, value = name.rpartition(".")[2], ast.literal_eval(value)
        if name == "cert":
            options.append(f"--volume={value}:{CERTIFICATES}:ro")
            value = CERTIFICATES
        else:
            indexes = [Path(found).parent for found in re.findall(r"file://(/\S+)", value)]
            folders = [Path(word) for word in value.split() if word.startswith("/")]
            options += [f"--volume={p}:{p}:ro" for p in (*indexes, *folders) if p.exists()]
        options.append(f"--env=PIP_{name.replace('-', '_').upper()}={value}")
    return list(dict.fromkeys(options))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git has, which belong to the image's user."""
    folder = tmp_path_factory.mktemp("image") / "course"
    for name in run("git", "-C", ROOT, "ls-files", "-z").split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, 1000, 1000)
    return folder


@pytest.fixture(scope="module")
def image(checkout: Path) -> Iterator[str]:
    base, name = "localhost/minidist-test-base", "localhost/minidist-test"
    archive = checkout.with_name("base.tar")
    suite = re.search(r"debian:(\w+)-slim", DOCKERFILE.read_text())
    assert suite is not None
    run("mmdebstrap", "--variant=minbase", suite[1], archive)
    run("podman", "import", archive, base)
    try:
        run(
            *("podman", "build", "--network=host", f"--build-arg=BASE={base}", f"--tag={name}"),
            *pip_options(),
            *("--file", checkout / DOCKERFILE.relative_to(ROOT), checkout),
        )
        yield name
    finally:
        subprocess.run(["podman", "rmi", "--force", name, base], capture_output=True)


def test_the_dev_container_has_a_desk_and_runs_cells_on_every_rank(image, checkout):
    settings = json.loads(re.sub(r"^\s*//.*$", "", DEV_CONTAINER.read_text(), flags=re.MULTILINE))
    volume = "minidist-test-venv"
    begin = [
        *("podman", "run", "--rm", "--network=host", *LIMITS, *settings["runArgs"]),
        *("--user", settings["remoteUser"], "--workdir", settings["workspaceFolder"]),
        f"--volume={checkout}:{settings['workspaceFolder']}",
        f"--volume={volume}:{settings['workspaceFolder']}/.venv",
        image,
    ]
    try:
        run(*begin, *settings["postCreateCommand"].split())
        assert (checkout / "work" / "labs" / "lab1_ddp" / "lab1_ddp.ipynb").is_file()
        lecture = "notebooks/00_start_here.ipynb"
        run(
            *begin,
            "python",
            "-m",
            "papermill",
            "--cwd",
            "work",
            f"work/{lecture}",
            "work/ran.ipynb",
        )
        assert "[rank 1" in (checkout / "work" / "ran.ipynb").read_text("utf-8")
    finally:
        subprocess.run(["podman", "volume", "rm", "--force", volume], capture_output=True)


def test_the_line_in_the_dockerfile_starts_jupyterlab(image):
    line = re.search(r"docker (run .*) minidist +# JupyterLab", DOCKERFILE.read_text())
    assert line is not None
    port = free_port()
    words = line[1].replace("127.0.0.1:8888:", f"127.0.0.1:{port}:").split()
    server = subprocess.Popen(["podman", *words, *LIMITS, "--name", "minidist-test", image])
    try:
        ends_at = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api", timeout=10) as answer:
                    assert "version" in json.load(answer)
                return
            except OSError:
                assert time.monotonic() < ends_at, "JupyterLab does not answer"
                time.sleep(0.5)
    finally:
        subprocess.run(["podman", "stop", "--time", "5", "minidist-test"], capture_output=True)
        server.wait(60)
