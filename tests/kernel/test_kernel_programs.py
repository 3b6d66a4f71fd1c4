"""A cell's own program, such as `!python script.py`, that waits for ranks that nobody starts."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from kernel_helper import kernel as new_kernel
from kernel_helper import kernel_for_diagnose

from minidist.kernel.hang import describe, place
from minidist.kernel.inside import diagnose
from minidist.kernel.watch import TELL_AFTER_S, Watch
from minidist.processes.ports import free_port

WAITS = "import sys, {}, time; print(flush=True); time.sleep(60)"
KERNEL = kernel_for_diagnose()


@pytest.fixture
def started(monkeypatch) -> Callable[[str], threading.Thread]:
    """Starts a thread that waits for a Python program, which imports a module and then sleeps."""
    running = []
    monkeypatch.setenv("WORLD_SIZE", "2")

    def start(module: str) -> threading.Thread:
        process = subprocess.Popen(
            [sys.executable, "-c", WAITS.format(module)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        thread = threading.Thread(target=process.wait)
        thread.start()
        running.append((process, thread))
        while not str(diagnose.where(thread, KERNEL).get("doing")).startswith("waits for its"):
            time.sleep(0.01)
        return thread

    yield start
    for process, thread in running:
        process.kill()
        thread.join()
        process.stdout.close()


@pytest.mark.parametrize(("module", "hinted"), [("torch", True), ("json", False)])
def test_a_program_that_stands_still_is_told_once_with_a_hint(started, module, hinted) -> None:
    thread = started(module)
    places = [{0: place(diagnose.where(thread, KERNEL)), 1: place(None)}]
    time.sleep(0.3)
    places.append({**places[0], 0: place(diagnose.where(thread, KERNEL))})
    said: list[str] = []
    cell = SimpleNamespace(unfinished=[0], outputs=SimpleNamespace(tell=said.append))
    watch = Watch(cell, SimpleNamespace(), None)  # type: ignore[arg-type]
    for after_s, seen in ((0, places[0]), (TELL_AFTER_S + 1, places[1])):
        watch._tell_of_ranks_apart(watch._start + after_s, seen)
    text = describe(0, places[1])
    assert said[1] == f"rank 0: {text}"
    assert text.startswith("waits for its program (python")
    assert ("!torchrun --nproc-per-node 2 SCRIPT" in text) == hinted


@pytest.mark.slow
def test_a_script_that_waits_for_other_ranks_is_told_and_can_be_interrupted(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    with new_kernel() as kernel:
        result = kernel.run(
            f"%%rank 0\n!MASTER_PORT={free_port()} '{sys.executable}' '{script}'",
            stop=lambda message: "its program" in message["content"].get("text", ""),
        )
        assert result.reply["status"] in ("ok", "error")
        said = result.text() + result.text("stderr")
        assert "To start 2: %%rank 0, then !torchrun --nproc-per-node 2 SCRIPT" in said
        assert not [p for p in kernel.family() if str(script) in _command(p)]
        kernel.ok("1")


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""
