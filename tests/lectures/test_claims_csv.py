"""notebooks/claims.csv: every number of the five source documents, its verdict and the right value.

Documents: a, lecture "Multi-GPU Strategies and Parallel Training"; b, lab "Distributed Training -
Scale to Multiple GPUs"; c, lesson "Multi-GPU Training Strategies"; d, lecture "Distributed Training
Fundamentals"; e, lesson "Distributed Training".

Columns: id; document and line; what it says, in our words; stated value and unit; verdict
(verified, corrected, cited); right value; why; authority; the lecture that executes it; check, a
Python expression over the names of minidist.cost (and math, struct); rtol. A row that says
"derived" states what follows from a listing without being printed there.

Numbers that claim nothing, such as ports, seeds and epochs in listings, are left out.
"""

from __future__ import annotations

import csv
import math
import re
import struct
from collections import Counter
from pathlib import Path

import pytest

from minidist import claims, cost

FILE = Path(__file__).resolve().parents[2] / "notebooks" / "claims.csv"
with FILE.open(newline="", encoding="utf-8") as handle:
    ROWS = list(csv.DictReader(handle))
CHECKED = [row for row in ROWS if row["check"]]


def names() -> dict[str, object]:
    return {name: getattr(cost, name) for name in cost.__all__} | {"math": math, "struct": struct}


def close(a: float, b: float, rtol: float) -> bool:
    return abs(a - b) <= rtol * abs(b)


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def verdict_holds(row: dict[str, str]) -> str:
    """Empty if the row's check agrees with its verdict, else what does not."""
    value, rtol = float(eval(row["check"], names())), float(row["rtol"])
    right, stated = float(row["right"]), number(row["stated"])
    if not math.isfinite(value) or not close(value, right, rtol):
        return f"right value {right} but computed {value}"
    if stated is None:
        return "" if row["verdict"] == "corrected" else f"stated {row['stated']!r} is no number"
    if row["verdict"] == "verified" and not close(stated, value, rtol):
        return f"verified, but stated {stated} and computed {value}"
    if row["verdict"] == "corrected" and close(stated, value, max(rtol, 1e-3)):
        return f"corrected, but stated {stated} is what is computed"
    return ""


def test_form():
    assert len(ROWS) >= 200
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert None not in row, row["id"]
        assert None not in row.values(), row["id"]
        assert row["id"][0] == row["document"]
        assert row["verdict"] in ("verified", "corrected", "cited"), row["id"]
        assert 1 <= int(row["lecture"]) <= 11, row["id"]
        assert int(row["line"]) >= 1, row["id"]
        assert row["says"], row["id"]
        assert row["stated"], row["id"]
        assert row["right"], row["id"]
        assert row["why"] or row["verdict"] != "corrected", row["id"]
        assert row["authority"] or row["verdict"] != "cited", row["id"]
        assert bool(row["check"]) == bool(row["rtol"]), row["id"]
        assert row["check"] or row["verdict"] != "verified", f"{row['id']}: verified by what?"
        if row["rtol"]:
            assert 0 <= float(row["rtol"]) <= 0.05, row["id"]


def test_every_document_and_lecture_has_some():
    assert set(Counter(row["document"] for row in ROWS)) == set("abcde")
    assert set(Counter(int(row["lecture"]) for row in ROWS)) == set(range(1, 12))


@pytest.mark.parametrize("row", CHECKED, ids=lambda row: row["id"])
def test_recomputed(row: dict[str, str]):
    assert verdict_holds(row) == "", row["says"]


def test_the_check_can_fail():
    row = dict(CHECKED[0], check="2.0", right="2", stated="2", rtol="0", verdict="verified")
    assert verdict_holds(row) == ""
    assert "computed" in verdict_holds(row | {"right": "3"})
    assert "verified, but" in verdict_holds(row | {"stated": "3"})
    assert "corrected, but" in verdict_holds(row | {"verdict": "corrected"})
    assert verdict_holds(row | {"verdict": "corrected", "stated": "3"}) == ""


def test_known_errors_are_corrected():
    """The errors that the project knows of are all in the list, as corrections."""
    corrected = " ".join(row["says"] + row["why"] for row in ROWS if row["verdict"] == "corrected")
    for phrase in (
        *("(p - 1)/m", "master copy", "TF32", "a quarter of what the code computes"),
        *("bits taken for bytes", "level off", "one after the other", "below 8 GPUs", "loses"),
        *("1 / utilisation", "subnormal", "scores, MLP", "no serial share", "PCIe 4.0 x16"),
    ):
        assert phrase in corrected, phrase


def test_the_table_is_listed_with_the_lectures_claims(capsys):
    assert claims.main([str(FILE)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n\d+ claims: 0 measured, \d+ derived; not counted: \d+ arithmetic", out)
    assert "document a, line 32" in out
