"""Two implementations timed side by side in one world of ranks, and the table that comes of it.

Phases of a measurement: calibrate (how many calls make a sample that is long enough to time), warm
up, measure in rounds, take the slowest rank of every sample.

Absolute times drift by tens of percent from minute to minute on a shared machine. So nothing here
compares times of different runs: in every round each implementation runs once, in changing order,
and the ratio is taken **within** the round. The result is the median of those ratios; low and high
are their quartiles.

Example, the whole of a benchmark file::

    from harness import main_arguments, paired, row, run_bench, write

    def measure(quick):                       # runs on every rank
        dist.init_process_group("gloo")
        x = torch.ones(1 << 20)
        times = paired({"ours": lambda: my_all_reduce(x), "peer": lambda: dist.all_reduce(x)},
                       rounds=5 if quick else 40)
        dist.barrier()
        dist.destroy_process_group()
        return [row("all-reduce 4 MiB", times, goal=0.2)]

    if __name__ == "__main__":
        write(run_bench(measure, 2, main_arguments().quick)[0], "collectives")
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minidist import launch

RESULTS = Path(__file__).resolve().parent.parent / "build" / "bench"
# A sample shorter than this is mostly the barrier before it and the clock.
MIN_SAMPLE_S = 2e-3


@dataclass(frozen=True)
class Row:
    """One line of the table: ours beside a peer.

    Args:
        name: what was measured, with its size.
        ours, peer: medians, in `unit`.
        ratio: median over rounds of ours / peer: below 1, ours needs less (time, or bytes).
        low, high: quartiles of the same ratios.
        unit: of ours and peer: "s", "bytes", …
        goal: the ratio that we want to reach or stay below; only printed.
    """

    name: str
    ours: float
    peer: float
    ratio: float
    low: float
    high: float
    unit: str = "s"
    goal: float | None = None


def paired(
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 20,
    warmup: int = 2,
    calls: int | None = None,
    before: Mapping[str, Callable[[], Any]] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, list[float]]:
    """Time functions of no arguments in turn, round by round; collective where ranks exist.

    All ranks of `group` call it with the same names. A sample begins after a barrier and counts
    with the time of its slowest rank. Without a process group it times this one process.

    Args:
        functions: name -> what to time. Two, usually; more cost nothing in fairness.
        rounds: samples per function.
        warmup: calls of each function that are not counted.
        calls: calls per sample; None means as many as take about 2 ms, one at least.
        before: name -> what to do ahead of every call, untimed; to fill a tensor, say, so that it
            lies in this core's cache as it does in use. A barrier follows.
        group: the ranks that measure together; None means the default group.

    Returns:
        name -> seconds per call, one per round. The i-th numbers of all names belong together.
    """
    if rounds < 1:
        raise ValueError(f"paired: rounds must be at least 1, got {rounds}")
    names = list(functions)
    before = before or {}

    def sample(name: str, calls: int) -> float:
        return _sample(functions[name], calls, before.get(name), group)

    for name in names:
        for _ in range(warmup):
            sample(name, 1)
    # Calibrate: the ranks have to agree on the number of calls.
    repeats = dict.fromkeys(names, calls or 1)
    if calls is None:
        for name in names:
            once_s = max(_on_all_ranks([sample(name, 3)], group)[0])
            repeats[name] = max(1, round(MIN_SAMPLE_S / max(once_s, 1e-7)))
    # Measure. Every second round runs backwards: what comes after what must not matter.
    samples: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for name in names if i % 2 == 0 else reversed(names):
                samples[name].append(sample(name, repeats[name]))
    finally:
        if collecting:
            gc.enable()
    # The slowest rank is what a training step waits for.
    return {name: [max(ranks) for ranks in _on_all_ranks(samples[name], group)] for name in names}


def row(
    name: str,
    times: Mapping[str, Sequence[float]],
    ours: str = "ours",
    peer: str = "peer",
    *,
    unit: str = "s",
    goal: float | None = None,
) -> Row:
    """A `Row` from what `paired` returned: medians, and the spread of the per-round ratios.

    >>> row("add", {"ours": [1.0, 2.0, 1.5], "peer": [2.0, 2.0, 2.0]})
    Row(name='add', ours=1.5, peer=2.0, ratio=0.75, low=0.625, high=0.875, unit='s', goal=None)
    """
    ratios = [mine / other for mine, other in zip(times[ours], times[peer], strict=True)]
    low, middle, high = (
        statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    mine, other = statistics.median(times[ours]), statistics.median(times[peer])
    return Row(name, mine, other, middle, low, high, unit, goal)


def run_bench(
    fn: Callable[..., Any], nprocs: int, *args: Any, deadline_s: float = 900.0
) -> list[Any]:
    """Call `fn(*args)` on `nprocs` ranks of this machine, one torch thread each.

    `fn` makes its process group itself. Returns one result per rank; `[0]` is usually what counts.
    """
    return launch.run(fn, nprocs, *args, deadline_s=deadline_s)


def find_benchmarks(folder: Path) -> list[Path]:
    """The files that import `write`: each prints a table when it is run."""
    importing = re.compile(r"^from harness import .*\bwrite$", re.MULTILINE)
    return [p for p in sorted(folder.glob("*.py")) if importing.search(p.read_text("utf-8"))]


def write(rows: Sequence[Row], name: str) -> Path:
    """Write build/bench/NAME.json, a list of rows, and print the table; returns the file's path.

    NAME.txt beside it keeps the table with its goals, for the joint table of all benchmarks.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    keys = ("name", "ours", "peer", "ratio", "low", "high", "unit")
    path = RESULTS / f"{name}.json"
    lines = ",\n".join(json.dumps({key: getattr(each, key) for key in keys}) for each in rows)
    path.write_text(f"[\n{lines}\n]\n", "utf-8")
    text = table(rows)
    (RESULTS / f"{name}.txt").write_text(text + "\n", "utf-8")
    print(f"\n{name}: {machine()}\n{text}", flush=True)
    return path


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text. Columns have fixed widths, so that tables can be stacked."""
    lines = [
        f"{'':52} {'ours':>11} {'peer':>11} {'ours/peer':>9} {'quartiles':>15} "
        f"{'peer/ours':>9}  goal"
    ]
    for each in rows:
        goal = ""
        if each.goal is not None:
            goal = f"≤ {each.goal:.4g} {'met' if each.ratio <= each.goal else 'not met'}"
        inverse = f"{1 / each.ratio:.2f}" if each.ratio else "-"
        lines.append(
            f"{each.name:52} {_quantity(each.ours, each.unit):>11} "
            f"{_quantity(each.peer, each.unit):>11} {each.ratio:9.3f} "
            f"{f'{each.low:.3f}…{each.high:.3f}':>15} {inverse:>9}  {goal}".rstrip()
        )
    return "\n".join(lines)


def machine() -> str:
    """What the table was measured on, and how busy it was: a ratio is worth less under load."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{cores} cores ({platform.machine()}){load}, torch {torch.__version__}"


def main_arguments(description: str | None = None) -> argparse.Namespace:
    """The command line that all benchmark files share: `.quick`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all?")
    return parser.parse_args()


def _sample(
    function: Callable[[], Any],
    calls: int,
    before: Callable[[], Any] | None,
    group: dist.ProcessGroup | None,
) -> float:
    """Seconds per call on this rank."""
    # Calls are timed together, as the clock is not free, unless something comes between them.
    turns, calls_per_turn = (calls, 1) if before else (1, calls)
    elapsed_s = 0.0
    for _ in range(turns):
        if before:
            before()
        if dist.is_initialized():
            dist.barrier(group)
        _wait_for_device()
        start_s = time.perf_counter()
        for _ in range(calls_per_turn):
            function()
        _wait_for_device()
        elapsed_s += time.perf_counter() - start_s
    return elapsed_s / calls


def _wait_for_device() -> None:
    # CUDA kernels are asynchronous: without this, only their launch would be timed.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _on_all_ranks(values: list[float], group: dist.ProcessGroup | None) -> list[tuple[float, ...]]:
    """values of this rank -> per value, those of all ranks."""
    if not dist.is_initialized():
        return [(value,) for value in values]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, values, group=group)
    return list(zip(*gathered, strict=True))


def _quantity(value: float, unit: str) -> str:
    """
    >>> _quantity(0.00123, "s"), _quantity(3 << 20, "bytes"), _quantity(0.5, "tokens")
    ('1.23 ms', '3.00 MiB', '0.5 tokens')
    """
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if value >= factor:
                return f"{value / factor:.3g} {name}"
        return f"{value * 1e9:.3g} ns"
    if unit == "bytes":
        for factor, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if value >= factor:
                return f"{value / factor:.2f} {name}"
    return f"{value:.4g} {unit}"
