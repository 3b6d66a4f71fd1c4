"""The report: everything is in it, for the terminal, a spreadsheet and a browser, as plain text."""

from __future__ import annotations

import csv
import html.parser
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_records import make_course, stub_grading
from rich.console import Console

from autograder.criteria.criterion import Status, Verdict
from autograder.plain_text import MARKS, clean
from autograder.records.record import Record
from autograder.report.page import Part, write_page
from autograder.report.terminal import reason, rich_table, write_csv
from autograder.submission.find import Submission
from autograder.submission.without_run import not_graded

POINTS = {
    "setup": 5,
    "wrap_model": 5,
    "sampler_partition": 7,
    "sampler_tail": 6,
    "sampler_epoch": 5,
    "train_steps": 8,
    "train_epochs": 4,
    "train_loss": 5,
    "script": 8,
    "gradients_in_sync": 7,
    "ddp_weights": 5,
    "ddp_buffers": 3,
    "ddp_gradients": 8,
    "ddp_tied_frozen": 4,
    "ddp_unused": 4,
    "ddp_buckets": 5,
    "ddp_overlap": 5,
    "ddp_scaling": 6,
}
HANG = """cell 31 did not end within 25 s; fresh ranks were started for the next check.
  rank 0 waits in all_reduce (bucket 2), class DDP, cell 24, line 31
  rank 1 finished the cell
  rank 2 waits in all_reduce (bucket 2), class DDP, cell 24, line 31
Rank 1 never called the all_reduce that the others wait in."""


def record(
    student: str,
    seconds: float,
    lost: dict[str, Any] | None = None,
    *,
    boxed: bool = True,
    everything: tuple[str, str] | None = None,
) -> Record:
    """A grading record; `lost` maps a criterion to (status, message) or (…, statuses per rank)."""
    criteria = []
    for name, points in POINTS.items():
        status, message, *ranks = everything or (lost or {}).get(name, ("PASS", ""))
        statuses = ranks[0] if ranks else [] if everything else [status] * 3
        got = points if status == "PASS" else 0
        told = tuple(map(Status, statuses))
        criteria.append(Verdict(name, Status(status), got, points, message, told))
    return Record(
        submission=f"submitted/{student}/lab1_ddp/lab1_ddp.ipynb",
        student=student,
        lab="lab1_ddp",
        world_size=3,
        seconds=seconds,
        sandboxed=boxed,
        criteria=tuple(criteria),
    )


@pytest.fixture
def records() -> list[Record]:
    overlap = "the first all-reduce started after backward had ended (in virtual time 371 ms)."
    late = {
        "ddp_overlap": ("WRONG", overlap),
        "ddp_scaling": ("WRONG", "efficiency 0.71, expected at least 0.9: reduce earlier."),
    }
    mean = "0.weight: expected 0.4127 at [0, 1], got 1.2381 (6 of 6 values are off). A sum?"
    one = ["PASS", "WRONG", "PASS"]
    not_run = {n: ("NOT_RUN", "the check cell was not reached") for n in list(POINTS)[12:]}
    nothing = ("STUDENT_ERROR", "NotImplementedError: write this function")
    return [
        record("ada", 31.2),
        record("barbara", 29.8),
        record("edsger", 33.1, late),
        record("frances", 30.4, {"ddp_gradients": ("WRONG", mean), **late}),
        record(
            "grace",
            30.0,
            {
                "sampler_epoch": ("WRONG", "epochs 0 and 1 have the same order."),
                "train_epochs": ("WRONG", "set_epoch was not called."),
            },
        ),
        record(
            "john",
            57.9,
            {
                "ddp_gradients": ("TIMEOUT", HANG, ["TIMEOUT", "PASS", "TIMEOUT"]),
                "ddp_unused": ("TIMEOUT", HANG, ["TIMEOUT"] * 3),
            },
        ),
        record(
            "katherine",
            36.5,
            {"ddp_buffers": ("WRONG", "running_mean differs from rank 0's by 0.31.", one), **late},
        ),
        record(
            "ken",
            41.3,
            {
                "script": (
                    "RANK_LOST",
                    "rank 1 ended with exit status 1 (exit was called in cell 19).",
                    ["PASS", "RANK_LOST", "PASS"],
                ),
                **not_run,
            },
        ),
        record(
            "margaret",
            28.7,
            {
                "setup": (
                    "STUDENT_ERROR",
                    "\x1b[31mTypeError\x1b[0m: init_proces"
                    "s_group() got an unexpected keyword 'ranks'",
                )
            },
        ),
        record(
            "<script>alert('x')</script> \x1b[2J\u202eevil",
            12.4,
            {"wrap_model": ("WRONG", "</pre><img src=x onerror=alert(1)>\n=cmd()|'/c calc'!A0")},
            boxed=False,
        ),
        record(
            "sophie",
            0.1,
            everything=("INVALID", "the file is not JSON, so not a notebook"),
            boxed=False,
        ),
        record("untouched", 22.0, everything=nothing),
    ]


def _terminal(records: list[Record], width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system="truecolor").print(
        rich_table(records)
    )
    return out.getvalue()


def test_extra_points_lead_beyond_full_marks(tmp_path):
    """As on a GPU, whose criteria add to the score and not to what it is out of."""
    ada, barbara = record("ada", 31.2), record("barbara", 29.8)
    extra = Verdict("gpu", Status.PASS, 12, 12, "", extra=True)
    ada = replace(ada, criteria=(*ada.criteria, extra))
    write_page([Part([ada, barbara])], path := tmp_path / "report.html")
    page = path.read_text("utf-8")
    assert "<dt>full marks</dt><dd>2</dd>" in page
    assert "112 / 100" in page
    assert "112 / 100" in _terminal([ada, barbara])


def test_the_table_fits_a_terminal(records):
    shown = _terminal(records)
    assert "\x1b[2J" not in shown
    assert "\u202e" not in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert all(len(line) <= 100 for line in plain.splitlines())
    for part in ("edsger", "89 / 100", "✓" * 18, "33.1", "ddp_overlap (+1 more)", "TIMEOUT"):
        assert part in plain
    john = next(line for line in plain.splitlines() if "john" in line)
    assert "✓✓✓✓✓✓✓✓✓✓✓✓∞✓∞✓✓✓" in john
    assert "UNSANDBOXED: 1 of 12" in plain
    assert "UNSANDBOXED" not in _terminal(records[:9] + records[10:])
    assert _terminal([])


def test_reasons_are_one_line(records):
    assert reason(records[0]) == ""
    assert reason(records[5]).startswith("ddp_gradients (+1 more): cell 31 did not end")
    assert reason(records[10]) == "INVALID: the file is not JSON, so not a notebook"
    for r in records:
        assert "\n" not in reason(r)
    blocked = record("x", 1.0, {"ddp_scaling": ("BLOCKED", "needs two GPUs")})
    assert reason(blocked) == ""


def test_whom_the_grader_failed_has_no_score(tmp_path: Path):
    settings = stub_grading.class_run(make_course(tmp_path))
    ungraded = not_graded(Submission("ada", tmp_path / "a.ipynb"), settings, "no disk")
    write_csv([ungraded], tmp_path / "grades.csv")
    with (tmp_path / "grades.csv").open(newline="", encoding="utf-8") as file:
        [row] = csv.DictReader(file)
    assert {row["score"], *(row[name] for name in ungraded.by_name)} == {""}
    assert row["reason"] == "INFRA: no disk"
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(rich_table([ungraded]))
    write_page([Part([ungraded])], tmp_path / "report.html")
    for text in (console.export_text(), (tmp_path / "report.html").read_text("utf-8")):
        assert "– / 100" in text
        assert "0 / 100" not in text
        assert "0 of " not in text


def test_csv(records, tmp_path: Path):
    records[0] = replace(records[0], student="=HYPERLINK(1)")
    path = tmp_path / "build" / "grades.csv"
    write_csv(records, path)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert rows[0]["student"] == "'=HYPERLINK(1)"
    assert [float(row["score"]) for row in rows] == [r.score for r in records]
    assert rows[2]["ddp_overlap"] == "0"
    assert rows[2]["ddp_overlap status"] == "WRONG"
    assert rows[9]["student"] == "<script>alert('x')</script> evil"
    assert {row["sandboxed"] for row in rows} == {"true", "false"}
    assert "\x1b" not in path.read_text()
    write_csv([], path)
    assert path.read_text().startswith("student,submission")
    assert list(path.parent.iterdir()) == [path]


class _Page(html.parser.HTMLParser):
    """Collects tags and text, and checks that elements are closed in order."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def test_the_page_is_safe_and_complete(records, tmp_path: Path):
    path = tmp_path / "report.html"
    write_page([Part(records)], path)
    page = _Page(path.read_text())
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "form", "base"}
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
        assert "src" not in attributes
    assert "<script>alert('x')</script> evil" in page.text
    assert "</pre><img src=x onerror=alert(1)>" in page.text
    assert "\x1b" not in path.read_text()
    for r in records:
        for criterion in r.criteria:
            assert clean(criterion.message).strip() in page.text
    assert page.text.count("UNSANDBOXED") == 3
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == [f"#{i}" for i in ids]
    assert len(ids) == 12


def test_the_page_counts_right(records, tmp_path: Path):
    path = tmp_path / "report.html"
    write_page([Part(records)], path)
    text = re.sub(r"<[^>]*>", " ", path.read_text())
    words = " ".join(text.split())
    # Three reduce late, ken's was not reached, one wrote nothing; the invalid one does not count.
    assert "ddp_overlap 5 of 11" in words
    assert "submissions 12 " in words
    assert "full marks 2 " in words
    assert "not gradable 1 " in words
    assert "john 57.9 s" in words
    assert words.count("all 18 criteria") == 2
    assert words.count("Rank 1 never called") == 2  # alike but for the ranks' statuses


@pytest.mark.parametrize("status", list(MARKS))
def test_every_status_can_be_shown(status: str, tmp_path: Path):
    one = [record("x", 1.0, {"setup": (status, "why")}), record("y", 1.0, everything=(status, "m"))]
    write_page([Part(one)], tmp_path / "a.html")
    write_csv(one, tmp_path / "a.csv")
    assert f"mark {status}'" in (tmp_path / "a.html").read_text()
    assert status in _terminal(one)
    assert len({mark.symbol for mark in MARKS.values()}) >= len(MARKS) - 1


def test_odd_records_do_not_break_it(tmp_path: Path):
    odd = replace(record("", 0.0), criteria=())
    other = record("x" * 300, 1e6, {"setup": ("WRONG", "m" * 100_000)})
    other = replace(other, lab="lab2_zero")
    for some in ([], [odd], [odd, other]):
        write_page([Part(some)], tmp_path / "a.html")
        write_csv(some, tmp_path / "a.csv")
        _terminal(some, 120)
    assert (tmp_path / "a.html").stat().st_size < 60_000


@pytest.mark.parametrize(
    ("dirty", "expected"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "alink"),
        ("a\x9b2Jb\x08c\x7f", "abc"),
        ("a\r\nb\rc\td", "a\nb\nc   d"),
        ("\u202eabc\u2066\ud800", "abc"),
        ("\x1b", ""),
        ("\x1b]unfinished", ""),
        (7, "7"),
    ],
)
def test_clean(dirty: object, expected: str):
    assert clean(dirty) == expected
