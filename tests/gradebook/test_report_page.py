"""The report in a browser: on a phone, in both themes, and for a screen reader."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from made_records import made_record

from autograder.report.page import Part, write_page

CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_a_phone_and_axe_finds_nothing_serious(tmp_path: Path, theme: str):
    playwright = pytest.importorskip("playwright.sync_api")
    from axe_playwright_python.sync_playwright import Axe

    page_file = tmp_path / "report.html"
    lost = [{}, {"setup": "WRONG"}, {"*": "INFRA"}, {"*": "INVALID"}, {"ddp_unused": "TIMEOUT"}]
    names = ("ada", "ben", "kim", "lea", "c" * 40)
    records = [made_record(name, why) for name, why in zip(names, lost, strict=True)]
    part = Part(
        records,
        similar=[("ada", "ben", "97 %", "task1_setup, task2_wrap")],
        suspicious=[("ada", "task1_setup, line 3", "torch.nn.parallel." * 5)],
        left_out={"zoe": "no notebook of this name"},
        link="lab1.html",
        feedback={"ada": "ada.html"},
        by_person={"ada": "to give", "ben": "1.5"},
    )
    write_page([part, Part(records[:1])], page_file)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=theme)
        page = context.new_page()
        page.goto(page_file.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        row = page.locator(".matrix tbody tr").nth(1)
        assert row.locator("td").all_inner_texts()[:2] == ["95 / 100", "1.5"]
        page.screenshot(path=tmp_path / f"{theme}.png", full_page=True)
        found = Axe().run(page).response["violations"]
        browser.close()
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
