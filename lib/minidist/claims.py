"""Claims: every number in a lecture is checked at the place where the lecture states it.

>>> traffic = 2 * (4 - 1) / 4 * 1000  # counted by a log of sends, say
>>> claim("a ring all-reduce of B bytes on n ranks sends 2(n-1)/n B per rank", traffic, 1500.0,
...       rtol=1e-9)  # doctest: +ELLIPSIS
✓ a ring all-reduce of B bytes on n ranks sends 2(n-1)/n B per rank: 1500

Its status:

- **verified**: measured or computed here, and equal to the expected value;
- **corrected**: somebody states a wrong value; `refutes=` names who, `said=` is that value and
  `why=` says why the value is wrong. The measured value must equal `expected` and NOT `said`;
- **cited**: a published figure that is not measured here; `authority=` names the publication.

`authority=` is the publication that states the right value, `refutes=` the text that states a wrong
one: a reader must be able to tell them apart.

`expected` is a number, an array, a bool, a string, a pair like `(">=", 0.9)`, or a function of the
measured value that returns a bool. Floats need `rtol=` (or `atol=`, or `exact=True`). NaN never
passes. `expected` and `measured` must not be the same object, because such a claim checks nothing;
nor may the claim stay true when the measured value is moved by twice its tolerance.

Its kind (`minidist.evidence`) is measured, derived or arithmetic. Arithmetic cannot fail: it is
listed and not counted. The kind is read from the source of the lecture; `kind=` can only weaken it.

A false claim raises `ClaimError`. `claims.registry` keeps every claim, true or false. If the
environment variable MINIDIST_CLAIMS names a file, each claim is also appended to this file as one
JSON line. `python -m minidist.claims FILE.jsonl LECTURE.py` prints the table, with the kinds that
the sources of the lectures give, and fails if a claim is false.
"""

from __future__ import annotations

import csv
import html
import inspect
import json
import math
import numbers
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from minidist import evidence
from minidist.comparing import (
    can_fail,
    compare,
    flat,
    is_comparison,
    looks_equal,
    same_object,
    show,
    tolerance_text,
)
from minidist.errors import MinidistError

STATUSES = ("verified", "corrected", "cited")


class ClaimError(MinidistError, AssertionError):
    """A claim is false."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One checked statement, in the form that is stored and shown."""

    text: str
    measured: str
    expected: str
    tolerance: str
    status: str
    passed: bool
    authority: str = ""
    refutes: str = ""
    said: str = ""
    why: str = ""
    kind: str = ""
    where: str = ""
    rank: int = 0

    @property
    def counts(self) -> bool:
        """Whether it is true, and could have been false: neither cited nor arithmetic."""
        return self.passed and self.status != "cited" and self.kind in ("measured", "derived")

    def __str__(self) -> str:
        mark = {"cited": "§"}.get(self.status, "✓") if self.passed else "✗"
        line = f"{mark} {self.text}: {self.measured}"
        # No "(expected ...)" for a cited figure (it was not measured) and for an exact match.
        exact = self.passed and self.tolerance == "exactly" and self.expected in self.measured
        if self.status != "cited" and not exact:
            line += f" (expected {' '.join(filter(None, (self.expected, self.tolerance)))})"
        if self.status == "corrected":
            line += f"; {self.refutes} says {self.said}: {self.why}"
        elif self.why:
            line += f": {self.why}"
        if self.authority:
            line += f" [{self.authority}]"
        return line

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = {"verified": "#1b7f4b", "corrected": "#9a5b00", "cited": "#4a5a8a"}[self.status]
        if not self.passed:
            colour = "#b00020"
        return (
            f'<div style="border-left:3px solid {colour};padding-left:.5em;margin:.2em 0">'
            f"{html.escape(str(self))}</div>"
        )


registry: list[Claim] = []


def claim(
    text: str,
    measured: Any,
    expected: Any = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    exact: bool = False,
    authority: str = "",
    status: str = "verified",
    refutes: str = "",
    said: Any = None,
    why: str = "",
    kind: str = "",
) -> Claim:
    """Check a statement, record it and return it (a notebook shows it as one line).

    Args:
        text: the statement, as a sentence without a full stop.
        measured: the value that was measured or computed here; for `cited` the published figure.
        expected: number(s), bool, string, `(operator, value)` or a function of the measured value.
        rtol: allowed |measured - expected| / |expected|. One of rtol, atol and exact is needed
            wherever floats are compared for equality.
        exact: compare floats exactly. Strings, and integers without rtol and atol, are always
            compared exactly.
        authority: the publication that states the right value; needed for `cited`.
        status: verified, corrected or cited.
        refutes, said, why: for `corrected`: who states the wrong value, that value, and why it is
            wrong. `why` may explain any claim.
        kind: weakens what the source of the lecture shows: "derived" or "arithmetic".

    Raises:
        ClaimError: the claim is false; the message has the statement, the expected value, the
            tolerance and the measured value.
        ValueError: the claim is not well formed, or it cannot fail.
    """
    _check_form(text, measured, expected, rtol, atol, exact)
    _check_words(text, expected, authority, status, refutes, said, why, kind)
    passed, expected_text = compare(measured, expected, rtol, atol, status)
    if status == "corrected" and passed and looks_equal(measured, said, rtol, atol):
        passed, expected_text = False, f"{expected_text}, and not the corrected {show(said)}"
    if passed and status != "cited" and not can_fail(measured, expected, rtol, atol):
        raise ValueError(
            f"claim {text!r} cannot fail: it stays true for all values near {show(measured)} "
            "that are twice the tolerance away"
        )
    comparison = isinstance(expected, tuple) or callable(expected) or status == "cited"
    result = Claim(
        text=text,
        measured=show(measured),
        expected=expected_text,
        tolerance="" if comparison else tolerance_text(rtol, atol, exact, measured),
        status=status,
        passed=passed,
        authority=authority,
        refutes=refutes,
        said="" if said is None else show(said),
        why=why,
        kind=kind,
        where=_where(),
        rank=int(os.environ.get("RANK", "0")),
    )
    _record(result)
    if not passed:
        raise ClaimError(
            f"claim is false: {text}; expected {result.expected}"
            f"{' ' + result.tolerance if result.tolerance else ''}, got {result.measured}"
        )
    return result


def table(claims: Iterable[Claim] | None = None) -> str:
    """All claims as text: verdict, kind, statement, value, sources, and the counts at the end."""
    rows = list(registry if claims is None else claims)
    lines = [
        f"{row.status if row.passed else 'FALSE':<10}"
        f"{'' if row.status == 'cited' else row.kind or 'unknown':<11}"
        f"{row.where:<28}{str(row)[2:]}"
        for row in rows
    ]
    made = [row for row in rows if row.status != "cited"]
    count = {kind: sum(r.passed and r.kind == kind for r in made) for kind in evidence.KINDS}
    unknown = sum(r.passed and r.kind not in evidence.KINDS for r in made)
    left_out = [f"{count['arithmetic']} arithmetic", f"{len(rows) - len(made)} cited"]
    left_out += [f"{unknown} of unknown kind"] if unknown else []
    return "\n".join(
        [
            *lines,
            f"{sum(row.counts for row in rows)} claims: {count['measured']} measured, "
            f"{count['derived']} derived; not counted: {', '.join(left_out)}; "
            f"{sum(r.counts and r.status == 'corrected' for r in rows)} correct a source, "
            f"{sum(not row.passed for row in rows)} false",
        ]
    )


def load(path: str | Path) -> list[Claim]:
    """Claims from a JSON-lines file.

    A claim that was run again counts once, with its last verdict. A claim that several ranks made
    also counts once; it is false if its last verdict on any rank is false.

    A .csv table of numbers in documents, with their verdicts, is returned row by row, unchanged."""
    if Path(path).suffix == ".csv":
        with Path(path).open(newline="", encoding="utf-8") as file:
            return [_from_document(row) for row in csv.DictReader(file)]
    found: dict[tuple[str, str, int], Claim] = {}
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = Claim(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a claim: {error}") from error
        found[row.where, row.text, row.rank] = row
    merged: dict[tuple[str, str], Claim] = {}
    for (where, text, _), row in found.items():
        if (where, text) not in merged or not row.passed:
            merged[where, text] = row
    return list(merged.values())


def with_kinds(claims: Iterable[Claim], lectures: Iterable[str | Path]) -> list[Claim]:
    """The claims with the kinds that the sources of the lectures (.py) give them.

    A claim that stands anywhere else keeps its kind."""
    found = {
        Path(path).stem: evidence.read(Path(path).read_text("utf-8"), where=str(path))
        for path in lectures
    }
    return [
        replace(row, kind=evidence.kind_of(row.text, found.get(_lecture_of(row), [])) or row.kind)
        for row in claims
    ]


def _lecture_of(row: Claim) -> str:
    return row.where.split(" [")[0].split(":")[0]


def _from_document(row: dict[str, str]) -> Claim:
    """A claim from a row of notebooks/claims.csv. The tests check the computation of the row."""
    unit = f" {row['unit']}" if row["unit"] else ""
    return Claim(
        text=row["says"],
        measured=f"{row['right']}{unit}",
        expected=row["right"],
        tolerance="exactly",
        status=row["verdict"],
        passed=True,
        authority=row["authority"],
        refutes="the document" if row["verdict"] == "corrected" else "",
        said=f"{row['stated']}{unit}",
        why=row["why"],
        kind=evidence.kind_of_expression(row["check"]) if row["check"] else "arithmetic",
        where=f"document {row['document']}, line {row['line']}",
    )


# -------------------------------------------------------------------------------------------- form


def _check_words(
    text: str,
    expected: Any,
    authority: str,
    status: str,
    refutes: str,
    said: Any,
    why: str,
    kind: str,
) -> None:
    if status not in STATUSES:
        raise ValueError(f"claim {text!r}: status is one of {STATUSES}, got {status!r}")
    if kind not in ("", "derived", "arithmetic"):
        raise ValueError(
            f"claim {text!r}: kind= weakens a claim to 'derived' or 'arithmetic', got {kind!r}"
        )
    if status == "cited":
        if not authority:
            raise ValueError(f"claim {text!r}: a cited figure needs authority=, whose it is")
        if expected is not None:
            raise ValueError(f"claim {text!r}: nothing is expected of a cited figure")
    elif expected is None:
        raise ValueError(f"claim {text!r}: expected is missing")
    if status == "corrected":
        if said is None or not why or not refutes:
            raise ValueError(
                f"claim {text!r}: a correction needs refutes=, who is wrong, said= and why="
            )
    elif said is not None or refutes:
        raise ValueError(f"claim {text!r}: said= and refutes= are for status='corrected'")


def _check_form(
    text: str,
    measured: Any,
    expected: Any,
    rtol: float | None,
    atol: float | None,
    exact: bool,
) -> None:
    if not text.strip():
        raise ValueError("a claim needs a text")
    if same_object(measured, expected):
        raise ValueError(
            f"claim {text!r}: measured and expected are the same object; compute one "
            "in a different way"
        )
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"claim {text!r}: {name} must be finite and not negative, got {value}")
    if rtol is not None and rtol >= 1:
        raise ValueError(f"claim {text!r}: rtol {rtol} allows anything; a tolerance is below 1")
    if exact and (rtol is not None or atol is not None):
        raise ValueError(f"claim {text!r}: exact excludes rtol and atol")
    if expected is None or callable(expected) or is_comparison(expected):
        return
    if isinstance(expected, str | bool):
        return
    integers = all(isinstance(v, numbers.Integral) for v in (*flat(measured), *flat(expected)))
    if rtol is None and atol is None and not exact and not integers:
        raise ValueError(f"claim {text!r}: floats need rtol=, atol= or exact=True")


def _where() -> str:
    """File and line, or notebook cell, of the code that calls claim()."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    if frame is None:
        return ""
    name = frame.f_code.co_filename
    notebook = "get_ipython" in frame.f_globals and "__file__" not in frame.f_globals
    lecture = os.environ.get("MINIDIST_LECTURE", "")
    if notebook:  # a notebook: IPython knows the number of the running cell
        try:
            cell = frame.f_globals["get_ipython"]().execution_count
        except Exception:  # a stand-in for IPython; a missing cell number must not stop the claim
            cell = "?"
        return f"{lecture or 'notebook'} [{cell}]"
    return f"{lecture or Path(name).name}:{frame.f_lineno}"


def _record(result: Claim) -> None:
    registry.append(result)
    path = os.environ.get("MINIDIST_CLAIMS")
    if path:  # one write per line, so that ranks that append at the same time do not mix lines
        line = json.dumps(asdict(result), ensure_ascii=False) + "\n"
        with open(path, "ab", buffering=0) as file:
            file.write(line.encode())


def main(arguments: Sequence[str]) -> int:
    """Print the table of .jsonl and .csv files; .py files are the lectures that made the claims.

    Returns the exit status: 0 if all claims are true and their kinds known, 1 if not, or if there
    is no claim, 2 for the usage text.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            "usage: python -m minidist.claims FILE ...   (.jsonl or .csv, and lectures as .py)",
            file=sys.stderr,
        )
        return 2
    lectures = [path for path in arguments if Path(path).suffix == ".py"]
    claims = [row for path in arguments if path not in lectures for row in load(path)]
    claims = with_kinds(claims, lectures)
    print(table(claims))
    known = all(row.kind or row.status == "cited" for row in claims) or not lectures
    return 0 if claims and known and all(row.passed for row in claims) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
