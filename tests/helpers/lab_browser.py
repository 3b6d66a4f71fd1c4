"""A notebook in JupyterLab, as a person uses it: cells are run, read and filled in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[2] / "README.md"
PICTURES = Path(os.environ["PICTURES"]) if "PICTURES" in os.environ else None
_FIND = """
    const notebook = window.jupyterapp.shell.currentWidget.content;
    const at = notebook.widgets.findIndex(w => w.model.sharedModel.id === id);
    const cell = notebook.widgets[at];
"""


class Notebook:
    """The notebook in the current tab of a page with JupyterLab."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def wait(self) -> None:
        """Waits until its kernel has started."""
        self.page.wait_for_function(
            "window.jupyterapp?.shell.currentWidget?.sessionContext?.isReady"
            " && window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel"
        )

    def write(self, cell: str, source: str) -> None:
        """Replaces what is in a cell."""
        self._call(f"{_FIND} cell.model.sharedModel.setSource(source);", cell, source)

    def run(self, cell: str) -> str:
        """Runs a cell, waits for its end, and returns what it shows as text."""
        self.begin(cell)
        self.page.wait_for_function(
            f"id => {{ {_FIND} return cell.model.executionState === 'idle'"
            " && cell.model.executionCount !== null; }",
            arg=cell,
        )
        return self.text(cell)

    def begin(self, cell: str) -> None:
        """Runs a cell; returns at once."""
        self._call(
            f"{_FIND} notebook.activeCellIndex = at; cell.model.clearExecution();"
            " window.jupyterapp.commands.execute('notebook:run-cell');",
            cell,
        )

    def text(self, cell: str) -> str:
        """What a cell shows, as text."""
        return self._call(
            f"{_FIND} return cell.model.sharedModel.getOutputs().map(output =>"
            " [output.text, output.data?.['text/plain'], output.traceback?.join('\\n')]"
            ".flat().filter(Boolean).join('')).join('\\n');",
            cell,
        )

    def show(self, cell: str) -> None:
        """Scrolls until a cell is at the top."""
        self._call(f"{_FIND} cell.node.scrollIntoView({{block: 'start'}});", cell)

    def command(self, name: str, **arguments: Any) -> None:
        """Runs a command of JupyterLab and waits for it."""
        self.page.evaluate(
            "([name, args]) => window.jupyterapp.commands.execute(name, args).then(() => null)",
            [name, arguments],
        )

    def _call(self, body: str, cell: str, source: str = "") -> Any:
        return self.page.evaluate(f"([id, source]) => {{ {body} }}", [cell, source])


def picture(page: Any, name: str) -> None:
    """Takes a picture if the README shows it and $PICTURES names a folder."""
    if PICTURES is not None and f"{name}.png" in README.read_text("utf-8"):
        page.screenshot(path=PICTURES / f"{name}.png")
