"""What all tests share: places of their own, what runs beside what, and no skip unseen in CI."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from minidist.processes import fork_server

ALLOWED_SKIPS = Path(__file__).parent / "allowed_skips.txt"
NO_GPU = "needs a CUDA device"

# Every process that a test starts inherits this one.
MARK = f"TESTS_OF_PROCESS={os.getpid()}"
os.environ.update([MARK.split("=")])
# Tests run side by side, and each looks at what its own have left: files and sockets of one pytest
# process are in a folder of its own. The path is short, because that of a socket has to be.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
PLACE = tempfile.mkdtemp(prefix="t-", dir="/tmp")
os.environ.update(TMPDIR=PLACE, XDG_RUNTIME_DIR=PLACE)
tempfile.tempdir = PLACE
# What tests import is there already in the ranks that they start: half of what a rank costs else.
fork_server.use(
    *("pytest", "hypothesis.extra.numpy", "numpy.testing", "torch.utils.flop_counter"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.distributed.tensor.parallel", "minidist.checkpoint", "minidist.emulate"),
    *("minidist.parallel.hybrid", "minidist.profile", "minidist.train"),
)
# Everywhere the same examples as in CI; `make flake` draws others.
hypothesis.settings.load_profile("ci")
HELPERS = ("minidist.processes.fork_server", "multiprocessing")  # end with pytest

_skipped: dict[str, str] = {}  # test -> reason
_terminal: pytest.TerminalReporter | None = None


@pytest.fixture(scope="module", autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """Fails a module that leaves processes behind: they would slow down all that come after."""
    yield
    ends_at = time.monotonic() + 60
    while left := _started_by_tests():
        if time.monotonic() > ends_at:
            while found := _started_by_tests():  # until none is left that could start another
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            pytest.fail("still running:\n" + "\n".join(f"{k}: {v}" for k, v in left.items()))
        time.sleep(0.1)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rank has failed, `launch.run` gives the others more time to fail by themselves."""
    monkeypatch.setattr("minidist.launch._GRACE_S", 30.0)


@pytest.fixture
def browser() -> Iterator[Any]:
    """Chromium, without anything that an earlier test has left in it."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


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
            helps |= words.startswith("catatonit -P")  # which rootless podman keeps
        except (psutil.Error, OSError):
            continue
        if MARK.encode() in marked and not helps:
            found[process.pid] = words[:150]
    return found


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keeps tests in one process that share a fixture of a module, besides `nothing_runs_on`."""
    fixtures = getattr(item, "_fixtureinfo", None)
    scopes = [each[-1].scope for each in fixtures.name2fixturedefs.values()] if fixtures else []
    if scopes.count("module") > 1:
        item.add_marker(pytest.mark.xdist_group(item.location[0]))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _begin_with_what_takes_long(items)
    _leave_numbers_of_ranks_to_the_rest(items)
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def _begin_with_what_takes_long(items: list[pytest.Item]) -> None:
    """Nobody waits for it at the end: files with a limit of their own, and what is in one process.

    The latter mostly waits for kernels and ranks. It is spread over two thirds of the run, so that
    other tests compute meanwhile.
    """
    long = {item.path for item in items if item.get_closest_marker("timeout")}
    items.sort(key=lambda item: item.path not in long)
    groups: dict[str, list[pytest.Item]] = {}
    alone: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        (groups.setdefault(mark.args[0], []) if mark else alone).append(item)
    between = len(alone) * 2 // 3 // max(1, len(groups))
    items[:] = [
        item
        for number, group in enumerate(groups.values())
        for item in (*group, *alone[number * between : (number + 1) * between])
    ]
    items += alone[len(groups) * between :]


def _leave_numbers_of_ranks_to_the_rest(items: list[pytest.Item]) -> None:
    """Of a test for several numbers of ranks, `make test` runs 1 and 3, `make nightly` the others.

    3 ranks, which do not divide, find most of what 2 and 4 find. A test for 4 and not 3 is slow.
    """
    sizes: dict[str, set[object]] = {}
    ranks: list[tuple[pytest.Item, str, object]] = []
    for item in items:
        given = None if item.get_closest_marker("nightly") else getattr(item, "callspec", None)
        for name in ("world_size", "num_ranks", "n"):
            if given and name in given.params:
                test = item.nodeid.partition("[")[0]
                sizes.setdefault(test, set()).add(given.params[name])
                ranks.append((item, test, given.params[name]))
    for item, test, size in ranks:
        if size in (2, 4) and 3 in sizes[test]:
            item.add_marker(pytest.mark.nightly)
        elif size == 4:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # else each full collection looks at all of torch and of the tests again
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # a second one would wait, busily, for a core of other tests
    # A pytest-xdist that does not know groups would make a module's fixture in every process.
    if hasattr(session.config, "workerinput") and session.config.getoption("loadgroup"):
        groups = [item for item in session.items if item.get_closest_marker("xdist_group")]
        assert all("@" in item.nodeid for item in groups), "this pytest breaks --dist loadgroup"


@pytest.hookimpl(trylast=True)  # after the reporter is there
def pytest_configure(config: pytest.Config) -> None:
    global _terminal
    _terminal = config.pluginmanager.get_plugin("terminalreporter")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)
    if report.failed and _terminal and not hasattr(_terminal.config, "workerinput"):
        # At once: a run that is cut off at its time limit prints no summary.
        why = report.longreprtext.strip().splitlines()
        said = [line for line in why if line.startswith("E ")] or why[-1:]
        _terminal.write_line(f"\n{report.when} failed: {report.nodeid}", red=True)
        for line in said[:15]:
            _terminal.write_line(line[:300])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    test = report.nodeid.partition("@")[0]  # without the group of pytest-xdist
    _skipped[test] = reason.removeprefix("Skipped: ")


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
    shutil.rmtree(PLACE, ignore_errors=True)
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
