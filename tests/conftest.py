"""What all tests share: tests that need a GPU, and no test that is skipped in CI unseen."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import psutil
import pytest

ALLOWED_SKIPS = Path(__file__).parent / "allowed_skips.txt"
NO_GPU = "needs a CUDA device"

# Every process that a test starts inherits this one.
MARK = f"TESTS_OF_PROCESS={os.getpid()}"
os.environ.update([MARK.split("=")])
HELPERS = ("minidist.fork_server", "multiprocessing")  # end with pytest

_skipped: dict[str, str] = {}  # test -> reason


@pytest.fixture(scope="module", autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """Fails a module that leaves processes behind: they would slow down all that come after."""
    yield
    ends_at = time.monotonic() + 15
    while left := _started_by_tests():
        if time.monotonic() > ends_at:
            while found := _started_by_tests():  # until none is left that could start another
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            pytest.fail("still running:\n" + "\n".join(f"{k}: {v}" for k, v in left.items()))
        time.sleep(0.1)


def _started_by_tests() -> dict[int, str]:
    """Processes of the tests, whoever is their parent by now, and their command lines."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            marked = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            words = " ".join(process.cmdline())
            helps = process.ppid() == os.getpid() and any(name in words for name in HELPERS)
        except (psutil.Error, OSError):
            continue
        if MARK.encode() in marked and not helps:
            found[process.pid] = words[:150]
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    _skipped[report.nodeid] = reason.removeprefix("Skipped: ")


def _forbidden_skips() -> list[str]:
    """Skipped tests that no line of allowed_skips.txt allows; none outside CI."""
    if os.environ.get("CI") != "true":
        return []
    rules = []
    for line in ALLOWED_SKIPS.read_text("utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            test, _, reason = (part.strip() for part in line.partition("|"))
            rules.append((test, reason))
    return [
        f"{test}: {reason}"
        for test, reason in sorted(_skipped.items())
        if not any(fnmatchcase(test, rule) and fnmatchcase(reason, why) for rule, why in rules)
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _forbidden_skips() and exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if forbidden := _forbidden_skips():
        terminalreporter.section("skipped in CI, but not in tests/allowed_skips.txt", red=True)
        for line in forbidden:
            terminalreporter.line(line)
