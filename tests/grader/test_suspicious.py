"""Evidence for a person: what is shown, and what is not."""

from __future__ import annotations

import ast
import json

import nbformat
import pytest
from attack_corpus import load_attacks
from course import ROOT
from made_records import made_record

from autograder.authoring.notebooks import build_notebook
from autograder.criteria import lab_names
from autograder.proof.zoo import load_zoo
from autograder.report.reaching import reached
from autograder.report.similar import find_similar
from autograder.report.suspicious import evidence_in_record, find_evidence, rows, usual_in
from autograder.submission.intake import read_submission

READY_MADE = {
    ("lab1_ddp", "right_torch_ddp"): ("task7_ddp", "DistributedDataParallel"),
    ("lab3_fsdp", "right_torch"): ("task3_fsdp", "fully_shard"),
    ("lab4_amp", "right_torch"): ("task2_scaler", "GradScaler"),
    ("lab6_profiling", "right_torch_reducer"): ("task5_buckets", "Reducer"),
    ("bonus_powersgd", "right_torch_hook"): ("task5_class", "powerSGD_hook"),
    ("bonus_zero", "right_torch"): ("task4_zero1", "ZeroRedundancyOptimizer"),
    ("bonus_pipeline", "right_torch"): ("task4_pipeline", "Schedule1F1B"),
    ("bonus_tensor_parallel", "right_dtensor"): ("task1_f_and_g", "DTensor"),
}


def solution_of(lab):
    return build_notebook(ROOT / "solutions" / lab / f"{lab}.py")


@pytest.mark.parametrize("lab", lab_names())
def test_the_courses_own_answers_are_not_suspicious(lab):
    for entry in load_zoo(lab, "reference", "starter"):
        assert find_evidence("ada", entry.notebook, usual_in(solution_of(lab))) == []


@pytest.mark.parametrize(("lab", "name"), READY_MADE)
def test_ready_made_classes_are_shown_with_their_task_and_line(lab, name):
    notebook = load_zoo(lab, name)[0].notebook
    task, wanted = READY_MADE[lab, name]
    found = find_evidence("ada", notebook, usual_in(solution_of(lab)))
    (evidence,) = [e for e in found if e.what == f"uses torch's {wanted}"]
    assert (evidence.student, evidence.task) == ("ada", task)
    cell = next(c for c in notebook.cells if c.id == task)
    assert wanted in cell.source.split("\n")[evidence.line - 1]
    assert ("ada", f"{task}, line {evidence.line}", evidence.what) in rows(found)


@pytest.mark.parametrize(
    ("title", "what"),
    [
        ("searching/frames", "uses _getframe"),
        ("searching/proc", "names /proc"),
        ("searching/garbage_collector", "uses get_objects"),
        ("importing/the_oracle", "imports from autograder"),
        ("hooks/check_rebound", "gives the name check another meaning"),
        ("alone/through_files", "names /dev/shm"),
    ],
)
def test_looking_around_is_shown(title, what):
    attack = next(a for a in load_attacks() if a.title == title)
    found = find_evidence("ada", _as_read(attack), usual_in(solution_of("lab1_ddp")))
    assert what in {e.what for e in found}, found


REACHES = {  # code, in two cells -> what is said of its last line
    ("import time", "time.sleep = lambda _: None"): "patches time.sleep",
    ("import time as clock", "x = 1\nclock.perf_counter = clock.time = None"): "patches time.time",
    ("import time", "t = time\nt.monotonic = abs"): "patches time.monotonic",
    ("import time", "setattr(time, 'time_ns', abs)"): "patches time.time_ns",
    ("import time", "time.__dict__['sleep'] = abs"): "patches time.sleep",
    ("import time", "vars(time).update(sleep=abs)"): "patches time.sleep",
    ("import time", "del time.sleep"): "patches time.sleep",
    ("import time", "for time.sleep in [abs]: pass"): "patches time.sleep",
    ("", "__import__('time').sleep = abs"): "patches time.sleep",
    ("import sys", "sys.modules['time'].sleep = abs"): "patches time.sleep",
    ("import sys", "sys.modules.get('time').sleep = abs"): "patches time.sleep",
    ("from unittest import mock", "mock.patch('time.sleep', abs).start()"): "patches time.sleep",
    ("from unittest import mock\nimport time", "mock.patch.object(time, 'sleep')"): (
        "patches time.sleep"
    ),
    ("", "exec('import time\\ntime.sleep = abs')"): "patches time.sleep",
    ("from minidist import emulate", "emulate.simulate = abs"): "patches minidist.emulate.simulate",
    ("from minidist.emulate import Link", "Link.seconds = abs"): (
        "patches minidist.emulate.Link.seconds"
    ),
    ("from minidist import emulate", "c = emulate.current_client()\nc.charge = abs"): (
        "patches minidist.emulate.current_client.charge"
    ),
    ("", "from minidist.emulate.client import Client"): "reaches into minidist.emulate.client",
    ("", "import minidist.emulate.broker as b"): "reaches into minidist.emulate.broker",
    ("from minidist import emulate", "x = emulate.client.Client"): (
        "reaches into minidist.emulate.client"
    ),
    ("from minidist import emulate", "x = emulate.current_client"): (
        "reaches into minidist.emulate.current_client"
    ),
    ("from minidist import emulate", "x = getattr(emulate, 'client')"): (
        "reaches into minidist.emulate.client"
    ),
    ("import importlib", "importlib.import_module('minidist.kernel')"): (
        "reaches into minidist.kernel"
    ),
    ("import sys", "sys.modules['autograder.inside.probe']"): "reaches into autograder.inside",
    ("import autograder", "x = autograder.inside.probe"): "reaches into autograder.inside",
    ("from autograder import check", "check.__globals__['x']"): (
        "reaches into autograder.check.__globals__"
    ),
    ("from autograder import check", "check.__self__"): "reaches into autograder.check.__self__",
    ("import minidist", "x = minidist.__file__"): "reaches into minidist.__file__",
}


@pytest.mark.parametrize("cells", REACHES)
def test_patching_and_reaching_into_the_machinery_is_shown_with_its_line(cells):
    new = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    found = find_evidence("ada", new, usual_in(nbformat.v4.new_notebook()))
    assert (cells[1].count("\n") + 1, REACHES[cells]) in {(e.line, e.what) for e in found}, found


def test_every_module_of_the_emulated_cluster_is_machinery_unless_labs_use_it():
    """A new file there counts, too."""
    modules = {path.stem for path in (ROOT / "lib/minidist/emulate").glob("*.py")} - {"__init__"}
    inner = {
        name for name in modules if any(reached(ast.parse(f"import minidist.emulate.{name}"), {}))
    }
    assert modules - inner == {"clusters", "plan", "simulate", "teach", "trace"}


@pytest.mark.parametrize(
    "source",
    [
        "import time\nstart = time.perf_counter()\nstart.x = 1",
        "import torch\ntorch.backends.cudnn.benchmark = True",
        "import torch._inductor.config\ntorch._inductor.config.debug = True",
        "from minidist import emulate\nc = emulate.Cluster()\nc.nodes = 3\nc.links[0] = 2",
        "import time as t\ndef f(t):\n    t.grad = None\n    t.data['x'] = 1",
        "import numpy as np\nx = np.zeros(3)\nx[0] = 1",
        "from minidist import emulate\nemulate.run(print, 2, emulate.clusters.ONE)",
        "from autograder import check\ncheck('setup', 1)",
        "import minidist\nprint(minidist.__version__)",
        "x = {}\nx['time'] = 1\nx.update(time=2)",
        "import torch.distributed as dist\ndist.all_reduce = print",
    ],
)
def test_settings_and_things_of_ones_own_are_not(source):
    new = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    assert find_evidence("ada", new, usual_in(nbformat.v4.new_notebook())) == []


def test_an_attack_on_the_clocks_is_shown_line_by_line():
    attack = next(a for a in load_attacks() if a.title == "patching/clocks")
    found = find_evidence("ada", _as_read(attack), usual_in(solution_of("lab1_ddp")))
    lines = {e.what: e.line for e in found}
    assert lines["patches time.sleep"] == lines["patches time.time"] + 2


def _as_read(attack):
    return nbformat.from_dict(json.loads(json.dumps(attack.notebook)))


def test_honest_habits_are_not(tmp_path):
    master = build_notebook(ROOT / "solutions" / "lab1_ddp" / "lab1_ddp.py")
    for attack in load_attacks():
        if attack.group == "fair":
            intake = read_submission(attack.write(tmp_path / attack.name), master)
            assert intake.notebook is not None
            assert find_evidence("ada", intake.notebook, usual_in(master)) == [], attack.title


def test_ranks_that_ended_are_shown_where_there_are_points():
    (evidence,) = evidence_in_record(made_record("ada", {"script": "RANK_LOST"}))
    assert evidence.what == "ranks ended during 1 check: script"
    assert evidence_in_record(made_record("ada", {"*": "RANK_LOST"})) == []
    assert evidence_in_record(made_record("ada")) == []


def test_code_that_is_no_python_is_passed_over():
    import nbformat

    sources = ("def (", "(" * 5000, "\0", "x = 1", "%%x\n" * 3000, "%a\n" * 495, "\n" * 99_999)
    odd = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    assert find_evidence("ada", odd, usual_in(nbformat.v4.new_notebook())) == []
    assert find_similar({"ada": odd, "bea": odd}, nbformat.v4.new_notebook()) == []


def test_magics_hide_nothing_and_move_no_line():
    cell = nbformat.v4.new_code_cell(
        "%%rank 0\n\n%matplotlib inline\n!cat /proc/1/maps\nimport ctypes"
    )
    notebook = nbformat.v4.new_notebook(cells=[cell])
    found = find_evidence("ada", notebook, usual_in(nbformat.v4.new_notebook()))
    assert [(e.line, e.what) for e in found] == [(4, "names /proc"), (5, "uses ctypes")]


def test_more_code_than_is_looked_at_is_worth_a_look():
    cells = [nbformat.v4.new_code_cell(f"x = '{'y' * 99_000}'") for _ in range(5)]
    found = find_evidence(
        "ada", nbformat.v4.new_notebook(cells=cells), usual_in(nbformat.v4.new_notebook())
    )
    assert ["more that was not looked at" in e.what for e in found] == [True]
