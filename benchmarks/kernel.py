"""The kernel "torchrun × N" beside what a user would have without it.

Phases: start to the first collective, beside plain torchrun; a lab of 15 cells, beside one
papermill per rank; a trivial cell, many printed lines and an interrupt, beside a plain IPython
kernel; memory after many cells, beside that after the first of them.

Whole processes are timed here, so no world of ranks is shared: ours and the peer run in turn, and
the ratio is taken within a round, as in the other benchmarks.

    python benchmarks/kernel.py [--quick]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import nbformat
from harness import Row, main_arguments, row, write
from jupyter_client.manager import KernelManager

from minidist.processes.tree import descendants

DEADLINE_S = 300.0
PEER_TRIES = 3
T = TypeVar("T")
PLAIN = "python3"
FIRST_COLLECTIVE = """\
import os, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
x = torch.ones(1000)
dist.all_reduce(x)
if rank == 0: print(time.time(), flush=True)
dist.destroy_process_group()
"""
LAB = (
    "steps = 5",
    "import os, time, torch, torch.distributed as dist\nfrom torch import nn",
    "dist.init_process_group('gloo')\nrank, world_size = dist.get_rank(), dist.get_world_size()",
    "print(rank, world_size)",
    "torch.manual_seed(0)\nx, y = torch.randn(64, 32), torch.randn(64, 1)",
    "x, y = x[rank::world_size], y[rank::world_size]",
    "model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))",
    "ddp = nn.parallel.DistributedDataParallel(model)",
    "optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)",
    "def step():\n    optimizer.zero_grad()\n    loss = nn.functional.mse_loss(ddp(x), y)\n"
    "    loss.backward()\n    optimizer.step()\n    return loss.item()",
    "losses = [step() for _ in range(steps)]",
    "losses[-1]",
    "total = torch.tensor(losses[-1]); dist.all_reduce(total)",
    "print(total.item() / world_size)",
    "dist.barrier(); dist.destroy_process_group()",
)
PAPERMILL_PER_RANK = """\
import os, sys, papermill
papermill.execute_notebook(
    sys.argv[1], f"{sys.argv[1]}.{os.environ['RANK']}.ipynb", kernel_name="python3",
    progress_bar=False)
"""


class Kernel:
    """A running kernel and its client."""

    def __init__(self, name: str, **environment: str) -> None:
        self.manager = KernelManager(kernel_name=name)
        self.manager.start_kernel(env={**os.environ, **environment})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=DEADLINE_S)

    def run(self, code: str, on_message: Callable[[dict[str, Any]], None] | None = None) -> str:
        """Run a cell that may fail; returns what it printed."""
        texts: list[str] = []

        def output(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                texts.append(message["content"]["text"])
            if on_message is not None:
                on_message(message)

        self.client.execute_interactive(
            code, timeout=DEADLINE_S, output_hook=output, allow_stdin=False
        )
        return "".join(texts)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid  # type: ignore[union-attr]

    def memory(self) -> int:
        """Bytes of main memory that the kernel's processes occupy."""
        pages = 0
        for pid in (self.pid, *descendants(self.pid)):
            try:
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue  # it has ended since
        return pages * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)


@contextmanager
def kernel(name: str, **environment: str) -> Iterator[Kernel]:
    it = Kernel(name, **environment)
    try:
        yield it
    finally:
        it.close()


def in_turn(
    functions: dict[str, Callable[[], float]], rounds: int, warmup: int = 0
) -> dict[str, list[float]]:
    """Seconds that the functions return: each is called once per round, in changing order."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(warmup + rounds):
        for name in list(functions) if number % 2 == 0 else reversed(list(functions)):
            seconds = functions[name]()
            if number >= warmup:
                samples[name].append(seconds)
    return samples


def timed(call: Callable[[], T], tries: int = 1, because: str = "") -> tuple[T, float]:
    """What a call returns, and its seconds; those of the last try where it has more than one.

    Plain kernels that start at the same moment sometimes choose the same port, and one dies: a
    papermill per rank then begins anew.

    Args:
        because: what an error has to say to be tried again.
    """
    while True:
        tries -= 1
        began = time.perf_counter()
        try:
            return call(), time.perf_counter() - began
        except RuntimeError as error:
            if not tries or because not in str(error):
                raise
        print("a peer's kernel died while it started; once more", flush=True)


def _torchrun(num_ranks: int, *command: str) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", str(num_ranks), *command],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    if done.returncode:
        raise RuntimeError(f"torchrun ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def start(num_ranks: int, rounds: int, folder: Path) -> list[Row]:
    """From nothing to the first finished collective; and with fresh ranks in a running kernel."""
    script = folder / "first.py"
    script.write_text(FIRST_COLLECTIVE)

    def ours() -> float:
        began = time.time()
        with kernel(f"torchrun-{num_ranks}") as it:
            return float(it.run(FIRST_COLLECTIVE).split()[0]) - began

    def peer() -> float:
        began = time.time()
        return float(_torchrun(num_ranks, str(script)).split()[0]) - began

    with kernel(f"torchrun-{num_ranks}") as running:

        def fresh() -> float:
            began = time.time()
            text = running.run(f"%restart_ranks\n{FIRST_COLLECTIVE}")
            return float(text.partition("]\n")[2].split()[0]) - began

        functions = {"ours": ours, "fresh": fresh, "peer": peer}
        times = in_turn(functions, rounds)
    what = f"first collective, N={num_ranks}, beside torchrun"
    return [
        row(f"start to {what}", times, goal={2: 0.9, 4: 0.65}[num_ranks]),
        row(f"%restart_ranks to {what}", times, ours="fresh"),
    ]


def lab(num_ranks: int, rounds: int, folder: Path) -> Row:
    """15 cells through papermill; the peer is torchrun with a papermill and a kernel per rank."""
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(source) for source in LAB]
    path, script = folder / "lab.ipynb", folder / "per_rank.py"
    nbformat.write(book, path)
    script.write_text(PAPERMILL_PER_RANK)

    def ours() -> float:
        began = time.perf_counter()
        command = ["-k", f"torchrun-{num_ranks}", "--no-progress-bar", "--language", "python"]
        subprocess.run(
            [sys.executable, "-m", "papermill", *command, str(path), f"{path}.ours.ipynb"],
            capture_output=True,
            timeout=DEADLINE_S,
            check=True,
        )
        return time.perf_counter() - began

    def peer() -> float:
        return timed(lambda: _torchrun(num_ranks, str(script), str(path)), PEER_TRIES)[1]

    goal = {2: 0.75, 4: 0.55}[num_ranks]
    name = f"lab of 15 cells, N={num_ranks}, beside a papermill per rank"
    return row(name, in_turn({"ours": ours, "peer": peer}, rounds), goal=goal)


def _per_cell_s(it: Kernel, num_cells: int = 50) -> float:
    began = time.perf_counter()
    for _ in range(num_cells):
        it.run("1")
    return (time.perf_counter() - began) / num_cells


def _printing_s(it: Kernel, code: str, num_lines: int) -> float:
    began = time.perf_counter()
    shown = it.run(code).count("line ")
    if shown != num_lines:
        raise RuntimeError(f"printing: expected {num_lines} lines, got {shown}")
    return time.perf_counter() - began


def _interrupt_s(it: Kernel, blocking: str) -> float:
    """From the interrupt to the reply, with the cell well inside `blocking`."""
    began = 0.0

    def output(message: dict[str, Any]) -> None:
        nonlocal began
        if message["msg_type"] == "stream" and "now" in message["content"]["text"] and not began:
            time.sleep(0.3)
            began = time.perf_counter()
            it.manager.interrupt_kernel()

    it.run(f"print('now', flush=True)\n{blocking}", output)
    return time.perf_counter() - began


def beside_a_plain_kernel(rounds: int) -> list[Row]:
    rows = []
    with kernel(PLAIN) as plain, kernel("torchrun-2") as two:
        two.run(FIRST_COLLECTIVE)
        times = in_turn(
            {"ours": lambda: _per_cell_s(two), "peer": lambda: _per_cell_s(plain)}, rounds, 1
        )
        rows.append(row("a trivial cell, N=2, beside a plain kernel", times, goal=1.5))
        loop = "while True: pass"
        hang = "dist.all_reduce(x) if rank == 0 else time.sleep(1000)"

        def blocked() -> float:
            two.run("if not dist.is_initialized(): dist.init_process_group('gloo')")
            return _interrupt_s(two, hang)

        times = in_turn(
            {
                "ours": lambda: _interrupt_s(two, loop),
                "blocked": blocked,
                "peer": lambda: _interrupt_s(plain, loop),
            },
            rounds,
            1,
        )
        rows += [
            row("interrupt Python, N=2 (0.5 s promised)", times),
            row("interrupt a blocked all_reduce, N=2 (3 s promised)", times, ours="blocked"),
        ]
    with kernel(PLAIN) as plain, kernel("torchrun-4") as four:
        four.run("import os; rank = int(os.environ['RANK'])")
        code = "for i in range({}): print({}, 'line', i)"
        times = in_turn(
            {
                "ours": lambda: _printing_s(four, code.format(10_000, "rank"), 40_000),
                "peer": lambda: _printing_s(plain, code.format(40_000, 0), 40_000),
            },
            rounds,
            1,
        )
        rows.append(row("10,000 lines on each of 4 ranks, beside 40,000", times, goal=2.0))
    return rows


def memory(num_cells: int) -> Row:
    """Memory after `num_cells` cells beside that after the first tenth of them."""
    with kernel("torchrun-2") as it:
        it.run(FIRST_COLLECTIVE)
        sizes: list[int] = []
        for number in range(num_cells):
            it.run(f"value = {number}; print(value)")
            if number >= num_cells // 10 and number % max(1, num_cells // 100) == 0:
                sizes.append(it.memory())
    few = max(1, len(sizes) // 10)
    first, last = statistics.median(sizes[:few]), statistics.median(sizes[-few:])
    name = f"memory after {num_cells} cells, beside {num_cells // 10}"
    return row(name, {"ours": [last], "peer": [first]}, unit="bytes", goal=1.05)


def main() -> None:
    quick = main_arguments(__doc__).quick
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), []
        for num_ranks in (2, 4):
            rows += start(num_ranks, 1 if quick else 10, folder)
            rows.append(lab(num_ranks, 1 if quick else 10, folder))
        rows += beside_a_plain_kernel(1 if quick else 20)
        rows.append(memory(100 if quick else 10_000))
    write(rows, "kernel")


if __name__ == "__main__":
    main()
