"""What Sphinx reads: the course's texts and notebooks, and a page per package of the library.

Notebooks lie as in the repository, so that their links hold.
"""

from __future__ import annotations

import csv
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from explorers import FOLDER, as_html

from minidist.unsupported import page
from minidist.widgets import PICTURES

ROOT = Path(__file__).resolve().parent.parent
COURSE_MAP = "<!-- course map -->"
HIDDEN_TAGS = {"parameters", "injected-parameters", "remove-cell"}
# A link that leads nowhere is a warning, and a warning ends the build. With several jobs Sphinx
# 9.0 may forget a job's error (ParallelTasks.add_task) and leave the page out; on two cores they
# save nothing.
SPHINX = ("--quiet", "--fail-on-warning", "--keep-going", "-b", "html")
API = (  # minidist.…, in the order of the menu
    *("launch", "emulate", "collectives"),
    *("parallel.data", "parallel.accumulation", "parallel.compression", "parallel.local_sgd"),
    *("parallel.parameter_server", "parallel.zero", "parallel.fsdp", "parallel.tensor"),
    *("parallel.context", "parallel.expert", "parallel.pipeline", "parallel.hybrid"),
    *("precision", "lr", "sampler", "packing", "average", "seeding", "metrics"),
    *("data", "mesh"),
    *("checkpoint", "elastic", "cost", "plan", "profile", "claims", "plots"),
)


def write_sources(
    folder: Path, run: Callable[[Path], Path], api: tuple[str, ...] = API, root: Path = ROOT
) -> None:
    """Writes what Sphinx reads.

    Args:
        folder: is replaced.
        run: takes a lecture and returns the executed one.
        api: modules of minidist that get a page.
        root: the repository.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "book", folder, ignore=shutil.ignore_patterns("__*"))
    index = folder / "index.md"
    index.write_text(
        index.read_text("utf-8").replace(COURSE_MAP, course_map(root / "README.md")), "utf-8"
    )
    for path in sorted((root / "notebooks").glob("[0-9]*.ipynb")):
        _copy(run(path), folder, f"notebooks/{path.name}")
    for path in sorted((root / "labs").glob("*/*.ipynb")):
        _copy(path, folder, f"labs/{path.parent.name}/{path.name}")
    (folder / "corrections.md").write_text(corrections(root / "notebooks"), "utf-8")
    (folder / "reference").mkdir()
    for name in api:
        module = f"minidist.{name}"
        (folder / "reference" / f"{name}.md").write_text(
            f"# {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n"
            "   :imported-members:\n   :show-inheritance:\n```\n",
            "utf-8",
        )
    (folder / "reference" / "unsupported.md").write_text(page(), "utf-8")
    names = "\n".join(("unsupported", *api))
    (folder / "reference" / "index.md").write_text(
        "# Reference of the library\n\nPublic names of `minidist`, with links to their source.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n",
        "utf-8",
    )


def course_map(readme: Path) -> str:
    """The README's table of lectures and labs."""
    found = re.search(r"^## The course\n\n(\|.*?)\n\n", readme.read_text("utf-8"), re.M | re.S)
    if found is None:
        raise SystemExit(f"book: {readme} has no table under '## The course'")
    return found[1]


def corrections(notebooks: Path) -> str:
    """A page with what is often said and is wrong, from claims.csv, lecture by lecture."""
    with (notebooks / "claims.csv").open(newline="", encoding="utf-8") as file:
        wrong = [row for row in csv.DictReader(file) if row["verdict"] == "corrected"]
    by_lecture: dict[int, list[dict[str, str]]] = defaultdict(list)
    for row in wrong:
        by_lecture[int(row["lecture"])].append(row)
    page = [
        "# Often said, and wrong",
        "",
        f"{len(wrong)} statements of lectures, blogs and listings, what is right instead, and why. "
        "Each lecture runs the computation that decides it.",
    ]
    for lecture, rows in sorted(by_lecture.items()):
        paths = sorted(notebooks.glob(f"{lecture:02}_*.ipynb"))
        title = f"[Lecture {lecture}](notebooks/{paths[0].name})" if paths else f"Lecture {lecture}"
        page += ["", f"## {title}", "", "| Said | In numbers | Right | Why |", "|---|---|---|---|"]
        for row in rows:
            numbers = [_with_unit(row[key], row["unit"]) for key in ("stated", "right")]
            why = " ".join(filter(None, (row["why"] + ".", _with_links(row["authority"]))))
            cells = (row["says"], *numbers, why)
            page.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(page) + "\n"


def _with_unit(value: str, unit: str) -> str:
    is_number = re.fullmatch(r"[-\d.,e]+", value) and unit
    return f"{value} {unit}" if is_number else value


def _with_links(authority: str) -> str:
    """The text with a link for each number of arXiv."""
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", authority)


def _copy(source: Path, folder: Path, place: str) -> None:
    """Copies a notebook without what only a running one needs."""
    notebook = nbformat.read(source, as_version=4)
    notebook.cells = [
        cell for cell in notebook.cells if not HIDDEN_TAGS & set(cell.metadata.get("tags", []))
    ]
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if drawn := output.get("data", {}).pop(PICTURES, None):
                output.data["text/html"] = as_html(drawn, "../" * place.count("/"))
                _copy_pictures(drawn, source.with_name("pictures"), folder / FOLDER)
    target = folder / place
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)


def _copy_pictures(drawn: dict[str, Any], source: Path, target: Path) -> None:
    """Copies the files of a figure with controls."""
    target.mkdir(parents=True, exist_ok=True)
    for picture in drawn["pictures"].values():
        if file := picture.get("file"):
            shutil.copy(source / file, target)
