"""claim() passes what is true, stops what is not, and lets nobody check nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from minidist import claims
from minidist.claims import ClaimError, claim


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(claims, "registry", [])
    monkeypatch.delenv("MINIDIST_CLAIMS", raising=False)
    monkeypatch.delenv("RANK", raising=False)


NAN = float("nan")

TRUE = {
    "numbers": lambda: claim("x", 1.001, 1.0, rtol=0.01),
    "atol": lambda: claim("x", 1e-9, 0.0, atol=1e-8),
    "exact float": lambda: claim("x", float("0.5"), 1 / 2, exact=True),
    "integers need no tolerance": lambda: claim("x", int("1024") ** 4, 1 << 40),
    "bool": lambda: claim("x", 3 > 2, True),
    "numpy bool": lambda: claim("x", np.float64(3) > 2, True),
    "torch bool": lambda: claim("x", torch.tensor(3) > 2, True),
    "string": lambda: claim("x", "ri" + "ng", "ring"),
    "at least": lambda: claim("x", 0.93, (">=", 0.9)),
    "all below": lambda: claim("x", [1, 2, 3], ("<", 4)),
    "condition": lambda: claim("x", [3, 1, 2], lambda v: sorted(v) == [1, 2, 3]),
    "numpy condition": lambda: claim("x", 3.0, lambda v: np.bool_(v > 2)),
    "arrays": lambda: claim("x", np.array([1.0, 2.0]), [1.0, 2.0], rtol=1e-9),
    "tensors": lambda: claim("x", torch.eye(2), torch.eye(2), exact=True),
    "scalar tensor": lambda: claim("x", torch.tensor(2.0), 2.0, rtol=1e-6),
    "infinity": lambda: claim("x", float("inf"), float("1e999"), exact=True),
    "correction": lambda: claim(
        "x", 16.0, 16, rtol=1e-9, status="corrected", refutes="y", said=12, why="no master copy"
    ),
}

FALSE = {
    "too far": lambda: claim("x", 1.02, 1.0, rtol=0.01),
    "nan measured": lambda: claim("x", NAN, 1.0, rtol=0.5),
    "nan expected": lambda: claim("x", 1.0, float("nan"), rtol=0.5),
    "nan equals nan": lambda: claim("x", NAN, float("nan"), exact=True),
    "nan among numbers": lambda: claim("x", [1.0, NAN], [1.0, 2.0], rtol=0.5),
    "nan compared": lambda: claim("x", NAN, (">=", 0.9)),
    "nan not equal": lambda: claim("x", NAN, ("!=", 0.9)),
    "nan fools a condition": lambda: claim("x", NAN, lambda v: not v > 1),
    "nan in a tensor": lambda: claim("x", torch.tensor([NAN]), lambda v: True),
    "infinite": lambda: claim("x", float("inf"), 1.0, rtol=0.9),
    "zero expected": lambda: claim("x", 1e-9, 0.0, rtol=0.9),
    "sign": lambda: claim("x", -1.0, 1.0, rtol=0.99),
    "off by one": lambda: claim("x", 7, 8),
    "other bool": lambda: claim("x", False, True),
    "one is not True": lambda: claim("x", 1, True),
    "truthy condition": lambda: claim("x", 5, lambda v: v),
    "none from a condition": lambda: claim("x", 5, lambda v: None),
    "below": lambda: claim("x", 0.89, (">=", 0.9)),
    "one of many": lambda: claim("x", [1, 2, 5], ("<", 4)),
    "nothing at all": lambda: claim("x", [], ("<", 4)),
    "other shape": lambda: claim("x", [1.0, 2.0], [[1.0, 2.0]], rtol=0.1),
    "shorter": lambda: claim("x", [1.0], [1.0, 1.0], rtol=0.1),
    "string for number": lambda: claim("x", "1", 1, exact=True),
    "correction repeats the error": lambda: claim(
        "x", 12.0, 12.5, rtol=0.1, status="corrected", refutes="y", said=12, why="?"
    ),
}

shared = np.ones(3)
MALFORMED = {
    "no text": (lambda: claim(" ", 1, 1), "text"),
    "no expectation": (lambda: claim("x", 1), "expected is missing"),
    "float without tolerance": (lambda: claim("x", 1.0, 2.0), "need rtol="),
    "integer against float": (lambda: claim("x", 1, 1.5), "need rtol="),
    "itself": (lambda: claim("x", shared, shared, rtol=0.1), "same object"),
    "a view of itself": (lambda: claim("x", shared, shared[:], rtol=0.1), "same object"),
    "a view of a tensor": (
        lambda: (lambda t: claim("x", t, t.view(2), exact=True))(torch.ones(2)),
        "same object",
    ),
    "one variable": (
        lambda: (lambda v: claim("x", v, v, rtol=0.1))(sum([0.5, 1.0])),
        "same object",
    ),
    "tolerance of everything": (lambda: claim("x", 1.0, 2.0, rtol=1.0), "allows anything"),
    "nan tolerance": (lambda: claim("x", 1.0, 2.0, rtol=NAN), "finite"),
    "infinite tolerance": (lambda: claim("x", 1.0, 2.0, atol=float("inf")), "finite"),
    "negative tolerance": (lambda: claim("x", 1.0, 2.0, rtol=-0.1), "not negative"),
    "exact and not": (lambda: claim("x", 1.0, 2.0, rtol=0.1, exact=True), "excludes"),
    "unknown status": (lambda: claim("x", 1, 1, status="true"), "status"),
    "citation of nobody": (lambda: claim("x", 1, status="cited"), "needs authority="),
    "citation with expectation": (
        lambda: claim("x", 1, 1, status="cited", authority="y"),
        "nothing is expected",
    ),
    "correction of nothing": (lambda: claim("x", 1, 1, status="corrected"), "said= and why="),
    "correction of nobody": (
        lambda: claim("x", 1, 1, status="corrected", said=2, why="z"),
        "needs refutes=, who is wrong",
    ),
    "said without a correction": (lambda: claim("x", 1, 1, said=2), "are for status='corrected'"),
    "refuted without a correction": (
        lambda: claim("x", 1, 1, refutes="y"),
        "are for status='corrected'",
    ),
    "more than it is": (lambda: claim("x", 1, 1, kind="measured"), "weakens a claim"),
    "a condition that holds for all": (lambda: claim("x", 2.0, lambda v: True), "cannot fail"),
    "no value at all": (lambda: claim("x", [], [], exact=True), "cannot fail"),
}


@pytest.mark.parametrize("name", TRUE)
def test_true_claims_pass(name: str):
    assert TRUE[name]().passed
    assert [c.passed for c in claims.registry] == [True]


@pytest.mark.parametrize("name", FALSE)
def test_false_claims_raise_and_are_kept(name: str):
    with pytest.raises(ClaimError, match="claim is false: x; expected"):
        FALSE[name]()
    assert [c.passed for c in claims.registry] == [False]


@pytest.mark.parametrize("name", MALFORMED)
def test_claims_that_check_nothing_are_refused(name: str):
    make, message = MALFORMED[name]
    with pytest.raises(ValueError, match=message):
        make()
    assert claims.registry == []


def test_the_message_says_everything():
    with pytest.raises(ClaimError) as error:
        claim("a ring sends 1.5 B on 4 ranks", 2.0, 1.5, rtol=0.01)
    assert str(error.value) == (
        "claim is false: a ring sends 1.5 B on 4 ranks; expected 1.5 ± 1 %, got 2"
    )
    assert isinstance(error.value, AssertionError)


def test_one_line_as_text_and_html():
    result = claim(
        "model states of <Adam>",
        16.0,
        16,
        rtol=1e-3,
        status="corrected",
        refutes="a table",
        said=12,
        why="12 is the optimiser's part",
        authority="arXiv 1910.02054",
    )
    text = str(result)
    assert text.startswith("✓ model states of <Adam>: 16 (expected 16 ± 0.1 %)")
    assert "; a table says 12: 12 is the" in text
    assert "[arXiv 1910.02054]" in text
    assert "\n" not in text
    assert "&lt;Adam&gt;" in result._repr_html_()
    cited = claim("GPT-3 saw 300 billion tokens", 300e9, status="cited", authority="2005.14165")
    assert str(cited) == "§ GPT-3 saw 300 billion tokens: 3e+11 [2005.14165]"


def test_where_and_rank_are_recorded(monkeypatch: pytest.MonkeyPatch):
    result = claim("x", 1, 1)
    assert result.where.startswith("test_claims.py:")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MINIDIST_LECTURE", "02_collectives")
    assert claim("y", 1, 1).rank == 3
    assert claim("y", 1, 1).where.startswith("02_collectives:")

    class Shell:
        execution_count = 7

    space = {"get_ipython": Shell, "claim": claim, "__name__": "__main__"}
    exec("result = claim('z', 2, 2)", space)
    assert space["result"].where == "02_collectives [7]"


def test_lines_of_json_and_the_table(tmp_path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "claims.jsonl"
    monkeypatch.setenv("MINIDIST_CLAIMS", str(path))
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        claim("both ranks say it", 2, 2)
    claim("published", 34, status="cited", authority="arXiv 2104.04473")
    claim("mended", 16, 16, status="corrected", refutes="y", said=12, why="…")
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 4
    loaded = claims.load(path)
    assert [c.text for c in loaded] == ["both ranks say it", "published", "mended"]
    assert claims.table(loaded).endswith(
        "\n0 claims: 0 measured, 0 derived; not counted: 0 arithmetic, 1 cited, "
        "2 of unknown kind; 0 correct a source, 0 false"
    )

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "minidist.claims", str(path)],
            capture_output=True,
            text=True,
        )

    done = run()
    assert done.returncode == 0, done.stderr
    assert "corrected" in done.stdout
    assert "arXiv 2104.04473" in done.stdout
    # One rank's false verdict is not hidden by another's true one.
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ClaimError):
        _both(3)
    monkeypatch.setenv("RANK", "2")
    _both(2)
    done = run()
    assert done.returncode == 1
    assert "1 false" in done.stdout
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert claims.main([str(empty)]) == 1
    empty.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1: not a claim"):
        claims.load(empty)


def _both(value: int) -> None:
    claim("said by two ranks at one place", value, 2)


def test_a_rerun_replaces_the_verdict(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINIDIST_CLAIMS", str(tmp_path / "c.jsonl"))
    with pytest.raises(ClaimError):
        _both(3)
    _both(2)
    assert [c.passed for c in claims.load(tmp_path / "c.jsonl")] == [True]


def test_needs_neither_torch_nor_numpy():
    code = (
        "import sys, minidist.claims, minidist.cost;"
        "print(sorted({'torch', 'numpy', 'IPython'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_equal_numpy_scalars_are_two_objects():
    for _ in range(50):  # a scalar's address is free again at once, and may be the next one's
        claim("two sums agree", np.float64(1.5) + 1, np.float64(2.0) + 0.5, rtol=1e-9)
    array = np.ones(3)
    with pytest.raises(ValueError, match="same object"):
        claim("an array is itself", array, array[:], rtol=1e-9)
