"""The results of a class as one HTML page for the instructor, without scripts or external assets.

Some texts come from submissions; every text goes through `_esc`.
"""

from __future__ import annotations

import html
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autograder.criteria.criterion import Status, Verdict
from autograder.files import write_whole
from autograder.plain_text import MARKS, clean
from autograder.records.record import Record
from autograder.report.terminal import (
    criteria_of,
    is_missed,
    reason,
    score_of,
    share_of,
    unsandboxed,
    was_boxed,
    why_ungraded,
)


@dataclass(frozen=True)
class Part:
    """What the page says about one lab.

    Args:
        similar: rows of `similar.rows`.
        suspicious: rows of `suspicious.rows`.
        left_out: student or folder of the class without a grade -> why.
        link: the lab's own page, if that page says more.
        feedback: student -> link to the feedback page.
        by_person: student -> points that a person gave, on top of the score.
    """

    records: Sequence[Record]
    similar: Sequence[Sequence[str]] = ()
    suspicious: Sequence[Sequence[str]] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    link: str = ""
    feedback: Mapping[str, str] = field(default_factory=dict)
    by_person: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The lab's name."""
        return ", ".join(sorted({clean(r.lab) for r in self.records})) or "no submissions"


def write_page(parts: Sequence[Part], path: Path) -> None:
    """Writes one page without scripts or external assets: summary, matrix, messages per student."""
    body, number = [], 0
    if len(parts) > 1:
        body.append(_overview(parts))
    for part in parts:
        body += _part(part, number)
        number += len(part.records)
    style = Path(__file__).with_suffix(".css").read_text("utf-8")
    title = ", ".join(part.title for part in parts)
    page = _PAGE.format(title=_esc(title), style=style, body="\n".join(body))
    write_whole(path, page.encode())


def _part(part: Part, first: int) -> list[str]:
    """The sections of one lab; `first` is the number of its first student on the page."""
    records = part.records
    ranks = ", ".join(sorted({str(r.world_size) for r in records}))
    more = f" · <a href={_esc(part.link)}>more on its own page</a>" if part.link else ""
    warning = unsandboxed(records)
    return [
        f"<header><h1>{_esc(part.title)}</h1>",
        f"<p class=sub>{len(records)} submissions, graded on {_esc(ranks)} ranks{more}</p>",
        "</header>",
        f"<p class=warning role=note>{_esc(warning)}</p>" if warning else "",
        _tiles(records),
        "<div class=cards>",
        _distribution(records),
        _most_missed(records),
        _slowest(records),
        "</div>",
        _matrix(part, first),
        _listed(*_LEFT_OUT, list(part.left_out.items())),
        _listed(*_SUSPICIOUS, part.suspicious),
        _listed(*_SIMILAR, part.similar),
        "<section><h2>What went wrong, student by student</h2>",
        *(
            _details(record, number, part.feedback.get(record.student, ""))
            for number, record in enumerate(records, first)
        ),
        "</section>",
    ]


def _overview(parts: Sequence[Part]) -> str:
    """Every student's score in every lab."""
    scores: dict[str, dict[str, str]] = {}
    for part in parts:
        for record in part.records:
            scores.setdefault(record.student, {})[part.title] = score_of(record)
    titles = [part.title for part in parts]
    head = "".join(f"<th scope=col class=num>{_esc(title)}</th>" for title in titles)
    rows = "".join(
        f"<tr><th scope=row>{_esc(name)}</th>"
        + "".join(f"<td class=num>{_esc(of.get(title, ''))}</td>" for title in titles)
        + "</tr>"
        for name, of in sorted(scores.items())
    )
    return (
        f"<section><h2>All labs</h2>{_SCROLLS}<table class=findings><thead><tr>"
        f"<th scope=col>student</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        "</section>"
    )


def _tiles(records: Sequence[Record]) -> str:
    shares = [100 * share_of(r) for r in records if r.score is not None]
    tiles = [("submissions", str(len(records)))]
    if shares:
        tiles += [("mean", f"{statistics.mean(shares):.0f} %")]
        tiles += [("median", f"{statistics.median(shares):.0f} %")]
        tiles += [("full marks", str(sum(share >= 100 for share in shares)))]
    for status, label in (("INVALID", "not gradable"), ("INFRA", "grader failed")):
        if number := sum(why_ungraded(r) == status for r in records):
            tiles.append((label, str(number)))
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles)
    return f"<dl class=tiles>{items}</dl>"


def _distribution(records: Sequence[Record]) -> str:
    bins = [0] * 11
    for record in records:
        if record.score is not None:
            bins[min(10, int(10 * share_of(record) + 1e-9))] += 1
    names = [f"{10 * i}–{10 * i + 9} %" for i in range(10)] + ["100 %"]
    rows = [(name, str(number), number) for name, number in zip(names, bins, strict=True)]
    return _bars("Scores", "score", "submissions", rows[::-1])


def _most_missed(records: Sequence[Record]) -> str:
    graded = [r for r in records if not why_ungraded(r)]
    missed = Counter(c.criterion for r in graded for c in r.criteria if is_missed(c))
    rows = [(name, f"{n} of {len(graded)}", n) for name, n in missed.most_common(11)]
    return _bars("Criteria that most students miss", "criterion", "missed by", rows, len(graded))


def _slowest(records: Sequence[Record]) -> str:
    slow = sorted(records, key=lambda r: -r.seconds)[:11]
    rows = [(r.student, f"{r.seconds:.1f} s", r.seconds) for r in slow]
    return _bars("Slowest", "student", "time", rows)


def _bars(
    title: str, what: str, value: str, rows: Sequence[tuple[str, str, float]], top: float = 0
) -> str:
    """A bar chart, made as an HTML table."""
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


def _matrix(part: Part, first: int) -> str:
    records, by_person = part.records, part.by_person
    names = criteria_of(records)
    head = "<th scope=col class=num>by hand</th>" if by_person else ""
    head += "".join(f"<th scope=col class=turned><span>{_esc(name)}</span></th>" for name in names)
    rows = []
    for number, record in enumerate(records, first):
        given = "" if why_ungraded(record) else by_person.get(record.student, "")
        cells = f"<td class=num>{_esc(given)}</td>" if by_person else ""
        cells += "".join(_mark_cell(record, name) for name in names)
        flag = "" if was_boxed(record) else " <b class=flag>UNSANDBOXED</b>"
        rows.append(
            f"<tr><th scope=row><a class=name href=#s{number}>{_esc(record.student)}</a>{flag}"
            f"</th><td class=num>{_esc(score_of(record))}</td>{cells}"
            f"<td class=num>{record.seconds:.1f}</td></tr>"
        )
    used = {c.status for r in records for c in r.criteria}
    legend = "".join(
        f"<li><span class='mark {status}'>{mark.symbol}</span> <b>{status}</b> {mark.meaning}</li>"
        for status, mark in MARKS.items()
        if status in used
    )
    note = "by hand: points for answers, given in formgrader, on top of the score"
    return (
        f"<section><h2>Every student, every criterion</h2>{_SCROLLS}<table class=matrix>"
        "<caption class=unseen>Status of every criterion per student</caption>"
        f"<thead><tr><th scope=col>student</th><th scope=col class=num>score</th>{head}"
        f"<th scope=col class=num>seconds</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"</div><ul class=legend>{legend}</ul>{f'<p class=sub>{note}</p>' if by_person else ''}"
        "</section>"
    )


_LEFT_OUT = (
    "Not graded",
    "Whoever is in the class and has no score, here and in the gradebook.",
    ("student", "why"),
)
_SUSPICIOUS = (
    "Worth a look",
    "For a person to look at, no verdict: names that the course's own solution of the task does "
    "without, and ranks that ended in checks.",
    ("student", "where", "what"),
)
_SIMILAR = (
    "Near-identical submissions",
    "For a person to look at: names, comments, layout and the template are left out, and short "
    "tasks have few right answers.",
    ("student", "and", "in common", "cells that are the same"),
)


def _listed(title: str, note: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A section with a table of text; empty if there are no rows."""
    if not rows:
        return ""
    kinds = [" class=num" if name == "in common" else "" for name in heads[1:]]
    head = f"<th scope=col>{heads[0]}</th>" + "".join(
        f"<th scope=col{kind}>{name}</th>" for name, kind in zip(heads[1:], kinds, strict=True)
    )
    body = ""
    for first, *texts in rows:
        cells = (f"<td{k}>{_esc(text)}</td>" for text, k in zip(texts, kinds, strict=True))
        body += f"<tr><th scope=row>{_esc(first)}</th>{''.join(cells)}</tr>"
    return (
        f"<section><h2>{title}</h2><p class=sub>{note}</p>{_SCROLLS}<table class=findings>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _mark_cell(record: Record, name: str) -> str:
    criterion = record.by_name.get(name)
    if criterion is None:
        return "<td></td>"
    tip = f"{name}: {criterion.status}, {_points(criterion)}"
    return f'<td title="{_esc(tip)}">{_mark(criterion.status)}</td>'


def _mark(status: Status) -> str:
    return (
        f"<span class='mark {status}' aria-hidden=true>{MARKS[status].symbol}</span>"
        f"<span class=unseen>{status}</span>"
    )


def _details(record: Record, number: int, feedback: str) -> str:
    missed = [c for c in record.criteria if c.status != Status.PASS or c.message]
    passed = [c.criterion for c in record.criteria if c.status == Status.PASS]
    groups: dict[tuple[str, ...], list[Verdict]] = {}
    for criterion in missed:  # criteria with equal status and message share one row
        key = (criterion.status, clean(criterion.message), *criterion.ranks)
        groups.setdefault(key, []).append(criterion)
    whole = len(groups) == 1 and len(missed) == len(record.criteria) > 1
    rows = "".join(_finding(criteria, whole) for criteria in groups.values())
    table = "<p>Nothing: every criterion passed.</p>"
    if rows:
        table = (
            "<table class=findings><thead><tr><th scope=col>criterion</th><th scope=col>status</th>"
            f"<th scope=col>what happened</th></tr></thead><tbody>{rows}</tbody></table>"
        )
    done = f"<p class=sub>Passed: {_esc(', '.join(passed))}</p>" if passed else ""
    flag = "" if was_boxed(record) else " <b class=flag>UNSANDBOXED</b>"
    more = f' · <a href="{_esc(feedback)}">feedback that the student gets</a>' if feedback else ""
    # A browser opens <details> around a link's target, but not <details> that is the target.
    return (
        f"<details><summary><span class=who>{_esc(record.student)}</span>"
        f"<span class=num>{_esc(score_of(record))}</span>{flag}"
        f"<span class=why>{_esc(reason(record)) or 'all right'}</span></summary>"
        f"<div id=s{number}>{table}{done}"
        f"<p class=sub>{_esc(record.submission)}{more}</p></div></details>"
    )


def _finding(criteria: Sequence[Verdict], whole: bool) -> str:
    """A row for criteria with equal results; `whole`: these are all criteria of the lab."""
    status, message = criteria[0].status, clean(criteria[0].message)
    names = "<br>".join(
        f"<b>{_esc(c.criterion)}</b> <small>{_esc(_points(c))}</small>" for c in criteria
    )
    if whole:
        names = f"<b>all {len(criteria)} criteria</b>"
    ranks = "".join(
        f"<li>rank {rank} {_mark(each)} <small>{each}</small></li>"
        for rank, each in enumerate(criteria[0].ranks)
    )
    chips = f"<ul class=ranks>{ranks}</ul>" if ranks else ""
    said = message.strip() or MARKS[status].meaning
    return (
        f"<tr><th scope=row>{names}</th><td class=status>{_mark(status)} <small>{status}"
        f"</small></td><td><pre>{_esc(said)}</pre>{chips}</td></tr>"
    )


def _esc(text: object) -> str:
    return html.escape(clean(text), quote=True)


def _points(criterion: Verdict) -> str:
    extra = " extra" if criterion.extra else ""
    points = "–" if criterion.status == Status.INFRA else f"{criterion.points:g}"
    return f"{points} of {criterion.max_points:g}{extra}"


_SCROLLS = "<div class=scroll tabindex=0>"  # the keyboard can scroll it, too
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
