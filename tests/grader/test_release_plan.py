"""The term: which labs are used, when each is out, and what students lack meanwhile and why."""

from __future__ import annotations

import contextlib
import io
import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
from course import ROOT

from autograder.__main__ import main
from autograder.authoring import release
from autograder.criteria import get_lab, lab_names

LABS = [lab for lab in lab_names() if lab.startswith("lab")]
BONUSES = [lab for lab in lab_names() if lab not in LABS]
CALENDAR = """
[calendar]
timezone = "Europe/Berlin"
{unused}
[calendar.lab3_fsdp]
release = 2999-01-11
[calendar.lab2_accumulation]
release = 2020-01-10 08:00:00
due = 2020-01-24
solutions = 2999-02-01
"""


@pytest.fixture(scope="module")
def term(tmp_path_factory):
    """A course that uses no bonus; its release, with lab 1 over, and all that commands print."""
    root, folder = tmp_path_factory.mktemp("course"), tmp_path_factory.mktemp("students")
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "build", "course.toml", "work"):
            (root / path.name).symlink_to(path)
    unused = "\n".join(f"{lab}.used = false" for lab in BONUSES)
    (root / "course.toml").write_text(CALENDAR.format(unused=unused))
    # A lecture is not run: its cells have no outputs.
    write = partial(release.write_release, execute=lambda lecture, *_: lecture)

    def say(*arguments, columns):
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(io.StringIO()) as out,
        ):
            patch.setattr(release, "write_release", write)
            patch.setenv("AUTOGRADER_COURSE", str(root))
            patch.setenv("COLUMNS", str(columns))
            assert main(["release", *map(str, arguments)]) == 0
        return out.getvalue()

    said = say(folder, "--over", "lab1_ddp", "--without-solutions", columns=300)
    return SimpleNamespace(folder=folder, said=said, plan=say("--plan", columns=75))


def test_a_lab_that_is_not_used_is_not_handed_out_and_withholds_nothing(term):
    handed_out = {path.name for path in (term.folder / "labs").iterdir()}
    assert handed_out == set(LABS) - {"lab3_fsdp"}
    assert f"not used, says course.toml: {', '.join(BONUSES)}\n" in term.said
    for name in ("parallel/pipeline", "parallel/tensor", "collectives/ring.py", "seeding.py"):
        assert (term.folder / "lib" / "minidist" / name).exists()
    for name in ("02_collectives", "07_pipeline_parallelism", "08_tensor_sequence_context"):
        whole, given = (where / "notebooks" / f"{name}.ipynb" for where in (ROOT, term.folder))
        assert given.read_bytes() == whole.read_bytes()


def test_a_course_that_uses_no_lab_has_no_plan(tmp_path, monkeypatch, capsys):
    for name in ("labs", "nbgrader_config.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    unused = "\n".join(f"{lab}.used = false" for lab in lab_names())
    (tmp_path / "course.toml").write_text(f"[calendar]\n{unused}\n")
    monkeypatch.setenv("AUTOGRADER_COURSE", str(tmp_path))
    assert main(["release", "--plan"]) == 2
    assert "[calendar] uses no lab" in capsys.readouterr().err


def test_the_plan_says_what_is_out_when_and_why(term):
    lines = term.plan.splitlines()
    assert max(map(len, lines)) <= 75
    assert not any("…" in line for line in lines)
    assert any(line.split()[:3] == ["released", "due", "solutions"] for line in lines)
    dated = ["lab2_accumulation", "lab3_fsdp"]  # by date, after those that are out at once
    order = [*(lab for lab in LABS if lab not in dated), *dated]
    shown = [word for line in lines for word in line.split() if word in LABS]
    assert shown == 2 * order  # with the cells that wait, by lecture; and with dates and modules
    [first] = [k for k, line in enumerate(lines) if line.startswith(" 2020-01-10")]
    assert lines[first].split() == ["2020-01-10", "2020-01-25", "2999-02-01", "lab2_accumulation"]
    assert lines[first + 1].startswith(" 08:00 CET   00:00 CET   00:00 CET")
    assert "accumulation: parallel.accumulation" in lines[first + 1]
    text = " ".join(term.plan.split())
    for lab in LABS:
        for module, why in get_lab(lab).withheld.items():
            if module != "minidist.train.program":  # its package goes with it
                assert module.removeprefix("minidist.") in text
            assert f"{why}: " in text
    assert f"not used, says course.toml: {', '.join(BONUSES)}" in text


def test_each_lecture_says_until_when_its_cells_wait_and_why(term):
    rows = [line for line in term.said.splitlines() if "cells" in line]
    assert len(rows) > 3
    assert all(re.search(r" cells +lab\d_\w+.* {2}needs such a module", row) for row in rows)
    [batches] = [row for row in rows if "04_big_batches" in row]
    assert "lab2_accumulation (2999-02-01)" in batches
    assert "lab1_ddp" not in batches
    loop = next(line for line in term.said.splitlines() if "minidist.train " in line)
    assert loop.rstrip().endswith("its training loop")


def test_the_students_readme_says_why(term):
    lines = (term.folder / "README.md").read_text("utf-8").splitlines()
    assert "- `minidist.precision.scaler` (lab4_amp): loss scaling" in lines
    [line] = [line for line in lines if line.startswith("- lecture `04_big_batches`")]
    assert "lab2_accumulation" in line
    assert "needs the above" in line


def test_a_lab_that_is_over_comes_without_its_solution_if_you_say_so(term):
    assert not (term.folder / "solutions").exists()
    assert (term.folder / "lib" / "minidist" / "parallel" / "data" / "naive.py").is_file()
    lecture = json.loads((term.folder / "notebooks" / "03_data_parallelism.ipynb").read_text())
    assert "minidist.parallel.data" in json.dumps(lecture["cells"])


def test_the_weeks_of_the_front_page_have_one_lab_at_a_time_and_its_hours():
    """A lab's own text says how long it takes at most; lecture N is in week N."""
    page = (ROOT / "book" / "index.md").read_text("utf-8")
    rows = re.findall(
        r"^\| (\d) \| week (\d+) \| week (\d+) \| (.*) in (weeks? .*) \|$", page, re.M
    )
    assert len(rows) == len(LABS)
    busy = []
    lecture = dict(re.findall(r"^\| (\d+) \|.*\[Lab (\d),", (ROOT / "README.md").read_text(), re.M))
    for (number, start, end, hours, when), lab in zip(rows, LABS, strict=True):
        assert lab.startswith(f"lab{number}")
        assert lecture[start] == number  # handed out with its lecture, of which there is one a week
        weeks = [int(week) for week in re.findall(r"\d+", when)]
        assert weeks[0] >= int(start)
        assert weeks[-1] == int(end)
        busy += weeks
        text = (ROOT / "solutions" / lab / f"{lab}.py").read_text("utf-8")
        plan = re.search(r"^# Plan (?:\w+ to )?(\w+) hours", text, re.M)
        assert plan, lab
        most = {"four": "4", "seven": "7"}.get(plan[1], plan[1])
        assert float(hours.split()[-1]) * len(weeks) == float(most)
    assert busy == list(range(3, 14))
