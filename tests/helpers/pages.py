"""How a page reads: with a screen reader, in both themes, on a phone, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe

PHONE = {"width": 390, "height": 800}
# A lecture has thousands of coloured words of code, and axe looks at the contrast of each for
# milliseconds. One of each colour in each place says the same, if it need not be scrolled to and is
# not a single character: of those axe says nothing.
ONE_OF_EACH_COLOUR = """() => {
  const seen = new Set();
  for (const word of document.querySelectorAll(".highlight span")) {
    const block = word.closest(".highlight");
    const place = block.parentElement.className;
    const key = [place, word.parentElement.className, word.className].join("|");
    if (seen.has(key)) word.replaceWith(...word.childNodes);
    else if (
      word.textContent.length > 1 &&
      word.getBoundingClientRect().right < block.getBoundingClientRect().right
    ) seen.add(key);
  }
  document.body.normalize();
}"""


def problems_on_a_phone(
    browser: Any, path: Path, theme: str, *, contrast: bool = True
) -> list[str]:
    """What axe calls serious, whether the page is too wide, and what it loads from elsewhere."""
    context = browser.new_context(viewport=PHONE, color_scheme=theme)
    page = context.new_page()
    problems = []
    page.on(
        "request",
        lambda request: (
            request.url.startswith(("file:", "data:"))
            or problems.append(f"{path.name} loads {request.url}")
        ),
    )
    page.goto(path.as_uri())
    width = page.evaluate("document.documentElement.scrollWidth")
    if width > PHONE["width"]:
        problems.append(f"{path.name} is {width} pixels wide")
    page.evaluate(ONE_OF_EACH_COLOUR)
    rules = {"color-contrast": {"enabled": contrast}}
    for found in Axe().run(page, options={"rules": rules}).response["violations"]:
        if found["impact"] in ("serious", "critical"):
            nodes = found["nodes"]
            problems.append(f"{path.name}: {found['id']}, {len(nodes)}: {nodes[0]['html'][:200]}")
    context.close()
    return problems
