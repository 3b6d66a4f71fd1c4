"""Figures with controls on pages that run no Python: which pictures are drawn, and the HTML."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest
from explorers import as_html
from matplotlib.figure import Figure
from PIL import Image

from autograder.authoring import lectures
from minidist.plots import stills
from minidist.widgets import PICTURES, explore


def curve(power: int = 2, scale: float = 1.0, name: str = "a", grid: bool = True, n: int = 8):
    """A power of x."""
    if power == 3:
        raise ZeroDivisionError("no <cubes>")
    figure = Figure(figsize=(1, 1))
    ax = figure.subplots()
    ax.set(title=name, xlabel="x")
    ax.plot([1, 2], [scale + grid, scale * n * 2**power])
    return figure


class _Page(HTMLParser):
    """The elements of a page, as (tag, attributes), and each label's text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.labels: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.found and self.found[-1][0] == "label":
            self.labels.setdefault(self.found[-1][1]["for"], data)

    def all(self, *tags: str) -> list[dict]:
        return [attrs for tag, attrs in self.found if tag in tags]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws an explorer as it is done for the site."""
    monkeypatch.setenv("MINIDIST_PICTURES", str(tmp_path / "pictures"))
    monkeypatch.setattr(stills, "MOST_SECONDS", 1e9)
    return lambda draw, **given: explore(draw, **given)._repr_mimebundle_()[PICTURES]


def test_nothing_is_drawn_beforehand_unless_the_site_asks(monkeypatch):
    monkeypatch.delenv("MINIDIST_PICTURES", raising=False)
    drawings = []

    def draw(x: int = 1) -> Figure:
        drawings.append(x)
        return curve(1)

    assert PICTURES not in explore(draw, x=(1, 5))._repr_mimebundle_()
    assert drawings == [1]


def test_only_the_run_for_the_site_asks(tmp_path, monkeypatch):
    monkeypatch.delenv("MINIDIST_PICTURES", raising=False)
    asked = []

    def run_lecture(lecture, folder):
        asked.append(os.environ.get("MINIDIST_PICTURES"))
        folder.mkdir(parents=True)
        return Path(shutil.copy(lecture, folder))

    monkeypatch.setattr(lectures, "run_lecture", run_lecture)
    (tmp_path / "01_x.ipynb").write_text("{}")
    place = (tmp_path / "01_x.ipynb", tmp_path / "minidist", tmp_path / "ran")
    plain = lectures.run_once(*place)
    drawn = [lectures.run_once(*place, pictures=True) for _ in range(2)]
    assert asked == [None, str(drawn[0].parent / "pictures")]
    assert drawn[0] == drawn[1] != plain
    assert "MINIDIST_PICTURES" not in os.environ


def test_all_combinations_if_they_are_few(drawn, tmp_path):
    found = drawn(curve, power=(1, 4), name=["a", "b"], grid=True)
    assert found["together"]
    assert [control["kind"] for control in found["controls"]] == ["range", "select", "checkbox"]
    assert [control["values"] for control in found["controls"]] == [
        ["1", "2", "3", "4"],
        ["a", "b"],
        ["False", "True"],
    ]
    assert [control["first"] for control in found["controls"]] == [1, 0, 1]
    assert len(found["pictures"]) == 4 * 2 * 2
    assert next(iter(found["pictures"])) == "1,0,1"
    assert found["pictures"]["2,1,0"] == {"text": "ZeroDivisionError: no <cubes>"}
    names = {found["pictures"][key]["file"] for key in ("0,0,1", "1,0,1", "3,0,1", "3,1,1")}
    assert len(names) == 4
    with Image.open(tmp_path / "pictures" / found["pictures"]["0,0,1"]["file"]) as image:
        assert image.size == (110, 110)
    assert found["pictures"]["0,1,1"]["alt"] == "A power of x: b; x: x"


def test_other_values_warn_and_print_nothing(drawn, recwarn, capsys):
    def draw(x: int = 1) -> Figure:
        if x > 1:
            print("x is", x)
            warnings.warn("too large", stacklevel=1)
        return curve(1)

    assert len(drawn(draw, x=(1, 3))["pictures"]) == 3
    assert capsys.readouterr() == ("", "")
    assert len(recwarn) == 0


def test_each_control_alone_if_combinations_are_many(drawn):
    found = drawn(curve, power=(4, 13), scale=(1.0, 2.0, 0.1), labels={"scale": "scale (m)"})
    assert not found["together"]
    assert len(found["pictures"]) == 10 + 11 - 1
    assert {key for key in found["pictures"] if key.endswith(",0")} >= {"0,0", "9,0"}
    assert "1,1" not in found["pictures"]


def test_a_long_slider_has_steps_with_its_ends_and_where_it_begins():
    values, some = stills.stops(0, 100, 1, 33)
    assert some
    assert len(values) == 22
    assert values[:2] + values[-2:] == [0, 5, 95, 100]
    assert 33 in values
    assert stills.stops(0, 30, 1, 7) == (list(range(31)), False)
    values, some = stills.stops(1.0, 9.9, 0.1, 3.3)
    assert some
    assert {1.0, 1.5, 3.3, 9.9} <= set(values)


@pytest.mark.parametrize("why", ["many", "slow"])
def test_too_much_is_one_picture_and_a_sentence(drawn, monkeypatch, why):
    def draw(x: int = 1, y: int = 1) -> Figure:
        end = time.process_time() + (0.1 if why == "slow" and (x, y) == (1, 1) else 0)
        while time.process_time() < end:
            pass
        return curve(1)

    monkeypatch.setattr(stills, "MOST_SECONDS", 0.5)
    values = list(range(100 if why == "many" else 5))
    found = drawn(draw, x=values, y=values)
    assert len(found["pictures"]) == 1
    page = as_html(found, "../")
    assert "has controls, which move in JupyterLab" in page
    assert not _Page(page).all("input", "select", "script")
    assert _Page(page).all("img")[0]["src"].startswith("../_static/explorers/")


def test_html_has_labels_values_and_the_first_picture(drawn):
    found = drawn(
        curve,
        power=(1, 4),
        name=["a", "<b>"],
        grid=True,
        labels={"power": 'power "p" of x', "name": "name", "grid": "grid"},
    )
    page = _Page(as_html(found, "../"))
    power, name, grid = page.all("input", "select")
    assert (power["type"], power["min"], power["max"]) == ("range", "0", "3")
    assert (power["value"], power["aria-valuetext"]) == ("1", "2")
    assert [page.labels[control["id"]] for control in (power, name, grid)] == [
        'power "p" of x',
        "name",
        "grid",
    ]
    assert [option.get("selected", "no") for option in page.all("option")] == [None, "no"]
    assert "checked" in grid
    image = page.all("img")[0]
    assert image["src"] == f"../_static/explorers/{found['pictures']['1,0,1']['file']}"
    assert image["alt"] == found["pictures"]["1,0,1"]["alt"]
    [data] = re.findall(r'<script type="application/json">(.*?)</script>', as_html(found, ""))
    assert "<" not in data
    assert json.loads(data)["values"][1] == ["a", "<b>"]


def test_two_explorers_of_a_page_have_names_of_their_own(drawn):
    pages = [as_html(drawn(curve, power=(1, high)), "../") for high in (4, 5)]
    ids = [attrs["id"] for page in pages for attrs in _Page(page).all("input")]
    assert len(set(ids)) == 2


def test_a_page_says_what_is_different_in_jupyterlab(drawn):
    assert "JupyterLab" not in as_html(drawn(curve, power=(4, 7)), "")
    assert "finer steps" in as_html(drawn(curve, power=(4, 70)), "")
    assert "one control moves at a time" in as_html(
        drawn(curve, power=(4, 20), n=[8, *"abcdef"]), ""
    )
