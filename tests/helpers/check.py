"""`make check`: style, types and tests of what has changed since the last commit, in a minute.

The tests are those that have changed, those that import a changed module or its package, and those
of a lab whose criteria have changed. The slow ones are left out, and so is what does not fit into
the minute: the last lines name it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from source import imports_of

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0
BIN = Path(sys.executable).parent
# What notebooks are built from.
SOURCES = ("notebooks/", "solutions/", "autograder/authoring/", "autograder/criteria/")


def changed_files() -> list[str]:
    """Paths that differ from the last commit, and new ones; not those that are gone."""
    names: set[str] = set()
    for command in (
        ["diff", "--name-only", "HEAD"],
        ["ls-files", "--others", "--exclude-standard"],
    ):
        said = subprocess.run(
            ["git", *command, "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        names |= set(filter(None, said.stdout.split("\0")))
    return sorted(name for name in names if (ROOT / name).is_file())


def module_of(name: str) -> str | None:
    """lib/minidist/mesh.py -> minidist.mesh; None for what is in no package of ours."""
    parts = Path(name.removeprefix("lib/")).with_suffix("").parts
    if not name.endswith(".py") or parts[0] not in ("minidist", "autograder"):
        return None
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tests_of(changed: Sequence[str]) -> list[str]:
    """Test files that have changed, or that test a changed module."""
    modules = {module for name in changed if (module := module_of(name))}
    labs = {module.split(".")[2] for module in modules if module.startswith("autograder.criteria.")}
    # Most packages hand out what is in their modules; the two packages at the top hold everything.
    modules |= {package for m in modules if "." in (package := m.rpartition(".")[0])}
    found = []
    for file in sorted((ROOT / "tests").glob("*/test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        imported = {name for _, name in imports_of(file)}
        imported |= {name.rpartition(".")[0] for name in imported}
        about = file.stem.removeprefix("test_")
        if name in changed or modules & imported or any(lab.startswith(about) for lab in labs):
            found.append(name)
    return found


def doctests_of(changed: Sequence[str]) -> list[str]:
    """The tests that run the examples of changed modules."""
    modules = sorted({module for name in changed if (module := module_of(name))})
    return [
        f"tests/house/test_doctests.py::test_examples[{module}]"
        for module in modules
        if not module.endswith("__main__")
    ]


def main() -> int:
    began = time.monotonic()
    changed = changed_files()
    python = [name for name in changed if name.endswith(".py")]
    typed = [n for n in python if n.startswith(("lib/", "autograder/", "benchmarks/"))]
    commands = []
    if python:
        commands += [[f"{BIN}/ruff", "format", "--check", *python]]
        commands += [[f"{BIN}/ruff", "check", "--quiet", *python]]
    if typed:
        commands += [[f"{BIN}/pyright", *typed]]
    if any(name.startswith(SOURCES) for name in changed):
        commands += [[sys.executable, "-m", "autograder.authoring", "--check"]]
    for command in commands:
        if subprocess.run(command, cwd=ROOT).returncode:
            return 1
    tests = [*doctests_of(changed), *tests_of(changed)]
    if not tests:
        print("nothing has changed that a test imports; make test runs them all")
        return 0
    left_s = max(1.0, WITHIN_S - (time.monotonic() - began))
    print(f"{left_s:.0f} s for {', '.join(tests)}")
    options = [*sys.argv[1:], "-m", "not slow", "-q", "-x", f"--session-timeout={left_s:.0f}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, capture_output=True, text=True
    )
    ran_out = "session-timeout" in done.stdout
    failed = any(line.startswith(("FAILED ", "ERROR ")) for line in done.stdout.splitlines())
    print(done.stdout[-6000:] if failed else "\n".join(done.stdout.splitlines()[-1:]))
    if ran_out and not failed:
        print("not all of them in a minute; the rest: make test PART=FOLDER")
        return 0
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
