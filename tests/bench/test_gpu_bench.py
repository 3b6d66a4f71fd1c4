"""`make gpu`: its rows, its file and its parts, tiny on a CPU; on a GPU where there is one.

No figure is judged here: rows are well formed, a part that fails is reported and the others run.
"""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu import labs, own_gpus, runner
from gpu.recorder import NotHereError, Recorder
from gpu.rows import KEYS, Results, check_row, make_row, table
from gpu.sizes import FULL, MIB, TINY

from autograder.criteria import get_lab
from minidist import launch

ROOT = Path(__file__).resolve().parents[2]

NO_DEVICE = "needs a CUDA device"
HEAD = {"date": "2026-01-01T00:00:00Z", "rehearsal": True, "commit": "abc", "machine": {"n": 1}}


@pytest.mark.parametrize("name", ["rows", "recorder", "device"])
def test_examples(name):
    assert doctest.testmod(importlib.import_module(f"gpu.{name}")).failed == 0


# ------------------------------------------------------------------------------------------- rows


def test_a_goal_is_met_or_not():
    row = make_row("p", "n", value=0.96, unit="ratio", at_least=0.97)
    assert tuple(row) == KEYS
    assert (row["goal"], row["met"]) == ({"at_least": 0.97}, False)
    assert make_row("p", "n", value=1.02, unit="ratio", at_most=1.02)["met"] is True
    assert make_row("p", "n", value=1.0, unit="ratio")["met"] is None
    assert make_row("p", "n", status="skipped", reason="why", at_most=1.0)["met"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": float("nan")}, "finite"),
        ({"low": float("inf")}, "finite"),
        ({"value": None}, "if and only if the status is ok"),
        ({"unit": None}, "if and only if the status is ok"),
        ({"reason": "why"}, "a reason if and only if"),
        ({"status": "failed"}, "a reason if and only if"),
        ({"status": "failed", "reason": "why"}, "if and only if the status is ok"),
        ({"status": "broken"}, "status is one of"),
        ({"detail": {"x": float("nan")}}, "detail is no JSON"),
        ({"extra": 1}, "expected the keys"),
    ],
)
def test_a_row_that_is_not_well_formed_is_refused(change, message):
    row = make_row("p", "n", value=1.0, unit="s")
    check_row(row)
    with pytest.raises(ValueError, match=message):
        check_row(row | change)


def test_the_table_says_what_came_of_each_row():
    rows = [
        make_row("a", "fast", value=2.5, unit="ratio", low=2.0, high=3.0, at_least=5.0),
        make_row("a", "broken", status="failed", reason="first line\nlast line"),
    ]
    lines = table(rows).splitlines()
    assert lines[0] == "a"
    assert " ".join(lines[1].split()) == "fast 2.500 2.000 … 3.000 goal ≥ 5.000 not met"
    assert lines[2].split() == ["broken", "failed:", "last", "line"]


# ------------------------------------------------------------------------------------------- file


def add(results, part, *rows, status="ok"):
    reason = None if status == "ok" else "why"
    results.replace(part, rows, status=status, reason=reason, seconds=1.23, date="now")


def test_a_file_is_gone_on_with(tmp_path):
    path = tmp_path / "new" / "r.json"
    first = Results.open(path, HEAD)
    assert not path.exists(), "nothing is written before something was measured"
    add(first, "a", make_row("a", "x", value=1.0, unit="s"))
    add(first, "b", make_row("b", "y", status="timeout", reason="why"), status="timeout")

    again = Results.open(path, HEAD | {"date": "2026-02-02T00:00:00Z"})
    assert again.head["date"] == HEAD["date"]
    assert (again.is_done("a"), again.is_done("b"), again.is_done("c")) == (True, False, False)
    assert [line.split(":")[0] for line in again.problems()] == ["b", "b"]
    add(
        again, "b", make_row("b", "y", value=2.0, unit="s"), make_row("b", "z", value=3.0, unit="s")
    )
    assert [row["name"] for row in again.rows] == ["x", "y", "z"]
    assert json.loads(path.read_text()) == {**again.head, "parts": again.parts, "rows": again.rows}
    assert again.problems() == []
    assert [each.name for each in path.parent.iterdir()] == ["r.json"], "no partial file is left"


@pytest.mark.parametrize("change", [{"machine": {"n": 2}}, {"commit": "def"}, {"rehearsal": False}])
def test_rows_of_two_machines_or_commits_do_not_mix(tmp_path, change):
    path = tmp_path / "r.json"
    add(Results.open(path, HEAD), "a")
    with pytest.raises(ValueError, match=f"has {next(iter(change))} .* name another one"):
        Results.open(path, HEAD | change)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rows": [{}], "parts": {}}', '{"rows": []}'])
def test_a_file_of_something_else_is_not_written_over(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no file of results"):
        Results.open(path, HEAD)
    assert path.read_text() == text


# --------------------------------------------------------------------------------------- recorder


def raises(error):
    def fail():
        raise error

    return fail


def out_of_memory():
    torch.empty(1)
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def test_what_fails_is_a_row_and_the_part_goes_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    with Recorder("p", path, deadline_s=time.monotonic() + 30) as recorder:
        recorder.measure("no number", lambda: recorder.figure("x", float("nan"), "s"))
        recorder.measure("error", raises(RuntimeError("no kernel image")))
        recorder.measure("too large", out_of_memory)
        recorder.measure("absent", raises(NotHereError(NO_DEVICE)))
        recorder.measure("too long", lambda: 1, needs_s=60)
        recorder.check("wrong", False, "it is 3")
        assert recorder.measure("works", lambda: recorder.figure("y", 1.5, "s") or 7) == 7
    rows, unfinished = runner.read_rows(path)
    assert rows == recorder.rows
    assert unfinished == []
    outcome = {row["name"]: (row["status"], row["reason"]) for row in rows}
    assert outcome["no number"][0] == "failed"
    assert "finite" in outcome["no number"][1]
    assert outcome["error"][0] == "failed"
    assert "no kernel image (test_gpu_bench.py:" in outcome["error"][1]
    assert outcome["too large"][0] == "out of memory"
    assert outcome["absent"] == ("skipped", NO_DEVICE)
    assert outcome["too long"][0] == "timeout"
    assert outcome["wrong"] == ("failed", "it is 3")
    assert outcome["y"] == ("ok", None)


def test_a_rank_that_is_out_of_memory_is_recognised():
    recorder = Recorder("p")
    recorder.measure("ranks", lambda: launch.run(out_of_memory, 2))
    (row,) = recorder.rows
    assert row["status"] == "out of memory"
    assert "[rank " in row["reason"]
    assert "Tried to allocate 20.00 GiB" in row["reason"]


def test_a_ratio_is_taken_within_rounds():
    recorder = Recorder("p")
    times = {"a": [2.0, 20.0, 3.0], "b": [1.0, 10.0, 1.0]}
    assert recorder.ratio("r", times, "a", "b", factor=10.0, at_least=20.0) == 20.0
    (row,) = recorder.rows
    assert (row["value"], row["low"], row["high"], row["met"]) == (20.0, 20.0, 25.0, True)
    assert row["detail"] == {"rounds": 3, "seconds": {"a": 3.0, "b": 1.0}}
    assert recorder.rate("s", times["b"], 30.0, "tokens/s") == 30.0


# ----------------------------------------------------------------------------------------- runner

WORKER = """
import json, os, signal, subprocess, sys, time

name, path = sys.argv[1:3]
row = {row!r}
with open(path, "a") as file:
    for event in ({{"begin": "first"}}, row, {{"end": "first"}}, {{"begin": "second"}}):
        file.write(json.dumps(event) + "\\n")
    file.write('{{"part": "half a r')
    file.flush()
    if name == "raises":
        raise SystemError("the driver is gone")
    if name == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("raises", "failed", "code 1\n.*SystemError: the driver is gone"),
        ("dies", "failed", "signal SIGSEGV"),
        ("hangs", "timeout", "it was ended after 20 s"),
    ],
)
def test_rows_outlive_their_part(tmp_path, monkeypatch, name, status, reason):
    """The fixture of conftest.py sees to it that a part which hangs leaves no process."""
    measured = make_row(name, "first", value=1.0, unit="s")
    (tmp_path / "bad_worker.py").write_text(WORKER.format(row=measured))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows, *ended = runner.run_part(name, 20.0 if name == "hangs" else 200.0, worker="bad_worker")
    assert rows[0] == measured
    assert [(row["name"], row["status"]) for row in rows[1:]] == [("second", status)]
    assert ended[0] == status
    assert ended[2] is False
    assert re.search(reason, ended[1], re.DOTALL), ended[1]


@pytest.fixture
def two_parts(monkeypatch):
    """Parts of which the second one cannot be: there is no such module."""
    parts = {"calibrate": runner.Part(120, ""), "no_such_part": runner.Part(120, "")}
    monkeypatch.setattr(runner, "PARTS", parts)


@pytest.mark.nightly
def test_a_second_run_does_what_the_first_one_could_not(tmp_path, two_parts, capsys):
    out = tmp_path / "r.json"
    arguments = ["--rehearse", "--out", str(out), "--commit", "mine"]
    assert runner.main(None, arguments) == runner.EXIT_FAILED
    first = json.loads(out.read_text())
    assert {name: part["status"] for name, part in first["parts"].items()} == {
        "calibrate": "ok",
        "no_such_part": "failed",
    }
    assert "No module named 'gpu.no_such_part'" in first["parts"]["no_such_part"]["reason"]
    assert first["rows"][-1]["name"] == "the whole part"
    assert first["commit"] == "mine"
    assert first["machine"]["torch"] == torch.__version__
    assert first["machine"]["num_devices"] == 0, "a rehearsal uses no GPU"
    assert first["rehearsal"] is True
    assert "not measured: no_such_part" in capsys.readouterr().out

    assert runner.main(None, arguments) == runner.EXIT_FAILED
    second = json.loads(out.read_text())
    assert second["rows"] == first["rows"]
    assert second["parts"]["calibrate"] == first["parts"]["calibrate"]

    assert runner.main(None, [*arguments, "--only", "calibrate"]) == runner.EXIT_FAILED
    third = json.loads(out.read_text())
    assert {row["name"] for row in third["rows"]} == {row["name"] for row in first["rows"]}
    assert third["rows"] != first["rows"], "a part that is named is measured anew"


def test_what_is_not_begun_in_time_is_named(tmp_path):
    results = Results(tmp_path / "r.json", HEAD)
    assert runner.run_parts(results, ["amp"], budget_s=0.0)
    assert results.parts["amp"]["status"] == "timeout"
    (row,) = results.rows
    assert (row["part"], row["name"], row["status"]) == ("amp", "the whole part", "timeout")
    assert "were over before it began" in row["reason"]


def start(*arguments, **options):
    """`python benchmarks/gpu` from elsewhere, as on a machine where nothing is installed."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "gpu"), *map(str, arguments)],
        env=env | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_without_a_device_it_says_so_and_writes_nothing(tmp_path):
    before = sorted(runner.RESULTS.iterdir())
    for arguments in ((), ("--out", tmp_path / "r.json")):
        process = start(*arguments, cwd=tmp_path)
        out, err = process.communicate(timeout=120)
        assert process.returncode == runner.EXIT_NO_DEVICE
        assert "there is no CUDA device here" in err
        assert "Traceback" not in out + err
    assert sorted(runner.RESULTS.iterdir()) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "invalid choice"),
        (["--budget-s", "0"], "must be above 0"),
        (["--rehearse"], "wants --out FILE"),
        (["--rehearse", "--out", str(runner.RESULTS / "x.json")], "outside benchmarks/results"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        runner.main(None, arguments)
    assert ended.value.code == runner.EXIT_USAGE
    assert message in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_measured(tmp_path):
    out = tmp_path / "r.json"
    process = start("--rehearse", "--out", out, "--only", "calibrate", "amp", cwd=tmp_path)
    assert process.stdout is not None
    # The name of a part is printed when it begins, without the end of its line.
    seen = ""
    while "amp …" not in seen:
        piece = process.stdout.read(1)
        assert piece, f"it ended before amp began: {seen}"
        seen += piece
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == runner.EXIT_FAILED
    parts = json.loads(out.read_text())["parts"]
    assert parts["calibrate"]["status"] == "ok"
    assert (parts["amp"]["status"], parts["amp"]["reason"]) == ("failed", "interrupted")


# ------------------------------------------------------------------------------------------ parts


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


MEASURED = ["calibrate", "amp", "training", "collectives", "profiling"]


@pytest.mark.parametrize("part", MEASURED)
def test_parts_on_a_cpu(part, one_thread):
    recorder = Recorder(part)
    importlib.import_module(f"gpu.{part}").measure(recorder, TINY)
    for row in recorder.rows:
        check_row(row)
        assert row["part"] == part
    assert {row["reason"] for row in recorder.rows if row["status"] != "ok"} == {NO_DEVICE} - (
        {NO_DEVICE} if part == "collectives" else set()
    )
    names = [row["name"] for row in recorder.rows]
    assert len(names) == len(set(names)), "a row is found by its name"


def test_every_part_is_one_that_can_be_run():
    graded = {"labs", "own_gpus"}
    assert set(MEASURED) | graded == set(runner.PARTS)
    for name in runner.PARTS:
        assert callable(importlib.import_module(f"gpu.{name}").measure)
    # What is graded takes what is left.
    measured_s = sum(part.limit_s for name, part in runner.PARTS.items() if name not in graded)
    assert measured_s < 8 * 60 + 30
    assert runner.BUDGET_S < 10 * 60


def test_the_model_of_mixed_precision_has_350_million_parameters():
    from minidist.cost import Transformer

    assert Transformer.from_config(FULL.gpt).num_parameters == pytest.approx(355e6, rel=0.01)


def test_labs_without_jupyter(monkeypatch):
    monkeypatch.setattr(labs, "PACKAGES", ("json", "no_such_package"))
    recorder = Recorder("labs")
    labs.measure(recorder, TINY, labs=("lab1_ddp", "lab4_amp"))
    assert [(row["name"], row["status"], row["reason"]) for row in recorder.rows] == [
        (lab, "skipped", "not installed here: no_such_package") for lab in ("lab1_ddp", "lab4_amp")
    ]
    recorder = Recorder("own_gpus")
    own_gpus.measure(recorder, TINY)
    assert [row["status"] for row in recorder.rows] == ["skipped"]


def test_a_lab_whose_solution_loses_points_is_a_failed_row():
    record = {
        "world_size": 3,
        "sandboxed": True,
        "seconds": 20.0,
        "criteria": [{"name": "a", "status": "PASS"}, {"name": "b", "status": "BLOCKED"}],
    }
    recorder = Recorder("labs")
    labs.report(recorder, "lab", record, 61.0, gpus=1)
    record["criteria"].append({"name": "c", "status": "WRONG"})
    labs.report(recorder, "lab", record, 59.0, gpus=1)
    right, slow, wrong, quick = recorder.rows
    assert (right["status"], wrong["status"]) == ("ok", "failed")
    assert "'c': 'WRONG'" in wrong["reason"]
    assert right["detail"]["blocked"] == ["b"]
    assert right["detail"]["a_gpu_per_rank"] is False
    assert (slow["met"], quick["met"]) == (False, True)


@pytest.mark.nightly
def test_a_lab_is_graded_where_nothing_is_installed(monkeypatch):
    """As on a machine that has Python, the packages, and a copy of this folder."""
    monkeypatch.setattr(labs, "is_installed", lambda: False)
    recorder = Recorder("labs", deadline_s=time.monotonic() + 240)
    labs.measure(recorder, TINY, labs=("lab4_amp",))
    own_gpus.measure(recorder, TINY, labs=("bonus_zero",))
    assert [row["status"] for row in recorder.rows] == ["ok", "ok", "ok"], recorder.rows
    assert recorder.rows[0]["detail"]["criteria"] == len(get_lab("lab4_amp").criteria)


# ---------------------------------------------------------------------------------------- on a GPU

# As small as shows anything on a GPU.
SMALL = replace(
    TINY,
    device="cuda",
    matmul=(256,),
    ceiling_n=4096,
    compile_backend="inductor",
    stage_bytes=64 * MIB,
    stage_matmul=4096,
    monitor_s=2.0,
    world_sizes=(1, 2, 3),
)


@pytest.mark.gpu
@pytest.mark.parametrize("part", MEASURED)
def test_parts_on_a_gpu(part):
    recorder = Recorder(part)
    importlib.import_module(f"gpu.{part}").measure(recorder, SMALL)
    for row in recorder.rows:
        check_row(row)
    assert [row for row in recorder.rows if row["status"] != "ok"] == []


@pytest.mark.gpu
def test_it_knows_the_gpu():
    machine = runner.describe()
    assert machine["num_devices"] == torch.cuda.device_count()
    assert machine["devices"][0] == torch.cuda.get_device_name(0)
    assert all(machine[key] for key in ("torch", "cuda", "driver", "python", "nccl"))
    assert machine["why_none"] is None
