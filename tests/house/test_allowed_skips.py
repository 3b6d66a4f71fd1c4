"""In CI a test is skipped in the open or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]

TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""

GPU = """
@pytest.mark.gpu
def test_on_a_gpu():
    import torch
    assert torch.cuda.is_available()
"""

SKIP = """
@pytest.mark.skip(reason="too lazy")
def test_skipped():
    pass
"""

MODULE_SKIP = 'import pytest\npytest.importorskip("no_such_module")\n'


def run(folder: Path, *, ci: bool) -> subprocess.CompletedProcess[str]:
    for name in ("conftest.py", "allowed_skips.txt"):
        shutil.copy(HERE / name, folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")
    env = {key: value for key, value in os.environ.items() if key != "CI"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=folder,
        env=env | ({"CI": "true"} if ci else {}),
        capture_output=True,
        text=True,
    )


def test_each_file_whose_tests_may_be_skipped_is_there():
    lines = (HERE / "allowed_skips.txt").read_text("utf-8").splitlines()
    files = {line.split("::")[0] for line in lines if line.startswith("tests/")}
    assert files
    assert [name for name in sorted(files) if not any(HERE.parent.glob(name))] == []


@pytest.mark.parametrize(
    ("files", "ci", "code"),
    [
        ({"test_a.py": TESTS + GPU}, True, 0),
        ({"test_a.py": TESTS + SKIP}, False, 0),
        ({"test_a.py": TESTS + SKIP}, True, 1),
        ({"test_a.py": TESTS, "test_b.py": MODULE_SKIP}, True, 1),
    ],
)
def test_unlisted_skips_fail_in_ci_only(tmp_path, files, ci, code):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = run(tmp_path, ci=ci)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("not in tests/allowed_skips.txt" in done.stdout) == bool(code)
    assert "passed" in done.stdout.splitlines()[-1], "pytest's closing line must stay the last one"
