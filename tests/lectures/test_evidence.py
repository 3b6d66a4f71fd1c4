"""What a claim rests on is read from the source; a claim that cannot fail is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from minidist import claims, evidence
from minidist.claims import claim

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
LECTURES = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.py"))[1:]
COUNTED = 560  # places in lectures and documents that make a measured or derived claim, at least

HEAD = """
import math, torch, time, numpy as np
from minidist import cost, emulate
from minidist.collectives import CollectiveLog
from minidist.cost import A100, GPT3_175B
from minidist.claims import claim
"""
SOURCES = {
    # literals, facts of a table, products
    "claim('x', 64 // 8, 8)": "arithmetic",
    "n = 4\nclaim('x', n * 64, 256)": "arithmetic",
    "claim('x', A100.memory_bytes / cost.GB, 80.0, rtol=1e-9)": "arithmetic",
    "claim('x', A100.peak('fp32') / 1e12, 19.5, rtol=1e-9)": "arithmetic",
    "claim('x', cost.tokens_per_step(micro_batch=32, context=1, dp=4), 128)": "arithmetic",
    "b = cost.bubble_fraction(num_stages=2, num_microbatches=8)\nclaim('x', b, 0)": "arithmetic",
    "def f(n):\n  return n * 2\nclaim('x', f(2), 4)": "arithmetic",
    "f = lambda n: n * 2\nclaim('x', [f(n) for n in (1, 2)], [2, 4])": "arithmetic",
    "rows = [n * 2 for n in (1, 2)]\nclaim('x', rows, [2, 4])": "arithmetic",
    "claim('x', math.ceil(np.sum([1.2, 3])), 5)": "arithmetic",
    "if 3 > 2:\n  a = 1\nfor i in (1, 2):\n  a += i\nclaim('x', a, 4)": "arithmetic",
    # a model, or a function of the lecture
    "claim('x', GPT3_175B.num_parameters / 1e9, 175, rtol=0.01)": "derived",
    "c = cost.memory_per_gpu(model=GPT3_175B)\nclaim('x', c.total / 1e9, 5)": "derived",
    "def f(n):\n  for i in range(n):\n    n += i\n  return n\nclaim('x', f(2), 3)": "derived",
    "claim('x', torch.finfo(torch.float16).max, 65504)": "derived",
    "try:\n  cost.recommend(x=1)\nexcept ValueError as e:\n  t = str(e)\n"
    "claim('x', t, '')": "derived",
    # something ran
    "x = torch.ones(3)\nclaim('x', x.sum().item(), 3.0)": "measured",
    "with CollectiveLog() as log:\n  pass\nclaim('x', log.num_bytes(), 5)": "measured",
    "rows = []\nfor n in (1, 2):\n  rows.append(torch.ones(n).sum())\n"
    "claim('x', rows, 3)": "measured",
    "d = {}\nd['a'] = time.perf_counter()\nclaim('x', d['a'], 3)": "measured",
    "seen = []\nm = torch.nn.Linear(1, 1)\ndef hook(*a):\n  seen.append(1)\n"
    "m.register_forward_hook(hook)\nclaim('x', len(seen), 1)": "measured",
    "def f():\n  return torch.ones(1)\ndef g():\n  return f()\nclaim('x', g(), 1)": "measured",
    "x = [None]\ntorch.distributed.all_gather_object(x, 1)\nclaim('x', x, [1])": "measured",
    "claim('x', [t.item() for t in torch.ones(2)], [1, 1])": "measured",
}


@pytest.mark.parametrize(("source", "kind"), SOURCES.items(), ids=range(len(SOURCES)))
def test_a_value_is_as_strong_as_what_goes_into_it(source: str, kind: str):
    (found,) = evidence.read(HEAD + source)
    assert found.kind == kind


def test_a_new_value_replaces_the_old_one():
    source = HEAD + "x = torch.ones(1)\nclaim('a', x, 1)\nx = 1\nclaim('b', x, 1)"
    assert [one.kind for one in evidence.read(source)] == ["measured", "arithmetic"]


def test_a_claim_can_be_weakened_and_never_strengthened():
    made = HEAD + "x = torch.ones(1)\nclaim('a', x, 1, kind='arithmetic')"
    assert evidence.kind_of("a", evidence.read(made)) == "arithmetic"
    for wrong in (
        "x = 1\nclaim('a', x, 1, kind='derived')",
        "x = 1\nclaim('a', x, 1, kind='measured')",
    ):
        with pytest.raises(ValueError, match=r"lecture, line .*makes it arithmetic at most"):
            evidence.read(HEAD + wrong)
    with pytest.raises(ValueError, match="a kind is one of"):
        evidence.read("claim('a', 1, 1, kind='proved')")
    with pytest.raises(ValueError, match="no Python"):
        evidence.read("claim('a'")


def test_texts_find_their_claims():
    found = evidence.read(
        HEAD + "for n in (1, 2):\n  claim(f'{n} ranks (all)', torch.ones(n).sum(), n)\n"
        "claim('2 ranks (all)', 2, 2)"
    )
    assert evidence.kind_of("1 ranks (all)", found) == "measured"
    assert evidence.kind_of("2 ranks (all)", found) == "arithmetic", "the weaker of two"
    assert evidence.kind_of("1 rank", found) == ""
    found = evidence.read(HEAD + "claim(f'{2}', 1, 1)\nclaim('said', torch.ones(1), 1)")
    assert evidence.kind_of("said", found) == "measured", "a gap matches anything"
    assert evidence.kind_of("made", found) == "arithmetic"


def test_the_table_counts_what_could_have_been_false(tmp_path, monkeypatch, capsys):
    log, lecture = tmp_path / "c.jsonl", tmp_path / "90_small.py"
    monkeypatch.setattr(claims, "registry", [])
    monkeypatch.setenv("MINIDIST_CLAIMS", str(log))
    monkeypatch.setenv("MINIDIST_LECTURE", "90_small")
    source = HEAD + "claim('ran', int(torch.ones(3).sum()), 3)\nclaim('product', 2 * 3, 6)"
    lecture.write_text(source)
    exec(source, {})
    assert claims.main([str(log), str(lecture)]) == 0
    out = capsys.readouterr().out
    assert "1 claims: 1 measured, 0 derived; not counted: 1 arithmetic, 0 cited" in out
    lecture.write_text(HEAD)  # a source that does not make them tells no kind
    assert claims.main([str(log), str(lecture)]) == 1
    assert "2 of unknown kind" in capsys.readouterr().out


@pytest.mark.parametrize("path", LECTURES, ids=lambda path: path.stem)
def test_every_lecture_rests_on_what_it_computes(path: Path):
    kinds = Counter(
        one.weakened or one.kind for one in evidence.read(path.read_text("utf-8"), where=path.name)
    )
    assert kinds["measured"] + kinds["derived"] >= 25
    assert kinds["measured"] >= 8


def test_what_counts_does_not_dwindle():
    lectures = [one for path in LECTURES for one in evidence.read(path.read_text("utf-8"))]
    documents = claims.load(NOTEBOOKS / "claims.csv")
    kinds = Counter(one.weakened or one.kind for one in lectures)
    kinds += Counter(row.kind for row in documents if row.counts)
    assert kinds["measured"] + kinds["derived"] >= COUNTED


# ----------------------------------------------------------------------------- what cannot fail

MOVED = {
    "a number": (lambda v: claim("x", v, 1.0, rtol=0.01), 1.004, 2 * 0.01),
    "another": (lambda v: claim("x", v, 10.0, atol=2.5), 9.47, 2 * 2.5),
    "an integer": (lambda v: claim("x", v, 8), 8, 1),
    "a bound": (lambda v: claim("x", v, ("<", 4)), 3.5, 1.0),
    "one of a list": (lambda v: claim("x", [1.0, v], [1.0, 2.0], rtol=0.01), 2.0, 2 * 0.02),
    "a condition": (lambda v: claim("x", [0.6, v], lambda s: all(0.5 < x < 1 for x in s)), 0.7, 1),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_value_moved_by_twice_its_tolerance_is_refused(name, monkeypatch):
    monkeypatch.setattr(claims, "registry", [])
    monkeypatch.delenv("MINIDIST_CLAIMS", raising=False)
    check, value, by = MOVED[name]
    check(value)
    with pytest.raises(claims.ClaimError):
        check(value + by)


@pytest.mark.parametrize(
    "check",
    [
        lambda: claim("x", 5.0, lambda v: v == v),
        lambda: claim("x", "text", lambda t: len(t) >= 0),
        lambda: claim("x", [1, 2], lambda v: isinstance(v, list)),
        lambda: claim("x", {}, lambda v: True),
    ],
)
def test_a_claim_that_no_value_makes_false_is_refused(check, monkeypatch):
    monkeypatch.setattr(claims, "registry", [])
    with pytest.raises(ValueError, match="cannot fail"):
        check()
    assert claims.registry == []
