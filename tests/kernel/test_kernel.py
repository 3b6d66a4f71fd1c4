"""The kernel "torchrun × N" as a notebook sees it: cells, outputs, errors, magics, widgets."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jupyter_kernel_test
import nbformat
import pytest
import zmq.asyncio
from kernel_helper import ALL_REDUCE, HANGS_S, JOIN, Kernel, says_now
from kernel_helper import kernel as new_kernel

from minidist.kernel import hang as verdict
from minidist.kernel import magics, options, rank_count
from minidist.kernel.client import Client
from minidist.kernel.hang import Place


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with new_kernel() as it:
        it.ok(JOIN)
        yield it


def test_a_cell_runs_on_every_rank(kernel: Kernel) -> None:
    result = kernel.ok(ALL_REDUCE)
    assert result.text() == "3.0\n[rank 1: same output]\n"
    assert result.kind == "ok"
    assert [r["status"] for r in result.reply["minidist"]["ranks"]] == ["ok", "ok"]


def test_other_output_is_labelled(kernel: Kernel) -> None:
    result = kernel.ok("print('I am', rank); print('second line')\nrank * 10")
    assert result.text().startswith("I am 0\nsecond line\n")
    assert "[rank 1] I am 1\n[rank 1] second line\n[rank 1] 10\n" in result.text()
    assert [c["data"]["text/plain"] for c in result.of("execute_result")] == ["0"]


@pytest.mark.parametrize("draw", ["numpy.random.rand()", "random.random()"])
def test_ranks_draw_different_numbers_as_processes_of_torchrun_do(kernel: Kernel, draw) -> None:
    assert "same output" not in kernel.ok(f"import numpy, random\nprint({draw})").text()


def test_one_rank_fails(kernel: Kernel) -> None:
    result = kernel.run("if rank == 1:\n    raise ValueError('boom')")
    assert result.kind == "error"
    assert (result.reply["ename"], result.reply["evalue"]) == ("ValueError", "[rank 1] boom")
    assert result.rank(0)["status"] == "ok"
    assert result.rank(1)["status"] == "error"
    assert result.of("error")[0]["evalue"] == "[rank 1] boom"


def test_the_same_error_is_told_once(kernel: Kernel) -> None:
    result = kernel.run("1 / 0")
    assert result.reply["evalue"] == "[ranks 0, 1] division by zero"
    text = "\n".join(result.reply["traceback"])
    assert text.count("Traceback (most recent call last)") == 1
    assert "on ranks 0, 1:" in text


def test_sys_exit_is_an_error_of_the_cell(kernel: Kernel) -> None:
    result = kernel.run("if rank == 1: sys.exit(3)")
    assert result.reply["ename"] == "SystemExit"
    assert result.rank(1)["status"] == "error"
    assert kernel.ok("rank").kind == "ok"


def test_rank_cells_keep_counts_in_step(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "written.txt"
    kernel.ok(f"%%rank 0\n%%writefile {path}\nhello")
    assert path.read_text() == "hello\n"
    only = kernel.ok(f"%%rank 1\n!cat {path}")
    assert only.text().strip() == "hello"
    result = kernel.ok("x = 1 / 1\nprint(len(In)); rank")
    count = result.reply["execution_count"]
    assert f"{count + 1}\n" in result.text()
    assert f"[rank 1] {count + 1}\n[rank 1] 1\n" in result.text()
    assert result.of("execute_result")[0]["execution_count"] == count
    failed = kernel.run("%%rank 1\n\n1 / 0")
    assert "line 3" in "\n".join(failed.reply["traceback"])
    assert kernel.run("%%rank 7\n1").reply["ename"] == "UsageError"


def test_cell_magics_and_figures(kernel: Kernel) -> None:
    assert "Wall time" in kernel.ok("%%time\nprint(1)").text()
    code = "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()"
    shown = kernel.ok(code).of("display_data")
    assert len(shown) == 1
    assert "image/png" in shown[0]["data"]


def test_completion_inspection_history(kernel: Kernel) -> None:
    kernel.ok("some_long_name = 5")
    client = kernel.client
    assert "some_long_name" in kernel.ask(client.complete("some_lo"))["matches"]
    assert kernel.ask(client.inspect("some_long_name"))["found"] is True
    assert kernel.ask(client.is_complete("for i in x:"))["status"] == "incomplete"
    history = kernel.ask(client.history(hist_access_type="tail", n=1))["history"]
    assert history[-1][2] == "some_long_name = 5"
    info = kernel.ask(client.kernel_info())
    assert info["implementation"] == "torchrun"
    assert info["supported_features"] == []


def test_input_is_asked_once(kernel: Kernel) -> None:
    asked = []

    def answer(message: dict) -> None:
        asked.append(message["content"]["prompt"])
        kernel.client.input("blue")

    result = kernel.ok("c = input('colour? '); print(c)", allow_stdin=True, stdin_hook=answer)
    assert asked == ["colour? "]
    assert result.text() == "blue\n[rank 1: same output]\n"


def test_widgets_work_both_ways(kernel: Kernel) -> None:
    result = kernel.ok("import ipywidgets; s = ipywidgets.IntSlider(); s")
    opened = [c for c in result.of("comm_open") if "value" in c["data"]["state"]]
    assert len(opened) == 1
    content = {
        "comm_id": opened[0]["comm_id"],
        "data": {"method": "update", "state": {"value": 42}, "buffer_paths": []},
    }
    kernel.client.shell_channel.send(kernel.client.session.msg("comm_msg", content))
    assert kernel.ok("%%rank 0\nprint(s.value)").text() == "42\n"


# A thread of rank 0 prints "now" when the cell has come to a line, and into a function.
LOOKOUT = """
import threading, traceback
def look(line, function):
    came = False
    while not came:
        time.sleep(0.01)
        main = sys._current_frames()[threading.main_thread().ident]
        stack = [frame for frame, _ in traceback.walk_stack(main)]
        came = any(f.f_globals is globals() and f.f_lineno == line for f in stack)
        came = came and any(f.f_code.co_name == function for f in stack)
    print("now", flush=True)
def lookout(*place):
    if rank == 0: threading.Thread(target=look, args=place).start()
"""


def test_interrupt_keeps_variables_and_lets_ranks_talk_again(kernel: Kernel) -> None:
    kernel.ok(f"{LOOKOUT}\nkept = 5")
    for code, function in (
        ("while True: pass", "<module>"),
        ("time.sleep(100)", "<module>"),
        ("dist.recv(x, src=1) if rank == 0 else None", "recv"),
    ):
        result = kernel.run(f"dist.barrier()\nlookout(3, {function!r})\n{code}", stop=says_now)
        assert result.reply["status"] == "error"
        assert result.kind == "error", result.reply
        said = "\n".join(result.reply["traceback"])
        assert f"line 3: {code}" in said
        assert "site-packages" not in said
        assert ("in recv (" in said) == ("recv" in code)
        kernel.ok("assert kept == 5\nif not dist.is_initialized(): dist.init_process_group()")
        assert kernel.ok(ALL_REDUCE).text().startswith("3.0\n")


def test_what_torchs_profiler_writes_of_itself_is_left_out(kernel: Kernel) -> None:
    # Without acc_events, torch 2.11 warns that there will be one cycle only.
    code = "from torch.profiler import profile\nwith profile(acc_events=True): print('profiled')"
    result = kernel.ok(code)
    assert result.text() == "profiled\n[rank 1: same output]\n"
    assert not result.text("stderr").strip()


def test_groups_can_be_made_again_and_again(kernel: Kernel) -> None:
    code = "for _ in range(5):\n    dist.destroy_process_group(); dist.init_process_group()\n"
    assert kernel.ok(code + ALL_REDUCE).text().startswith("3.0\n")


def test_status_and_deadline_requests(kernel: Kernel) -> None:
    status = kernel.request(action="status")
    assert status["state"] == "ready"
    assert [r["alive"] for r in status["ranks"]] == [True, True]
    assert kernel.request(action="deadline", seconds=-1)["status"] == "error"
    assert kernel.request(action="dance")["status"] == "error"


def test_papermill(tmp_path: Path) -> None:
    book = nbformat.v4.new_notebook()
    parameters = nbformat.v4.new_code_cell("x = 1", metadata={"tags": ["parameters"]})
    book.cells = [parameters, nbformat.v4.new_code_cell("import os; print(x, os.environ['RANK'])")]
    nbformat.write(book, tmp_path / "in.ipynb")
    command = [sys.executable, "-m", "papermill", "-k", "torchrun-2", "-p", "x", "7"]
    command += ["--language", "python", str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = str(nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[-1].outputs)
    assert "7 0" in text
    assert "[rank 1] 7 1" in text


class TestConformance(jupyter_kernel_test.KernelTests):
    """Jupyter's own tests of a kernel, with more patience."""

    @classmethod
    def setUpClass(cls):
        # jedi gives no completions while a different kernel writes the cache that they share.
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        with patch.dict(os.environ, XDG_CACHE_HOME=folder):
            super().setUpClass()
        cls.kc.execute_interactive("1", timeout=HANGS_S)  # its ranks start with the first cell

    def execute_helper(self, code: str, timeout: float = 120, **options: Any) -> Any:
        get = self.kc.iopub_channel.get_msg
        patient = lambda timeout: get(timeout=max(timeout, HANGS_S))  # noqa: E731
        with patch.object(self.kc.iopub_channel, "get_msg", patient):
            return super().execute_helper(code, timeout, **options)

    kernel_name = "torchrun-2"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('t', file=sys.stderr)"
    completion_samples = ({"text": "zi", "matches": {"zip"}},)
    complete_code_samples = ("1", "print('x')")
    incomplete_code_samples = ("for i in range(3):",)
    invalid_code_samples = ("import = 7q",)
    code_page_something = "zip?"
    code_generate_error = "raise"
    code_execute_result = ({"code": "6*7", "result": "42"},)
    code_display_data = (
        {
            "code": "from IPython.display import HTML, display; display(HTML('<b>x</b>'))",
            "mime": "text/html",
        },
    )
    code_history_pattern = "6?7*"
    # Not "range": ipykernel numbers the current session 0 in its answers, and so do we.
    supported_history_operations = ("tail", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"


# -- the front's own logic, without processes ----------------------------------------------------


def test_magic_lines() -> None:
    assert magics.read("x = 1", 2) == magics.Plan("x = 1")
    assert magics.read("%%rank 0, 2-3\nx", 4).ranks == (0, 2, 3)
    assert magics.read("%%rank 0\n%%bash\nls", 2).code == "%%bash\nls"
    assert magics.read("%restart_ranks 3", 2) == magics.Plan("", None, True, 3)
    assert magics.read("%restart_ranks 3\n%%rank 2\nx", 2).ranks == (2,)
    again = magics.read("%restart_ranks --rerun 3\nx", 2)
    assert (again.code, again.count, again.rerun) == ("x", 3, True)
    assert magics.read("%ranks\n%%rank 1\nx", 2).show
    assert magics.read("\n%debug", 2).debug
    for code in ("%debug f(1)", "%debug\nx", "x\n%ranks", "%ranks_of_mine"):
        assert magics.read(code, 2) == magics.Plan(code)  # not ours, or IPython's own
    wrong_ranks = ("%%rank 2\nx", "%%rank\nx", "%%rank a\nx")
    for wrong in (*wrong_ranks, "%restart_ranks 0", "%restart_ranks 2 3", "%restart_ranks --all"):
        with pytest.raises(magics.MagicError):
            magics.read(wrong, 2)


def _waits(op: str, tensor: str = "float32 [2]", **more: object) -> Place:
    return Place("waiting", op=op, tensor=tensor, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("places", "hang"),
    [
        ((_waits("all_reduce"), Place("finished")), True),
        ((_waits("all_reduce"), Place("error")), True),
        ((_waits("all_reduce"), Place("absent")), True),
        ((_waits("all_reduce"), Place("running")), False),
        ((_waits("all_reduce"), Place("silent")), False),
        ((_waits("all_reduce"), _waits("all_reduce")), False),
        ((_waits("all_reduce"), _waits("all_reduce", "float32 [3]")), True),
        ((_waits("all_gather_single"), _waits("all_gather_single", "float32 [3]")), True),
        ((_waits("reduce_scatter_tensor"), _waits("reduce_scatter_tensor", "float64 [2]")), True),
        ((_waits("all_gather"), _waits("all_gather", "float32 [3]")), False),
        ((_waits("all_reduce"), _waits("barrier", "")), True),
        ((_waits("recv", peer=1), _waits("recv", peer=0)), True),
        ((_waits("recv", peer=1), _waits("send", peer=0)), False),
        # two groups: ranks 0 and 1 are fine, and 2 waits for one of them
        ((*[_waits("all_reduce", ranks=(0, 1))] * 2, _waits("broadcast")), False),
        ((Place("finished"), Place("finished")), False),
    ],
)
def test_what_is_called_a_hang(places: tuple[Place, ...], hang: bool) -> None:
    assert verdict.is_hang(dict(enumerate(places))) is hang


def test_reports_from_inside_are_checked() -> None:
    wild = {
        "state": "collective",
        "op": 5,
        "ranks": "x",
        "cell": "c" * 9999,
        "line": [],
        "peer": {},
    }
    here = verdict.place(wild)
    assert here.op == ""
    assert len(here.at) < 300
    assert verdict.place({"state": 1}).status == "running"
    assert verdict.place(None).status == "silent"


def test_options_are_checked(tmp_path: Path) -> None:
    found = options.parse(["-f", "c.json", "--ranks", "3", "--unknown", "x", "--deadline", "2"])
    assert (found.num_ranks, found.deadline_s) == (3, 2.0)
    for wrong in (["--ranks", "0"], ["--ranks", "-2"], ["--ranks", "two"], ["--deadline", "-1"]):
        with pytest.raises(ValueError, match="expected"):
            options.parse(["-f", "c.json", *wrong])
    launcher = tmp_path / "l.json"
    launcher.write_text('{"run_dir": "relative"}')
    with pytest.raises(ValueError, match="run_dir"):
        options.parse(["-f", "c.json", "--launcher", str(launcher)])


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 2),
        ({"SLURM_TASKS_PER_NODE": "8"}, 8),
        ({"SLURM_TASKS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "3,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f2,GPU-77a,GPU-1"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "0", "PET_NPROC_PER_NODE": "3"}, 3),
        ({"PET_NPROC_PER_NODE": "3", "MINIDIST_RANKS": "5", "SLURM_JOB_NUM_NODES": "1"}, 5),
    ],
)
def test_ranks_from_the_environment(
    environment: dict[str, str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_count.glob, "glob", lambda _: [])  # as on a machine without GPUs
    assert rank_count.count_ranks(environment) == count


def test_gpus_of_the_machine_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_count.glob, "glob", lambda _: ["/dev/nvidia0", "/dev/nvidia1"] * 2)
    assert rank_count.count_ranks({"SLURM_TASKS_PER_NODE": "8"}) == 4
    assert rank_count.count_ranks({"CUDA_VISIBLE_DEVICES": ""}) == 2


@pytest.mark.parametrize(
    "environment", [{"MINIDIST_RANKS": "0"}, {"MINIDIST_RANKS": "x"}, {"PET_NPROC_PER_NODE": "gpu"}]
)
def test_an_environment_that_makes_no_sense_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(environment))}"):
        rank_count.count_ranks(environment)


def test_the_kernel_takes_its_ranks_from_the_environment() -> None:
    spec = Path(rank_count.__file__).parent / "kernelspecs" / "torchrun-auto" / "kernel.json"
    arguments = json.loads(spec.read_text())["argv"][3:5]
    with new_kernel(*arguments, env={**os.environ, "MINIDIST_RANKS": "3"}) as it:
        assert it.ok("import os; os.environ['WORLD_SIZE']").text().endswith("same output]\n")
        assert len(it.request(action="status")["ranks"]) == 3


def test_a_ranks_message_is_read_as_a_notebooks_is(tmp_path) -> None:
    """Apart from its dates; and whatever is no message, or not signed, is refused."""
    context = zmq.asyncio.Context()
    client = Client(str(tmp_path / "c.json"), context)
    try:
        session = client.session
        about = {"parent": session.msg("execute_request"), "metadata": {"n": 1}}
        frames = session.serialize(session.msg("stream", {"text": "a"}, **about), ident=[b"id"])
        _, expected = client.parse(frames)
        found = client.read(frames)
        for name in ("content", "metadata"):
            assert found[name] == expected[name]
        for name in ("header", "parent_header"):
            assert found[name] == expected[name] | {"date": found[name]["date"]}
        assert client.read(frames, content=False)["content"] == frames[-1]
        assert client.read([*frames, b"a buffer"]) == found

        rng = random.Random(0)
        for _ in range(300):
            changed = list(frames)
            place = rng.randrange(1, len(changed))
            changed[place] = rng.choice([b"", b"[]", b"{}", b"\xff", b"null", rng.randbytes(40)])
            del changed[rng.randrange(1, 12) :]
            if changed[1:] != frames[1:]:
                with pytest.raises(ValueError, match="not a message"):
                    client.read(changed)
        for name, value in (("header", []), ("content", 3), ("parent_header", "x")):
            parts = {"header": expected["header"], "parent_header": {}, "content": {}}
            packed = [session.pack(v) for v in (parts | {name: value}).values()]
            signed = [packed[0], packed[1], b"{}", packed[2]]
            with pytest.raises(ValueError, match=f"no {name}"):
                client.read([b"<IDS|MSG>", session.sign(signed), *signed])
    finally:
        client.close()
        context.destroy(0)
