"""Near-identical submissions: found whatever was renamed, and not among honest ones."""

from __future__ import annotations

import textwrap

import nbformat
import pytest
from course import LAB, ROOT
from made_records import hand_in, made_record, make_course, stub_grading
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from autograder.__main__ import main
from autograder.course.course import Course
from autograder.proof.zoo import load_zoo
from autograder.report.authored import read_class
from autograder.report.page import Part, write_page
from autograder.report.similar import (
    MAX_ROWS,
    MIN_RUNS,
    Pair,
    course_answers,
    find_similar,
    rows,
    similar_in_class,
)
from autograder.submission.class_run import ClassRun

GIVEN = "import torch\nimport torch.distributed as dist\n"
STUB = "def average(model):\n    raise NotImplementedError('not written yet')\n"
TASK = '''
def average(model):
    """Averages."""
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    start = 0
    for p in model.parameters():
        if p.grad is not None:
            count = p.grad.numel()
            p.grad.copy_(flat[start:start + count].view_as(p.grad))
            start += count
'''
DISGUISED = '''
# my own work
def average(net):
    """Quite another text, with other words."""


    buffer = torch.cat(
        [weight.grad.reshape(-1) for weight in net.parameters() if weight.grad is not None]
    )  # all in one
    dist.all_reduce(buffer)
    buffer /= dist.get_world_size()
    offset = 0
    for weight in net.parameters():
        if weight.grad is not None:
            size = weight.grad.numel()
            weight.grad.copy_(buffer[offset : offset + size].view_as(weight.grad))
            offset += size
'''
OTHER = """
def average(model):
    world_size = dist.get_world_size()
    works = []
    for name, p in model.named_parameters():
        if not p.requires_grad or p.grad is None:
            print("nothing to do for", name)
            continue
        p.grad.div_(world_size)
        works.append(dist.all_reduce(p.grad, async_op=True))
    while works:
        works.pop(0).wait()
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    return model, world_size, {"parameters": sum(p.numel() for p in model.parameters())}
"""


def notebook(task=STUB, *more):
    def meta(name, **flags):
        return {"nbgrader": {"grade_id": name, "locked": False, "solution": False} | flags}

    return new_notebook(
        cells=[
            new_markdown_cell("# A lab"),
            new_code_cell(GIVEN, metadata=meta("imports", locked=True)),
            new_code_cell(task, metadata=meta("task1", solution=True)),
            *(new_code_cell(source) for source in more),
            new_code_cell("check('a')", metadata=meta("a", grade=True, locked=True)),
        ]
    )


def found(works, ours=None, near=0.85):
    return find_similar(works, notebook(), ours, near=near)


def test_names_comments_and_layout_do_not_matter():
    [pair] = found({"ada": notebook(TASK), "kim": notebook(DISGUISED), "lea": notebook(OTHER)})
    assert (pair.one, pair.other, pair.share, pair.cells) == ("ada", "kim", 1.0, ("task1",))


def test_a_helper_in_another_cell_is_found_too():
    half = TASK.index("    start = 0")
    helper = "def spread(model, flat):\n" + TASK[half:]
    split = notebook(TASK[:half] + "    spread(model, flat)\n", helper)
    [pair] = found({"ada": notebook(TASK), "kim": split}, near=0.7)
    assert pair.cells == ()  # the task's cell is another, most of the text is not


def test_honest_ones_and_the_untouched_template_are_not_shown():
    works = {"ada": notebook(TASK), "lea": notebook(OTHER), "max": notebook(), "zoe": notebook()}
    assert found(works) == []
    short = "def average(model):\n    for p in model.parameters(): dist.all_reduce(p.grad)\n"
    assert found({"ada": notebook(short), "kim": notebook(short)}) == []  # too little to tell


def test_one_sign_that_differs_is_a_difference_of_the_cell():
    changed = notebook(TASK.replace("flat /= dist", "flat *= dist"))
    [pair] = found({"ada": notebook(TASK), "kim": changed})
    assert pair.share < 1
    assert pair.cells == ()


def test_what_the_template_gives_does_not_count():
    mine = "\n".join(f"value_{i} = torch.zeros({i}, {i + 1}, {i + 2})" for i in range(30))
    works = {"ada": notebook(STUB, mine), "kim": notebook(STUB, mine)}
    assert len(found(works)) == 1
    master = notebook(STUB, mine)
    assert find_similar(works, master) == []


def test_the_idiom_of_a_class_does_not_count():
    """Ten different notebooks with the same part in each, which is how it is done."""
    own = "\n".join(f"{{}}_{i} = compute(values, {{}} + {i}, 'step', {{}})" for i in range(20))
    works = {
        f"s{n}": notebook(TASK, own.replace("{}", "x").replace("compute", f"torch.fn{n}"))
        for n in range(10)
    }
    assert found(works, near=0.5) == []
    few = {name: works[name] for name in ("s0", "s1", "s2")}
    assert len(found(few, near=0.5)) == 3


def test_half_a_class_that_copied_is_no_idiom():
    works = {f"s{i}": notebook(TASK) for i in range(10)}
    assert len(found(works)) == 45
    lone = {f"own{i}": notebook(OTHER.replace("works", f"jobs.list{i}")) for i in range(3)}
    assert len(found(works | lone)) >= 45


def test_copies_of_our_answers_are_named_however_many_there_are():
    works = {f"s{i:02}": notebook(TASK if i % 2 else DISGUISED) for i in range(16)}
    works |= {f"other{i}": notebook(OTHER) for i in range(2)}
    pairs = found(works, {"the solution": notebook(TASK)})
    assert [pair.one for pair in pairs if pair.ours] == [f"s{i:02}" for i in range(16)]
    assert all(pair.ours for pair in pairs[:16])  # first: a long list is cut at its end


def test_an_earlier_terms_submission_is_found(tmp_path):
    course = make_course(tmp_path)
    old = hand_in(course, "old", textwrap.dedent(TASK))
    target = course.build / "earlier" / "fall25" / "old" / old.name
    target.parent.mkdir(parents=True)
    old.rename(target)
    new = hand_in(course, "ada", textwrap.dedent(DISGUISED))
    run = ClassRun(course, LAB, 3, sandboxed=False)
    [pair] = similar_in_class(run, read_class(run, [("ada", new)]))
    assert (pair.one, pair.other, pair.ours) == ("ada", "fall25: old", True)


def test_ours_are_compared_and_the_nearest_is_named():
    ours = {"the solution": notebook(OTHER), "tests/zoo: right": notebook(TASK)}
    [pair] = found({"ada": notebook(DISGUISED)}, ours)
    assert (pair.one, pair.other, pair.ours) == ("ada", "tests/zoo: right", True)


def test_scripts_that_a_cell_writes_are_compared():
    script = "%%writefile train.py\n" + GIVEN + TASK + "average(torch.nn.Linear(1, 1))\n"
    other = "%%writefile train.py\n" + GIVEN + OTHER
    works = {"ada": notebook(STUB, script), "kim": notebook(STUB, script.replace("flat", "f"))}
    [pair] = found(works | {"lea": notebook(STUB, other)})
    assert (pair.one, pair.other) == ("ada", "kim")


@pytest.mark.parametrize(
    "source",
    ["def (:\n" * 200, "x = '''" + "a" * 1000, "(" * 5000, "\0" * 500, "!ls\n%time x = 1\n" * 50],
)
def test_what_is_no_python_stops_nothing(source):
    works = {"ada": notebook(source), "kim": notebook(TASK), "lea": notebook(DISGUISED)}
    assert ("kim", "lea") in {(pair.one, pair.other) for pair in found(works)}


# --- with a lab ---------------------------------------------------------------------------------


def test_right_submissions_that_are_written_differently_stay_apart():
    course = Course(ROOT)
    right = {e.name: e.notebook for e in load_zoo(LAB, "reference", "right_*")}
    pairs = find_similar(right, course.master(LAB))
    apart = {"right_grad_views", "right_tensor_hooks", "right_futures", "right_engine_callback"}
    assert not {pair.one for pair in pairs} & apart
    answers = course_answers(ClassRun(course, LAB, 3, sandboxed=False))
    assert {"the solution", "tests/zoo: right_futures"} <= answers.keys()
    work = {"eve": answers["tests/zoo: right_futures"]}
    [pair] = find_similar(work, course.master(LAB), answers)
    assert (pair.other, pair.share) == ("tests/zoo: right_futures", 1.0)


def test_files_that_cannot_be_read_are_left_out(tmp_path):
    course = make_course(tmp_path)
    (tmp_path / "broken.ipynb").write_text("{")
    one = hand_in(course, "ada", textwrap.dedent(TASK))
    other = hand_in(course, "kim", textwrap.dedent(DISGUISED))
    files = [("ada", one), ("kim", other), ("lea", tmp_path / "broken.ipynb")]
    run = ClassRun(course, LAB, 3, sandboxed=False)
    [pair] = similar_in_class(run, read_class(run, files))
    assert (pair.one, pair.other) == ("ada", "kim")


def test_the_report_has_a_row_per_pair_and_nothing_of_a_student_runs(tmp_path):
    pairs = [Pair("<script>x</script>", "kim", 0.934, ("task7_ddp", "task3"))]
    write_page([Part([made_record("kim")], rows(pairs))], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Near-identical submissions" in page
    assert "<script>" not in page
    assert "93 %" in page
    assert "task7_ddp, task3" in page
    write_page([Part([made_record("kim")])], tmp_path / "report.html")
    assert "Near-identical" not in (tmp_path / "report.html").read_text()
    many = rows([Pair(f"s{i}", "t", 1.0, ()) for i in range(MAX_ROWS + 7)])
    assert len(many) == MAX_ROWS + 1
    assert many[-1][0] == "and 7 more pairs"


def test_grading_a_class_puts_them_into_its_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTOGRADER_COURSE", str(tmp_path))
    course = make_course(tmp_path)
    stub_grading(monkeypatch)
    hand_in(course, "ada", textwrap.dedent(TASK))
    hand_in(course, "kim", textwrap.dedent(DISGUISED))
    grade = ["grade", str(tmp_path / "handed_in"), "--lab", LAB, "--no-gradebook"]
    assert main(grade) == 0
    assert "1 near-identical pair," in capsys.readouterr().out
    page = (course.build / "report.html").read_text()
    assert "Near-identical submissions" in page
    assert MIN_RUNS > 10
    assert nbformat.read(tmp_path / "handed_in" / "ada" / f"{LAB}.ipynb", as_version=4)
