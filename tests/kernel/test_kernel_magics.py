"""`%ranks`, `%restart_ranks` with the cells above, and `%debug`, as a notebook uses them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from kernel_helper import ALL_REDUCE, JOIN, Kernel, Result
from kernel_helper import kernel as new_kernel

from minidist.kernel import history, table


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with new_kernel() as it:
        yield it


def _rows(result: Result) -> list[list[str]]:
    """The table of `%ranks`: cells of each line after the head."""
    head, *lines = result.text().splitlines()
    starts = [head.index(name) for name in table.HEAD]
    ends = [*starts[1:], 1000]
    return [[line[a:b].strip() for a, b in zip(starts, ends, strict=True)] for line in lines]


def test_ranks_are_shown(kernel: Kernel) -> None:
    kernel.run("%restart_ranks 2")
    before = _rows(kernel.ok("%ranks"))
    assert [row[:3] for row in before] == [["0", "ready", "-"], ["1", "ready", "-"]]
    kernel.ok(f"{JOIN}\n{ALL_REDUCE}\nif rank == 1: kept = bytearray(400 << 20)")
    rows = _rows(kernel.ok("%ranks"))
    group, last = "gloo, 2 ranks", "all_reduce (float32 [1])"
    assert [(*row[:3], row[5]) for row in rows] == [
        ("0", "ready", group, last),
        ("1", "ready", group, last),
    ]
    sizes = [float(row[4].split()[0]) for row in rows]
    assert all(row[4].endswith(" MiB") for row in rows)
    assert 300 < sizes[1] - sizes[0] < 500
    # The rest of the cell runs as ever.
    assert "3.0\n[rank 1: same output]\n" in kernel.ok(f"%ranks\n{ALL_REDUCE}").text()


def test_lost_ranks_are_shown(kernel: Kernel) -> None:
    kernel.run("%restart_ranks 2")
    assert kernel.run("import os; os._exit(3)").kind == "rank_lost"
    result = kernel.ok("%ranks")
    assert [row[1] for row in _rows(result)[:2]] == ["ended", "ended"]
    assert "ended with exit code 3. Run %restart_ranks" in result.text()
    assert kernel.run("%ranks\n1").kind == "rank_lost"


def test_what_a_rank_says_of_itself_is_checked() -> None:
    wild = {"memory": "much", "group": ["x"], "device": "a\nb" * 999, "collective": 5}
    row = table.row(0, "ready", wild)
    assert row[4] == row[2] == row[5] == "-"
    assert "\n" not in row[3]
    assert len(row[3]) <= 80
    assert table.row(0, "ready", {"memory": float("nan")})[4] == "-"
    assert table.row(0, "ready", {"memory": True})[4] == "-"


class _Notebook:
    """Runs cells as JupyterLab does, which names the cell with each request."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def run(self, name: str, code: str, **options: Any) -> Result:
        client = self.kernel.client
        send = client.session.msg

        def named(kind: str, *args: Any, **more: Any) -> Any:
            message = send(kind, *args, **more)
            if kind == "execute_request":
                message["metadata"]["cellId"] = name
            return message

        client.session.msg = named  # type: ignore[method-assign]
        try:
            return self.kernel.run(code, **options)
        finally:
            del client.session.msg


@pytest.fixture
def new() -> Iterator[Kernel]:
    """A kernel that has run nothing yet."""
    with new_kernel() as it:
        yield it


def test_fresh_ranks_run_the_cells_above(new: Kernel) -> None:
    notebook = _Notebook(new)
    notebook.run("join", JOIN)
    notebook.run("a", "a = 1\nprint('in the notebook already')")
    first = notebook.run("restart", "%restart_ranks --rerun\nprint(a)")
    assert first.text() == "[2 fresh ranks; 2 cells run again]\n1\n[rank 1: same output]\n"
    notebook.run("late", "a = 'from below'")
    number = notebook.run("wrong", "a = 2; 1 / 0").reply["execution_count"]
    notebook.run("a", "a = 3")  # edited and run again: it keeps its place
    result = notebook.run("restart", "%restart_ranks 3 --rerun\nprint(a, dist.get_world_size())")
    # What was first run after this cell is not above it.
    assert result.text().startswith("[3 fresh ranks; 2 cells run again]\n3 3\n")
    result = notebook.run("new", "%restart_ranks 2 --rerun\nprint(a, len(In))")
    told = f"[2 fresh ranks; 4 cells run again, not In[{number}], which had failed]\n"
    assert result.text().startswith(f"{told}from below {result.reply['execution_count'] + 1}\n")
    assert result.text("stderr") == ""


def test_cells_that_fail_when_run_again_say_so(new: Kernel) -> None:
    new.ok("import os")
    number = new.ok("%%rank 1\nassert os.environ['WORLD_SIZE'] == '2'").reply["execution_count"]
    new.ok("later = 1")
    result = new.run("%restart_ranks 3 --rerun\n1")
    assert result.reply["evalue"].startswith(f"In[{number}], run again: [rank 1]")
    trace = "\n".join(result.reply["traceback"])
    assert f"Cell In[{number}], line 2" in re.sub(r"\x1b\[[\d;]*m", "", trace)
    result = new.run("%restart_ranks 1 --rerun")
    assert f"In[{number}], run again: %%rank: expected" in result.reply["evalue"]
    assert new.run("later").reply["ename"] == "NameError"


def test_the_history_is_bounded() -> None:
    cells = history.History()
    for number in range(history.MAX_CELLS + 5):
        cells.note(str(number), number, "x", ok=True)
    assert len(cells.above("")) == history.MAX_CELLS
    assert cells.forgotten == 5


def test_debug_runs_on_the_rank_that_failed(kernel: Kernel) -> None:
    kernel.run("%restart_ranks 2")
    kernel.ok("import os; rank = int(os.environ['RANK'])")
    kernel.run("def f(n):\n    secret = n * 7\n    if rank == 1: raise ValueError\nf(6)")
    answers, asked = iter(["p (rank, secret)", "up", "q"]), []

    def answer(message: dict) -> None:
        asked.append(message["content"]["prompt"])
        kernel.client.input(next(answers))

    result = kernel.ok("%debug", allow_stdin=True, stdin_hook=answer)
    assert len(asked) == 3
    assert "[%debug on rank 1]\n" in result.text()
    assert "(1, 42)" in result.text()
    assert kernel.ok("rank").kind == "ok"
