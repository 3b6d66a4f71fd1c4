"""No submission of the attack corpus gets a point that it has not earned, or touches another's.

`make test` grades those with a line `ci: yes`, one or more of each group, and `make nightly` all
(about half an hour on two cores). `python tests/helpers/attack_grader.py FOLDER NAME` grades one
and shows what is wrong with it.
"""

from __future__ import annotations

import dataclasses
import html.parser
import json
import shutil

import pytest
from attack_corpus import CRITERIA, bases, load_attacks
from attack_grader import AttackCourse, reference
from course import TestCourse
from leftovers import assert_nothing_left, find_leftovers

from autograder.box.sandbox import probe_support
from autograder.submission.intake import read_submission
from autograder.submission.outputs import MAX_DEPTH, Tidier
from minidist.kernel import magics

ATTACKS = {attack.title: attack for attack in load_attacks()}
needs_box = pytest.mark.skipif(not probe_support().works, reason="no sandbox")


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A course for attacks; last comes a right submission."""
    before = find_leftovers()
    course = AttackCourse.make(tmp_path_factory.mktemp("attacks") / "course")
    yield course
    last = course.grade(reference())
    assert last.problems + course.finish() == []
    assert last.record.score == 100
    assert_nothing_left(before)


@needs_box
@pytest.mark.parametrize(
    "title",
    [pytest.param(t, marks=[pytest.mark.nightly] * (not a.in_ci)) for t, a in ATTACKS.items()],
)
def test_an_attack_comes_to_nothing(attacked, title):
    assert attacked.grade(ATTACKS[title]).problems == []


@needs_box
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("title", ["fair/quits_in_own_cells", "fair/ends_its_ranks_later"])
def test_twenty_runs_give_the_same_marks(attacked, title):
    for turn in range(20):
        again = dataclasses.replace(ATTACKS[title], name=f"{ATTACKS[title].name}-{turn}")
        again.notebook["metadata"]["turn"] = turn  # else the journal has its record already
        assert attacked.grade(again).problems == [], turn


@pytest.mark.parametrize("title", [t for t, a in ATTACKS.items() if a.invalid])
def test_files_that_are_refused(title, tmp_path):
    attack = ATTACKS[title]
    intake = read_submission(attack.write(tmp_path), bases()["starter"])
    assert intake.notebook is None
    assert attack.invalid in (intake.invalid or "")


@pytest.mark.parametrize("title", [t for t, a in ATTACKS.items() if a.same_as])
def test_what_intake_drops_or_repairs(title, tmp_path):
    """The notebook that is run is the same to the last byte, so the grade is, too."""
    attack = ATTACKS[title]
    intake = read_submission(attack.write(tmp_path), bases()["starter"])
    plain = tmp_path / "plain.ipynb"
    plain.write_text(json.dumps(bases()[attack.same_as]))
    assert intake.notebook == read_submission(plain, bases()["starter"]).notebook


def test_the_corpus_covers_what_it_has_to():
    groups = {attack.group for attack in ATTACKS.values()}
    assert len(ATTACKS) >= 80
    assert groups >= {
        "metadata",
        "hooks",
        "shadowing",
        "patching",
        "searching",
        "importing",
        "seeds",
        "stealing",
        "messages",
        "alone",
        "emulated",
        "lingering",
        "bombs",
        "signals",
        "network",
        "kernel",
        "output",
        "files",
        "pickles",
        "fair",
    }
    assert {attack.group for attack in ATTACKS.values() if attack.in_ci} >= groups - {
        "alone",
        "patching",
        "pickles",
    }
    for attack in ATTACKS.values():
        if attack.group == "fair":
            assert attack.passes == set(CRITERIA), attack.title


# --- what an instructor opens ---------------------------------------------------------------------


class _Page(html.parser.HTMLParser):
    """Notes where the mark of the corpus's scripts is anything but text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.found: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "style"):
            self.inside.append(tag)
        for name, value in attrs:
            if "OWNED" in (value or "") or (name == "srcdoc"):
                self.found.append(f"<{tag} {name}={value}>")
            if (value or "").strip().lower().startswith("javascript:"):
                self.found.append(f"<{tag} {name}={value}>")
        if tag in ("iframe", "object", "embed", "form"):
            self.found.append(f"<{tag}>")

    def handle_endtag(self, tag: str) -> None:
        if self.inside and tag == self.inside[-1]:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        if self.inside and "OWNED" in data:
            self.found.append(f"<{self.inside[-1]}>{data[:80]}")


@needs_box
@pytest.mark.slow
def test_pages_and_tables_are_safe_to_open(tmp_path_factory):
    course = TestCourse.make(tmp_path_factory.mktemp("course"))
    titles = [t for t, a in ATTACKS.items() if a.group == "output"]
    for title in titles:
        ATTACKS[title].write(course.root / "class" / title.partition("/")[2])
    course.grade(str(course.root / "class"))
    pages = list((course.root / "build" / "nbgrader" / "feedback").rglob("*.html"))
    assert len(pages) == len(titles)
    for page in [*pages, course.root / "build" / "report.html"]:
        text = page.read_text("utf-8")
        assert "OWNED" in text or page.name == "report.html" or "formulas" in str(page)
        assert _Page(text).found == [], page
        if page.name == "report.html":  # in a browser it is nothing; a person may `cat` this one
            assert "\x1b" not in text, page
    table = (course.root / "build" / "grades.csv").read_text("utf-8")
    assert not [cell for cell in table.replace("\n", ",").split(",") if cell[:1] in "=+@" and cell]
    shutil.rmtree(course.root)


# --- parts of the grader that an attack has shown the need of -------------------------------------


def test_magics_cannot_change_the_ranks_of_a_grader():
    for code in (
        "%restart_ranks 5\nx",
        "%ranks\n%restart_ranks 2\nx",
        "%restart_ranks 5\n%%rank 2\nx",
    ):
        plan = magics.read(code, 3, fixed=True)
        assert (plan.restart, plan.count) == (False, None)
        assert plan.code.endswith("x")
    with pytest.raises(magics.MagicError):
        magics.read("%restart_ranks 5\n%%rank 4\nx", 3, fixed=True)


@pytest.mark.parametrize("number", ["²", "①", "9" * 5000, "-1", "1-²", ""])
def test_odd_numbers_are_an_error_of_the_cell(number):
    for magic in ("%%rank", "%restart_ranks"):
        if magic == "%restart_ranks" and not number:
            continue
        with pytest.raises(magics.MagicError):
            magics.read(f"{magic} {number}\nx", 3)


def test_outputs_are_bounded_and_can_be_written():
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook

    deep: list = []
    for _ in range(500):
        deep = [deep]
    cell = new_code_cell("x", execution_count=1)
    kinds = [
        {"output_type": "stream", "name": "stdout", "text": "\ud800"},
        {
            "output_type": "display_data",
            "data": {"application/json": deep, "\udfff": 7},
            "metadata": 3,
        },
        {"output_type": "error", "ename": "x", "evalue": 7, "traceback": []},
        {"output_type": "nonsense"},
        "no output at all",
        {"output_type": "execute_result", "data": {}, "metadata": {}, "execution_count": "<b>"},
    ]
    cell.outputs, cell.execution_count = kinds, "<script>"
    Tidier().tidy(cell)
    assert [o.output_type for o in cell.outputs] == ["stream", "display_data", "execute_result"]
    assert json.dumps(cell.outputs[1]).count("[") <= MAX_DEPTH + 1
    assert cell.execution_count is None
    nbformat.writes(new_notebook(cells=[cell])).encode()

    tidier = Tidier(max_bytes=1000)
    for number in range(3):
        cell.outputs = [{"output_type": "stream", "name": "stdout", "text": "x" * 600}]
        tidier.tidy(cell)
        assert ("not kept" in json.dumps(cell.outputs)) == (number > 0)
