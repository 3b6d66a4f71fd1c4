"""The comparison with stock graders: what they are given, and the table. Nothing is graded here."""

from __future__ import annotations

import ast
import io
import json
import zipfile
from pathlib import Path

import grading_peers as peers
import pytest
import stock_attacks
import stock_check
import stock_graders
import stock_notebooks as stock
from attack_corpus import CRITERIA, bases, load_attacks
from harness import find_benchmarks
from stock_table import Cell, Row, table

ROOT = Path(__file__).resolve().parents[2]

TITLES = {attack.title for attack in load_attacks()}


def _solution():
    path = ROOT / "solutions" / stock.LAB / f"{stock.LAB}.ipynb"
    return json.loads(path.read_text("utf-8"))


def _base(name):
    return json.loads(json.dumps(bases()[name]))


def _named(notebook):
    return {
        cell["metadata"]["nbgrader"]["grade_id"]: cell
        for cell in notebook["cells"]
        if "nbgrader" in cell["metadata"]
    }


def test_nbgraders_check_cells_hold_the_whole_test():
    cells = _named(stock.nbgrader_source(_solution(), 3))
    for name in CRITERIA:
        source = cells[name]["source"]
        begin, end = source.index("### BEGIN HIDDEN TESTS"), source.index("### END HIDDEN TESTS")
        tree = ast.parse(source)
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {"check", "_emulator"} <= defined
        call = ast.unparse(tree.body[-1])
        assert call == f"check({name!r}, {stock.subjects(_solution())[name]})"
        assert begin < source.index("\ndef check(") < source.index(f"\ncheck({name!r}") < end
        assert cells[name]["metadata"]["nbgrader"]["locked"]
        assert cells[name]["metadata"]["nbgrader"]["points"] > 0


def test_the_part_that_is_copied_is_the_function_that_is_read():
    space: dict = {}
    exec(compile(stock.check_source(), "cell", "exec"), space)
    assert space["check"].__code__.co_names == stock_check.check.__code__.co_names
    assert space["_emulator"].__code__.co_names == stock_check._emulator.__code__.co_names


_JUDGED = """\
import json, os, sys
code, checks = json.loads(open(sys.argv[1]).read())
space, found = {"__name__": "__main__"}, {}
for source in code:
    exec(source, space)
for name, subject in checks.items():
    try:
        space["check"](name, eval(subject, space))
        found[name] = ""
    except AssertionError as error:
        found[name] = str(error)
with open(f"{sys.argv[2]}{os.environ['RANK']}", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.parametrize(
    ("base", "passes"),
    [("reference", True), pytest.param("starter", False, marks=pytest.mark.nightly)],
)
def test_the_check_that_is_copied_judges_in_every_kind_of_world(base, passes, tmp_path):
    cells = _named(_base(base))
    names = ("imports", "helpers", "task1_setup", "task3_sampler", "bucket", "task7_ddp")
    code = [*(cells[name]["source"] for name in names), stock.check_source()]
    checks = {
        "setup": "(setup_distributed, cleanup)",
        "sampler_tail": "ShardSampler",
        "ddp_gradients": "DDP",
        "ddp_overlap": "DDP",
    }
    (tmp_path / "input").write_text(json.dumps([code, checks]))
    (tmp_path / "judged.py").write_text(_JUDGED)
    peers.torchrun(2, tmp_path, "judged.py", "input", "found")
    found = [json.loads((tmp_path / f"found{rank}").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0].keys() == checks.keys()
    assert all(said == "" if passes else "not written yet" in said for said in found[0].values()), (
        found[0]
    )


@pytest.mark.parametrize("grader", ["nbgrader", "otter"])
def test_a_student_is_not_handed_the_tests(grader):
    notebook = _base("reference")
    before = json.dumps(notebook)
    made = stock.submission(notebook, grader, 3)
    assert json.dumps(notebook) == before
    assert made["metadata"]["kernelspec"]["name"] == "torchrun-3"
    text = json.dumps(made)
    assert "draw_for" not in text
    assert 'check(\\"setup\\"' in text or grader == "nbgrader"
    cells, master = _named(made), _named(notebook)
    for name, cell in cells.items():
        if name not in CRITERIA and name != "imports":
            assert cell == master[name]
    left_out = set(master) - set(cells)
    assert all(name.startswith(("see_", "reflect_", "launch_")) for name in left_out), left_out
    assert set(CRITERIA) <= set(cells)


def test_otters_tests_look_up_the_students_names():
    with zipfile.ZipFile(io.BytesIO(stock.otter_archive(_solution()))) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert json.loads(files.pop("otter_config.json"))["lang"] == "python"
    assert set(files) == {f"tests/{name}.py" for name in CRITERIA}
    for text in files.values():
        ast.parse(text)
    assert "check('setup', (env['setup_distributed'], env['cleanup']))" in files["tests/setup.py"]
    assert "check('script', 'train_ddp.py')" in files["tests/script.py"]
    assert "@test_case(points=8.0, hidden=True)" in files["tests/train_steps.py"]


def test_only_attacks_that_somebody_has_looked_at_are_run():
    assert set(stock_attacks.SAMPLE) <= TITLES
    assert stock_attacks.ALLOWED <= TITLES
    for title in TITLES:
        reason = stock_attacks.why_not(title)
        if title.startswith(("bombs/", "network/")) or title in ("signals/kill_all",):
            assert reason.startswith("not run on a grader without a box: it "), title
        elif title.startswith("messages/"):
            assert reason.startswith("no such thing: "), title
        elif not title.startswith("fair/"):
            looked_at = "nobody has looked at it" not in reason
            assert looked_at, f"{title}: name it in benchmarks/stock_attacks.py"
    assert "nobody has looked at it" in stock_attacks.why_not("stealing/something_new")


def test_points_that_were_not_earned():
    gained = stock_graders.gained
    assert gained({"setup": 5.0, "script": 8.0}, frozenset({"setup", "script"})) == 0
    assert gained({"setup": 5.0, "script": 8.0}, frozenset({"setup"})) == 8
    assert gained({"setup": 150.0}, frozenset({"setup"})) == 145
    assert gained({}, frozenset({"setup"})) == 0


def test_what_counts_as_a_secret():
    lines = ["LEAKED: /course gradebook.db\nmore", f"LEAKED: {ROOT}/lib/minidist/x"]
    said = json.dumps(lines, ensure_ascii=False)  # as a notebook is written
    assert stock_graders.leaks(said, "searching") == ["LEAKED: /course gradebook.db"]
    assert stock_graders.leaks(said, "importing") == []
    assert stock_graders.leaks("nothing", "searching") == []


def test_a_classmate_has_done_two_tasks():
    cells, right = _named(stock_graders.classmate("# note")), _named(_base("reference"))
    assert cells["task3_sampler"]["source"] == right["task3_sampler"]["source"] + "\n# note"
    assert cells["task7_ddp"]["source"] != right["task7_ddp"]["source"]
    assert sum(stock_graders.POINTS[name] for name in stock_graders.CLASSMATE) == 23


def test_the_table():
    gone = Cell(note="BLOCKED: not installed")
    rows = [
        Row("reference", 100.0, {"ours": Cell(100.0), "nbgrader": Cell(100.0), "otter": gone}),
        Row(
            "a/one",
            0.0,
            {
                "ours": Cell(),
                "nbgrader": Cell(95.0, 95.0, harm=["x"]),
                "otter": gone,
            },
        ),
        Row(
            "a/two",
            5.0,
            {
                "ours": Cell(5.0),
                "nbgrader": Cell(graded=False, leaks=["LEAKED"]),
                "otter": gone,
            },
        ),
        Row(
            "b/one",
            0.0,
            {
                "ours": Cell(),
                "nbgrader": Cell(note="no such thing: it"),
                "otter": gone,
            },
        ),
    ]
    lines = table(rows, stock_graders.GRADERS).splitlines()
    assert lines[1].split() == ["reference", "100", "100", "points", "100", "points", "BLOCKED"]
    assert lines[3].split() == ["a/one", "0", "0", "+95", "class", "BLOCKED"]
    assert lines[4].split() == ["a/two", "5", "0", "0", "no", "grade", "secret", "BLOCKED"]
    assert lines[3].index("BLOCKED") == lines[4].index("BLOCKED") == lines[0].index("otter")
    assert "no such thing: it (b/one)" in lines
    assert Cell(note="not run on a grader without a box: it bites").text() == "not run"
    assert "BLOCKED: not installed" in lines
    assert (
        "ours      of 3 attacks 0 gained points (0 in all), 0 read secrets, 0 harmed" in lines[-3]
    )
    assert (
        "nbgrader  of 2 attacks 1 gained points (95 in all), 1 read secrets, 1 harmed" in lines[-2]
    )
    assert lines[-1] == "otter     nothing was run"
    assert all(row.blocked() for row in rows)
    for row in rows:
        assert Row.read(json.loads(json.dumps(stock_graders.dataclasses.asdict(row)))) == row


def test_make_bench_leaves_it_out():
    """`python benchmarks` runs what writes times; this takes long and prints outcomes."""
    names = [path.stem for path in find_benchmarks(ROOT / "benchmarks")]
    assert not [name for name in names if name.startswith("stock_")]
    times = ["collectives", "data_parallel", "emulated", "grading", "kernel", "pipeline", "zero"]
    assert names == times
