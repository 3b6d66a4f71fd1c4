"""Runs the parts one after the other, each in a process of its own, and keeps what they measure.

This process imports no torch and never touches a GPU: a driver that hangs, a kernel that breaks its
context or a part that needs more memory than there is cannot take the others with it. A part writes
each row to a file as it gets it; whatever ends the part, those rows count.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.rows import HARMLESS, ROOT, Results, Row, check_row, make_row, table

RESULTS = ROOT / "benchmarks" / "results"
BUDGET_S = 560.0  # of 10 minutes; the rest is for the start, and for parts that have to be ended
DESCRIBE_S = 120.0  # importing torch from a cold disk takes long
GRACE_S = 5.0  # from asking a part to end until it is killed
EXIT_FAILED, EXIT_USAGE, EXIT_NO_DEVICE = 1, 2, 3


@dataclass(frozen=True)
class Part:
    """A part: how long it may take at most, in seconds."""

    limit_s: float
    about: str


# In the order in which they run: where the time is short, it is the last ones that miss it.
PARTS = {
    "calibrate": Part(60, "matrix products, copies, launches: the ceilings"),
    "amp": Part(150, "mixed precision, loss scaling, MFU, activation checkpointing"),
    "training": Part(130, "training loop, DDP and ZeRO-3 beside torch's"),
    "collectives": Part(95, "collectives on CUDA tensors, NCCL and staged"),
    "profiling": Part(70, "traces, overlap, memory and the monitor"),
    "labs": Part(360, "the labs' solutions, graded where they see a GPU"),
    "own_gpus": Part(150, "all solutions with a GPU for each rank"),
}


def main(description: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """The command line; see `__main__` for what it returns."""
    options = _parse(description, arguments)
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:12} at most {part.limit_s:3.0f} s   {part.about}")
        return 0
    try:
        machine = describe(options.rehearse)
    except RuntimeError as error:
        print(f"benchmarks/gpu: {error}", file=sys.stderr)
        return EXIT_FAILED
    if not machine["num_devices"] and not options.rehearse:
        print(
            "benchmarks/gpu: there is no CUDA device here, so there is nothing to measure "
            f"(torch {machine['torch']}, {machine['why_none']}). Nothing was written. "
            "--rehearse --out FILE tries all of it, tiny, on the CPU.",
            file=sys.stderr,
        )
        return EXIT_NO_DEVICE
    head = {
        "date": _now(),
        "rehearsal": options.rehearse,
        "commit": options.commit or commit() or "unknown",
        "machine": machine,
    }
    try:
        results = Results.open(options.out or _default_path(machine), head)
    except ValueError as error:
        print(f"benchmarks/gpu: {error}", file=sys.stderr)
        return EXIT_USAGE
    ended = run_parts(
        results,
        options.only or [name for name in PARTS if not results.is_done(name)],
        budget_s=options.budget_s,
        rehearse=options.rehearse,
    )
    print(f"\n{table(results.rows)}\n\n{results.path}")
    if options.rehearse:
        print("This was a rehearsal on the CPU: no figure in it means anything.")
    for problem in results.problems():
        print(f"not measured: {problem.splitlines()[0]}")
    return EXIT_FAILED if results.problems() or not ended else 0


def _parse(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description=description)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: a new file in benchmarks/results; one that is there is gone on with: parts "
        "that it has stay, unless --only names them",
    )
    parser.add_argument(
        "--only", nargs="+", choices=tuple(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help=f"for all parts together (default: {BUDGET_S:g})",
    )
    parser.add_argument("--commit", help="what this is a copy of; by default, what git says")
    parser.add_argument("--list", action="store_true", help="say what the parts are")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny, on the CPU: whether it runs, not how fast"
    )
    options = parser.parse_args(arguments)
    if options.budget_s <= 0:
        parser.error(f"--budget-s must be above 0, got {options.budget_s:g}")
    if options.rehearse and (options.out is None or RESULTS in options.out.resolve().parents):
        parser.error("--rehearse measures nothing: it wants --out FILE outside benchmarks/results")
    return options


def run_parts(
    results: Results,
    names: Sequence[str],
    *,
    budget_s: float = BUDGET_S,
    rehearse: bool = False,
    limits_s: Mapping[str, float] | None = None,
) -> bool:
    """Run parts, and save after each.

    Args:
        names: of `PARTS`, in this order.
        budget_s: for all of them; what is not begun by then is a part that timed out.
        limits_s: part -> seconds, in place of those of `PARTS`.

    Returns:
        False if it was interrupted; what was measured by then is saved.
    """
    limits = {name: part.limit_s for name, part in PARTS.items()} | dict(limits_s or {})
    end_s = time.monotonic() + budget_s
    with _interruptible():
        for name in names:
            limit_s = min(limits[name], end_s - time.monotonic())
            began_s, date, interrupted = time.monotonic(), _now(), False
            rows, status, reason = [], "timeout", f"the {budget_s:g} s were over before it began"
            try:
                print(f"{name} …", end="", flush=True)
                if limit_s > 0:
                    rows, status, reason, interrupted = run_part(name, limit_s, rehearse=rehearse)
            except KeyboardInterrupt:  # before it had begun
                status, reason, interrupted = "failed", "interrupted", True
            if status != "ok" and all(row["status"] in HARMLESS for row in rows):
                # It came to nothing before it began to measure; that is a row as well.
                rows = [*rows, make_row(name, "the whole part", status=status, reason=reason)]
            seconds = time.monotonic() - began_s
            results.replace(name, rows, status=status, reason=reason, seconds=seconds, date=date)
            print(f" {status} after {seconds:.0f} s, {len(rows)} rows", flush=True)
            if interrupted:
                return False
    return True


def run_part(
    name: str, limit_s: float, *, rehearse: bool = False, worker: str = "gpu.worker"
) -> tuple[list[Row], str, str | None, bool]:
    """Run one part in a process of its own, with all that it starts, and end it at its deadline.

    Args:
        worker: the module that runs it.

    Returns:
        Its rows; "ok", "failed" or "timeout"; why, unless ok; whether somebody interrupted us.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        rows_path, log_path = Path(folder) / "rows.jsonl", Path(folder) / "log"
        command = [sys.executable, "-m", worker, name, str(rows_path), f"{limit_s:.1f}"]
        interrupted, code = False, None
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, *(["--rehearse"] if rehearse else [])],
                cwd=folder,
                env=environment(folder, rehearse),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                pass
            except KeyboardInterrupt:
                interrupted = True
            finally:
                _end(process)
        rows, unfinished = read_rows(rows_path)
        tail = _tail(log_path)
    if code == 0:
        return rows, "ok", None, False
    if interrupted:
        status, reason = "failed", "interrupted"
    elif code is None:
        status, reason = "timeout", f"it was ended after {limit_s:.0f} s"
    else:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        status, reason = "failed", f"its process ended with {how}\n{tail}".strip()
    # What it was at is a row, too: a reader looks for it among the rows.
    rows += [make_row(name, each, status=status, reason=reason) for each in unfinished]
    return rows, status, reason, interrupted


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Rows of a part, and the measurements that it had begun and not ended."""
    rows: list[Row] = []
    begun: list[str] = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
            if "begin" in event:
                begun.append(event["begin"])
            elif "end" in event:
                begun.remove(event["end"])
            else:
                check_row(event)
                rows.append(event)
        except ValueError:  # its process was killed while it wrote this line
            continue
    return rows, begun


def environment(folder: str, rehearse: bool = False) -> dict[str, str]:
    """Of a part's process: it finds the course without an installation, and keeps to its folder."""
    env = dict(os.environ)
    own = [str(ROOT / "benchmarks"), str(ROOT / "lib"), str(ROOT)]
    env["PYTHONPATH"] = os.pathsep.join([*own, *filter(None, [env.get("PYTHONPATH")])])
    # Asking whether there is a GPU must not start CUDA: ranks are forked from a process that asks.
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # A compiled model is compiled here and now: nothing of an earlier run, nothing left behind.
    env["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    env["TRITON_CACHE_DIR"] = f"{folder}/triton"
    env["PYTHONUNBUFFERED"] = "1"
    if rehearse:
        env["OMP_NUM_THREADS"] = "1"  # it is no measurement: others may want the processors
    return env


def describe(rehearse: bool = False) -> dict[str, Any]:
    """What this machine is, as JSON; asked in a process of its own.

    Raises:
        RuntimeError: torch is missing or too old, or the driver does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "gpu.worker", "describe"]
        try:
            done = subprocess.run(
                [*command, *(["--rehearse"] if rehearse else [])],
                cwd=folder,
                env=environment(folder, rehearse),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=DESCRIBE_S,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"torch did not say within {DESCRIBE_S:g} s what is here") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(f"cannot look at this machine: {last}")
    return json.loads(lines[-1])


def commit() -> str | None:
    """The commit that is checked out, with "-dirty" if files differ from it; None if git is not
    here or does not know."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _default_path(machine: Mapping[str, Any]) -> Path:
    device = re.sub(r"[^a-z0-9]+", "-", machine["devices"][0].lower()).strip("-")
    count = f"{machine['num_devices']}x-" if machine["num_devices"] > 1 else ""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H%M%SZ")
    return RESULTS / f"gpu_{stamp}_{count}{device}.json"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it has started, which may outlive its first process."""
    with contextlib.suppress(ProcessLookupError):  # the group is empty
        if process.poll() is None:
            # Asked first: the grader ends the ranks in its sandboxes, in groups of their own.
            os.killpg(process.pid, signal.SIGTERM)
            ends_s = time.monotonic() + GRACE_S
            while time.monotonic() < ends_s:
                process.poll()  # a zombie of ours would count as one of the group
                os.killpg(process.pid, 0)
                time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM, which `timeout` and job schedulers send, is Ctrl-C here."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, which signals do not reach
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tail(path: Path, lines: int = 15) -> str:
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    return "\n".join(text.strip().splitlines()[-lines:])
