"""What came out, for people: a table in the terminal, a CSV and one page of HTML.

All take grading records (the JSON of ``autograder grade --json``). Their texts come in part from
submissions, so nothing of them reaches a terminal, a spreadsheet or a browser as more than text.
"""

from __future__ import annotations

import csv
import html
import os
import re
import statistics
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

Record = dict[str, Any]


class Mark(NamedTuple):
    """How a status is shown: never by colour alone."""

    symbol: str
    style: str
    meaning: str


MARKS = {
    "PASS": Mark("✓", "green", "right on every rank"),
    "WRONG": Mark("✗", "red", "ran, and gave a wrong answer"),
    "STUDENT_ERROR": Mark("!", "yellow", "the student's code raised an error"),
    "TIMEOUT": Mark("∞", "magenta", "no answer in time: a hang or an endless loop"),
    "RANK_LOST": Mark("†", "bright_red", "a rank's process ended"),
    "NOT_RUN": Mark("·", "bright_black", "the check was never reached"),
    "INVALID": Mark("–", "bright_black", "not a notebook that can be graded"),
    "BLOCKED": Mark("○", "cyan", "needs hardware that is not here; costs nothing"),
    "INFRA": Mark("?", "bright_yellow", "the grader itself failed; will be tried again"),
}
_UNKNOWN = Mark("?", "bright_yellow", "unknown")
_NOT_MISSED = frozenset({"PASS", "BLOCKED"})
_NOT_GRADED = frozenset({"INVALID", "INFRA"})
_MESSAGE_CHARS = 6000
# Terminal sequences: CSI, then OSC/DCS/APC/PM/SOS with their text, then any other two-byte escape.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)


def clean(text: object, limit: int = _MESSAGE_CHARS) -> str:
    """Text without anything that a terminal acts on, or that reorders or hides what is read."""
    plain = _ESCAPES.sub("", str(text)).expandtabs(4).replace("\r\n", "\n").replace("\r", "\n")
    plain = "".join(
        c for c in plain if c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs")
    )
    return plain if len(plain) <= limit else plain[:limit] + " […]"


def reason(record: Record) -> str:
    """One line on why points are missing; empty when none are."""
    missed = [c for c in record["criteria"] if _is_missed(c)]
    if not missed:
        return ""
    first = missed[0]
    lines = clean(first["message"]).strip().splitlines()
    said = lines[0] if lines else MARKS.get(first["status"], _UNKNOWN).meaning
    if _ungraded(record):
        return f"{first['status']}: {said}"
    more = f" (+{len(missed) - 1} more)" if len(missed) > 1 else ""
    return f"{clean(first['name'])}{more}: {said}"


def rich_table(records: Sequence[Record]) -> Table:
    """The class on a terminal of 100 columns: one line per submission."""
    labs = sorted({f"{clean(r['lab'])} on {r['world_size']} ranks" for r in records})
    table = Table(
        title=", ".join(labs), box=box.SIMPLE_HEAD, expand=True, title_style="bold", pad_edge=False
    )
    widest = max([6, *(len(record["criteria"]) for record in records)])
    scores = max([5, *(len(_score(record)) for record in records)])
    table.add_column("Student", no_wrap=True, min_width=8, max_width=20, overflow="ellipsis")
    table.add_column("Score", justify="right", no_wrap=True, min_width=scores)
    table.add_column("Checks", no_wrap=True, min_width=widest)
    table.add_column("Seconds", justify="right", no_wrap=True, min_width=7)
    table.add_column("Why", no_wrap=True, overflow="ellipsis", ratio=1)
    for record in records:
        marks = Text()
        for criterion in record["criteria"]:
            mark = MARKS.get(criterion["status"], _UNKNOWN)
            marks.append(mark.symbol, mark.style)
        table.add_row(
            Text(clean(record["student"])),
            Text(_score(record), "bold green" if _share(record) == 1 else "bold"),
            marks,
            f"{record['seconds']:.1f}",
            Text(reason(record)),
        )
    used = {c["status"] for r in records for c in r["criteria"]}
    caption = Text(justify="left")
    if warning := _unsandboxed(records):
        caption.append(f"{warning}\n", "bold red")
    for status, mark in MARKS.items():
        if status in used:
            caption.append(f"{mark.symbol} ", mark.style).append(f"{status}  ")
    if len(orders := {tuple(c["name"] for c in r["criteria"]) for r in records}) == 1:
        caption.append("\nchecks: " + " ".join(clean(name) for name in orders.pop()))
    table.caption = caption
    return table


def write_csv(records: Sequence[Record], path: Path) -> None:
    """One row per submission; per criterion its points and its status."""
    names = _criteria(records)
    head = ["student", "submission", "lab", "world_size", "score", "max_score", "seconds"]
    head += ["sandboxed", "reason", *names, *(f"{name} status" for name in names)]
    with _replacing(path) as file:
        writer = csv.writer(file)
        writer.writerow(map(_spreadsheet, head))
        for record in records:
            by_name = {c["name"]: c for c in record["criteria"]}
            row = [_spreadsheet(clean(record[key])) for key in ("student", "submission", "lab")]
            row += [record[key] for key in ("world_size", "score", "max_score", "seconds")]
            row += [str(bool(record["sandboxed"])).lower(), _spreadsheet(reason(record))]
            for key in ("points", "status"):
                row += [by_name[name][key] if name in by_name else "" for name in names]
            writer.writerow(row)


def _spreadsheet(text: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@", "|", "%")) else text


def write_html(
    records: Sequence[Record],
    path: Path,
    similar: Sequence[Sequence[str]] = (),
    suspicious: Sequence[Sequence[str]] = (),
) -> None:
    """One page without scripts or external assets: summary, matrix, and messages per student.

    Args:
        similar: rows of `similar.rows`.
        suspicious: rows of `suspicious.rows`.
    """
    labs = ", ".join(sorted({clean(r["lab"]) for r in records})) or "no submissions"
    ranks = ", ".join(sorted({str(r["world_size"]) for r in records}))
    warning = _unsandboxed(records)
    parts = [
        f"<header><h1>{_esc(labs)}</h1>",
        f"<p class=sub>{len(records)} submissions, graded on {_esc(ranks)} ranks</p></header>",
        f"<p class=warning role=note>{_esc(warning)}</p>" if warning else "",
        _tiles(records),
        "<div class=cards>",
        _distribution(records),
        _most_missed(records),
        _slowest(records),
        "</div>",
        _matrix(records),
        _suspicious(suspicious),
        _similar(similar),
        "<section><h2>What went wrong, student by student</h2>",
        *(_details(record, number) for number, record in enumerate(records)),
        "</section>",
    ]
    with _replacing(path) as file:
        file.write(
            _PAGE.format(
                title=_esc(labs),
                style=Path(__file__).with_suffix(".css").read_text(),
                body="\n".join(parts),
            )
        )


# --- parts of the page ------------------------------------------------------------------------


def _tiles(records: Sequence[Record]) -> str:
    graded = [r for r in records if not _ungraded(r)]
    shares = [100 * _share(r) for r in graded]
    tiles = [("submissions", str(len(records)))]
    if shares:
        tiles += [("mean", f"{statistics.mean(shares):.0f} %")]
        tiles += [("median", f"{statistics.median(shares):.0f} %")]
        tiles += [("full marks", str(sum(share == 100 for share in shares)))]
    for status, label in (("INVALID", "not gradable"), ("INFRA", "grader failed")):
        if number := sum(_ungraded(r) == status for r in records):
            tiles.append((label, str(number)))
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles)
    return f"<dl class=tiles>{items}</dl>"


def _distribution(records: Sequence[Record]) -> str:
    bins = [0] * 11
    for record in records:
        if not _ungraded(record):
            bins[int(10 * _share(record) + 1e-9)] += 1
    names = [f"{10 * i}–{10 * i + 9} %" for i in range(10)] + ["100 %"]
    rows = [(name, str(number), number) for name, number in zip(names, bins, strict=True)]
    return _bars("Scores", "score", "submissions", rows[::-1])


def _most_missed(records: Sequence[Record]) -> str:
    graded = [r for r in records if not _ungraded(r)]
    missed = Counter(c["name"] for r in graded for c in r["criteria"] if _is_missed(c))
    rows = [(name, f"{n} of {len(graded)}", n) for name, n in missed.most_common(11)]
    return _bars("Criteria that most students miss", "criterion", "missed by", rows, len(graded))


def _slowest(records: Sequence[Record]) -> str:
    slow = sorted(records, key=lambda r: -r["seconds"])[:11]
    rows = [(r["student"], f"{r['seconds']:.1f} s", r["seconds"]) for r in slow]
    return _bars("Slowest", "student", "time", rows)


def _bars(
    title: str, what: str, value: str, rows: Sequence[tuple[str, str, float]], top: float = 0
) -> str:
    """A bar chart that is a table."""
    if not rows:
        return f"<section class=card><h2>{title}</h2><p class=sub>none</p></section>"
    top = max([top, *(size for *_, size in rows)]) or 1
    body = "".join(
        f"<tr><th scope=row>{_esc(name)}</th><td class=num>{_esc(label)}</td>"
        f'<td class=bar aria-hidden=true><i style="width:{100 * size / top:.1f}%"></i></td></tr>'
        for name, label, size in rows
    )
    head = f"<thead class=unseen><tr><th>{what}</th><th>{value}</th><td></td></tr></thead>"
    return f"<section class=card><h2>{title}</h2><table class=bars>{head}{body}</table></section>"


def _matrix(records: Sequence[Record]) -> str:
    names = _criteria(records)
    head = "".join(f"<th scope=col class=turned><span>{_esc(name)}</span></th>" for name in names)
    rows = []
    for number, record in enumerate(records):
        by_name = {c["name"]: c for c in record["criteria"]}
        cells = "".join(_mark_cell(name, by_name.get(name)) for name in names)
        flag = "" if _boxed(record) else " <b class=flag>UNSANDBOXED</b>"
        rows.append(
            f"<tr><th scope=row><a class=name href=#s{number}>{_esc(record['student'])}</a>{flag}"
            f"</th><td class=num>{_esc(_score(record))}</td>{cells}"
            f"<td class=num>{record['seconds']:.1f}</td></tr>"
        )
    used = {c["status"] for r in records for c in r["criteria"]}
    legend = "".join(
        f"<li><span class='mark {status}'>{mark.symbol}</span> <b>{status}</b> {mark.meaning}</li>"
        for status, mark in MARKS.items()
        if status in used
    )
    return (
        "<section><h2>Every student, every criterion</h2><div class=scroll><table class=matrix>"
        "<caption class=unseen>Status of every criterion per student</caption>"
        f"<thead><tr><th scope=col>student</th><th scope=col class=num>score</th>{head}"
        f"<th scope=col class=num>seconds</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"</div><ul class=legend>{legend}</ul></section>"
    )


def _suspicious(rows: Sequence[Sequence[str]]) -> str:
    """Evidence for a person; nothing where there is none."""
    if not rows:
        return ""
    body = "".join(
        f"<tr><th scope=row>{_esc(student)}</th><td>{_esc(where)}</td><td>{_esc(what)}</td></tr>"
        for student, where, what in rows
    )
    return (
        "<section><h2>Worth a look</h2><p class=sub>For a person to look at, no verdict: names "
        "that the course's own solution of the task does without, and ranks that ended in checks."
        "</p><div class=scroll><table class=findings><thead><tr><th scope=col>student</th>"
        "<th scope=col>where</th><th scope=col>what</th></tr></thead>"
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _similar(rows: Sequence[Sequence[str]]) -> str:
    """Near-identical submissions; nothing where there are none."""
    if not rows:
        return ""
    body = "".join(
        f"<tr><th scope=row>{_esc(one)}</th><td>{_esc(other)}</td><td class=num>{_esc(share)}</td>"
        f"<td>{_esc(cells)}</td></tr>"
        for one, other, share, cells in rows
    )
    return (
        "<section><h2>Near-identical submissions</h2><p class=sub>For a person to look at: names, "
        "comments, layout and the template are left out, and short tasks have few right answers."
        "</p><div class=scroll><table class=findings><thead><tr><th scope=col>student</th>"
        "<th scope=col>and</th><th scope=col class=num>in common</th>"
        f"<th scope=col>cells that are the same</th></tr></thead><tbody>{body}</tbody></table>"
        "</div></section>"
    )


def _mark_cell(name: str, criterion: Record | None) -> str:
    if criterion is None:
        return "<td></td>"
    tip = f"{name}: {criterion['status']}, {_points(criterion)}"
    return f'<td title="{_esc(tip)}">{_mark(criterion["status"])}</td>'


def _mark(status: str) -> str:
    known = status if status in MARKS else "INFRA"
    return (
        f"<span class='mark {known}' aria-hidden=true>{MARKS[known].symbol}</span>"
        f"<span class=unseen>{_esc(status)}</span>"
    )


def _details(record: Record, number: int) -> str:
    missed = [c for c in record["criteria"] if c["status"] != "PASS"]
    passed = [c["name"] for c in record["criteria"] if c["status"] == "PASS"]
    groups: dict[tuple[str, ...], list[Record]] = {}
    for criterion in missed:  # what is the same for several is said once
        ranks = (r["status"] for r in criterion["ranks"])
        key = (criterion["status"], clean(criterion["message"]), *ranks)
        groups.setdefault(key, []).append(criterion)
    whole = len(groups) == 1 and len(missed) == len(record["criteria"]) > 1
    rows = "".join(_finding(criteria, whole) for criteria in groups.values())
    table = "<p>Nothing: every criterion passed.</p>"
    if rows:
        table = (
            "<table class=findings><thead><tr><th scope=col>criterion</th><th scope=col>status</th>"
            f"<th scope=col>what happened</th></tr></thead><tbody>{rows}</tbody></table>"
        )
    done = f"<p class=sub>Passed: {_esc(', '.join(passed))}</p>" if passed else ""
    flag = "" if _boxed(record) else " <b class=flag>UNSANDBOXED</b>"
    return (
        f"<details id=s{number}><summary><span class=who>{_esc(record['student'])}</span>"
        f"<span class=num>{_esc(_score(record))}</span>{flag}"
        f"<span class=why>{_esc(reason(record)) or 'all right'}</span></summary>"
        f"{table}{done}<p class=sub>{_esc(record['submission'])}</p></details>"
    )


def _finding(criteria: Sequence[Record], whole: bool) -> str:
    """A row for criteria that ended alike; `whole`: they are all that there are."""
    status, message = criteria[0]["status"], clean(criteria[0]["message"])
    names = "<br>".join(
        f"<b>{_esc(c['name'])}</b> <small>{_esc(_points(c))}</small>" for c in criteria
    )
    if whole:
        names = f"<b>all {len(criteria)} criteria</b>"
    ranks = "".join(
        f"<li>rank {int(r['rank'])} {_mark(r['status'])} <small>{_esc(r['status'])}</small></li>"
        for r in criteria[0]["ranks"]
    )
    chips = f"<ul class=ranks>{ranks}</ul>" if ranks else ""
    said = message.strip() or MARKS.get(status, _UNKNOWN).meaning
    return (
        f"<tr><th scope=row>{names}</th><td class=status>{_mark(status)} <small>{_esc(status)}"
        f"</small></td><td><pre>{_esc(said)}</pre>{chips}</td></tr>"
    )


# --- helpers ----------------------------------------------------------------------------------


def _esc(text: object) -> str:
    return html.escape(clean(text), quote=True)


def _criteria(records: Sequence[Record]) -> list[str]:
    """Names of all criteria, in the order in which they first come up."""
    return list(dict.fromkeys(c["name"] for r in records for c in r["criteria"]))


def _share(record: Record) -> float:
    return record["score"] / record["max_score"] if record["max_score"] else 0.0


def _score(record: Record) -> str:
    return f"{record['score']:g} / {record['max_score']:g}"


def _points(criterion: Record) -> str:
    extra = " extra" if criterion.get("extra") else ""
    return f"{criterion['points']:g} of {criterion['max_points']:g}{extra}"


def _is_missed(criterion: Record) -> bool:
    """Whether it cost points; extra ones cost none."""
    return criterion["status"] not in _NOT_MISSED and not criterion.get("extra")


def _ungraded(record: Record) -> str:
    """INVALID or INFRA when that is all there is, else empty."""
    statuses = {c["status"] for c in record["criteria"]}
    return statuses.pop() if len(statuses) == 1 and statuses <= _NOT_GRADED else ""


def _boxed(record: Record) -> bool:
    """Whether what ran, ran in the sandbox; nothing of an invalid notebook runs."""
    return bool(record["sandboxed"]) or _ungraded(record) == "INVALID"


def _unsandboxed(records: Sequence[Record]) -> str:
    number = sum(not _boxed(r) for r in records)
    if not number:
        return ""
    return (
        f"UNSANDBOXED: {number} of {len(records)} submissions ran with the grader's own rights. "
        "Their scores hold only if their authors are trusted."
    )


class _replacing:
    """A text file that appears under its name only when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Any:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, self._name = tempfile.mkstemp(dir=self._path.parent, prefix=".writing-")
        self._file = open(descriptor, "w", encoding="utf-8", newline="")
        return self._file

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        if kind is None:
            os.chmod(self._name, 0o644)
            os.replace(self._name, self._path)
        else:
            os.unlink(self._name)


_PAGE = """<!doctype html>
<html lang=en>
<head>
<meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1">
<meta http-equiv=Content-Security-Policy
  content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'">
<title>{title}: grading report</title>
<style>{style}</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""
