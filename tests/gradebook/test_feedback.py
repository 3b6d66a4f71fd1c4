"""The feedback page: what is lost and why, all that is shown, nothing that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pages import problems_on_a_phone

from autograder.criteria import get_lab
from autograder.criteria.criterion import Status, Verdict
from autograder.report.feedback import (
    Answer,
    Feedback,
    FeedbackExporter,
    question_of,
    read_check,
)
from autograder.report.safe_html import MAX_FORMULAS, markdown

LAB = get_lab("lab1_ddp")
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPj/HwADAgH/"
SVG = '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)> [x](javascript:alert(1))"
SUMMED = (
    "expected -0.0149 at [0, 0], got -0.0447 "
    + "(54 of 54 values are off) " * 4
    + "That is 3 times the mean: the gradients were summed, not averaged."
)


def graded(name: str, status: Status, score: float, message: str = "") -> NotebookNode:
    """A check's cell as nbgrader's GetGrades leaves it."""
    criterion = LAB[name]
    verdict = Verdict(
        criterion=name,
        status=status,
        points=score,
        max_points=criterion.points,
        message=message,
        ranks=(status, status, Status.PASS),
    )
    about = {"grade": True, "grade_id": name, "locked": True, "solution": False}
    about |= {"score": score, "points": criterion.points}
    metadata = {"nbgrader": about, "minidist": {"verdict": verdict.record()}}
    return new_code_cell(f'check("{name}", it)', metadata=metadata)


def of_kind(cell: NotebookNode, **about: object) -> NotebookNode:
    cell.metadata["nbgrader"] = about
    return cell


def page_of(cells: list[NotebookNode]) -> str:
    checks = [read_check(LAB, c) for c in cells if "verdict" in c.metadata.get("minidist", {})]
    feedback = Feedback(
        lab=LAB,
        student="kim <script>",
        score=sum(check.score or 0 for check in checks if check),
        max_score=100,
        late_penalty=5,
        checks=[check for check in checks if check],
        answers=[
            Answer("reflect_1", question_of("**1. Why?**\n\nYOUR ANSWER"), None, 2, True),
            Answer("reflect_2", "2. Who? " + EVIL, 1.5, 2, True),
            Answer("reflect_3", "3. When?", 0, 2, False),
        ],
    )
    notebook = new_notebook(cells=cells)
    return FeedbackExporter().from_notebook_node(notebook, {"feedback": feedback})[0]


def notebook() -> list[NotebookNode]:
    """What a student's notebook may hold, good and bad."""
    outputs = [
        new_output("stream", name="stdout", text="\x1b[31mred\x1b[0m\x1b]0;title\x07\n" + EVIL),
        new_output("display_data", {"image/png": PNG, "text/plain": "<Figure>"}),
        new_output("display_data", {"image/svg+xml": SVG}),
        new_output("execute_result", {"text/html": f"<table><tr><td>1</table>{EVIL}"}),
        new_output("display_data", {"application/javascript": "alert(1)", "text/plain": "js"}),
        new_output("display_data", {"text/latex": "$x$", "text/plain": "latex as text"}),
        new_output("error", ename="E", evalue="v", traceback=["\x1b[0;31mE\x1b[0m: " + EVIL]),
    ]
    answer = new_markdown_cell(
        "**1. Why?**\n\n![mine](attachment:a.png) ![lost](attachment:b.png)"
        rf" $\frac{{1}}{{N}}$ $\href{{javascript:alert(1)}}{{y}}$ {EVIL}",
        attachments={"a.png": {"image/png": PNG}},
        id="reflect_1",
    )
    return [
        new_markdown_cell("# Lab\n\n|a|b|\n|-|-|\n|1|2|\n\n```\nwide\n```\n\n$$x = 1 < 2$$"),
        of_kind(new_code_cell("import os"), locked=True, solution=False, grade=False),
        of_kind(
            new_code_cell("x = 1  # \u202eolleh", outputs=outputs),
            locked=False,
            solution=True,
            grade=False,
            comment=f"Well. {EVIL}",
        ),
        new_code_cell("%%rank 0\nfor i in range(3): pass"),
        new_code_cell("class A:\n    '''text'''\n    y = 2.0\n" + "z = " + "1 + " * 100 + "1"),
        graded("setup", Status.PASS, 5),
        graded("ddp_gradients", Status.WRONG, 0, SUMMED + "\x1b[2J\u202e</pre>" + EVIL),
        graded("ddp_overlap", Status.BLOCKED, 0, "no GPU is here"),
        of_kind(answer, grade=True, grade_id="reflect_1", locked=False, solution=True),
    ]


def test_the_page_says_what_is_lost_and_why():
    page = page_of(notebook())
    text = " ".join(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL).split())
    head, _, rest = text.partition("The notebook, as it ran")
    assert "score 5 of 100 handed in late −5" in head
    assert "answers that a person will read 1" in head
    assert f"{LAB['ddp_gradients'].title} 0 of 8" in head
    assert SUMMED in head
    assert "rank 0 WRONG rank 1 WRONG rank 2 PASS" in head
    assert f"reread “{LAB['ddp_gradients'].task}”" in head
    assert "1. Why? not graded yet" in head
    assert "1.5 of 2" in head
    assert "3. When? not answered" in head
    assert "no GPU is here – " in head
    assert "Test cell" not in page
    for shown in ("red", "latex as text", "mine", "lost", "Well.", "Code that was given"):
        assert shown in page
    assert "data:image/png;base64," + PNG in page
    assert "2 of 2" not in rest
    assert '<span class="k">for</span>' in page  # below %%rank as well


@pytest.mark.parametrize("points", [5, 2.67])
def test_a_check_that_passed_with_fewer_points_says_why(points):
    page = page_of([graded("setup", Status.PASS, points), graded("ddp_gradients", Status.WRONG, 0)])
    assert ("count less, in proportion" in page) is (points < 5)


def test_nothing_that_a_student_wrote_runs_or_hides():
    page = page_of(notebook())
    assert not re.search(r"<(script|iframe|object|form|link|base)\b", page)
    for tag in re.findall(r"<[a-z][^>]*>", page):
        assert not re.search(r"\son\w+\s*=", re.sub(r'"[^"]*"', '""', tag)), tag
    for target in re.findall(r'\b(?:href|src)="([^"]*)"', page):
        assert target.startswith(("#", "data:image/"))
    assert "⟨U+202E⟩" in page
    assert not re.search(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", page
    )
    assert "default-src 'none'" in page


def test_one_reason_for_many_checks_is_told_once():
    names = [criterion.name for criterion in LAB.criteria][:6]
    lost = page_of([graded(name, Status.NOT_RUN, 0, "cell 3 ended the ranks") for name in names])
    assert lost.partition("The notebook")[0].count("cell 3 ended the ranks") == 1
    invalid = page_of([graded(name, Status.INVALID, 0, "it is not JSON") for name in names])
    assert invalid.partition("The notebook")[0].count("it is not JSON") == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_reads_well(browser, tmp_path: Path, theme: str):
    path = tmp_path / "page.html"
    path.write_text(page_of(notebook()), encoding="utf-8")
    assert problems_on_a_phone(browser, path, theme) == []


def test_formulas_are_drawn_without_a_script_and_bounded_in_number():
    shown = markdown({}, r"$\frac{a}{b}$ and `$c$` and \begin{equation}d\end{equation}")
    assert shown.count("<math") == 2
    assert "<code>$c$</code>" in shown
    many = markdown({}, "$x$ " * (MAX_FORMULAS + 10))
    assert (many.count("<math"), many.count("<code>x</code>")) == (MAX_FORMULAS, 10)
