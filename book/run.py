"""Runs a lecture, as `make claims` does."""

from __future__ import annotations

from pathlib import Path

import papermill


def run_lecture(path: Path, folder: Path) -> Path:
    """The executed notebook in `folder`.

    Raises:
        papermill.PapermillExecutionError: a cell failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / path.name
    papermill.execute_notebook(
        str(path), str(target), cwd=str(folder), progress_bar=False, start_timeout=120
    )
    return target
