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
    write_page([Part([made_record(name) for name in ("ada", "ben", "c" * 40)])], page_file)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=theme)
        page = context.new_page()
        page.goto(page_file.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        found = Axe().run(page).response["violations"]
        browser.close()
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
