"""What Sphinx reads: the course's texts and notebooks, and a page per package of the library.

Notebooks lie as in the repository, so that their links hold.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat

from minidist.unsupported import page

ROOT = Path(__file__).resolve().parent.parent
COURSE_MAP = "<!-- course map -->"
HIDDEN_TAGS = {"parameters", "injected-parameters", "remove-cell"}
# A link that leads nowhere is a warning, and a warning ends the build.
SPHINX = ("--jobs", "auto", "--quiet", "--fail-on-warning", "--keep-going", "-b", "html")
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
        _copy(run(path), folder / "notebooks" / path.name)
    for path in sorted((root / "labs").glob("*/*.ipynb")):
        _copy(path, folder / "labs" / path.parent.name / path.name)
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


def _copy(source: Path, target: Path) -> None:
    """Copies a notebook without what only a running one needs."""
    notebook = nbformat.read(source, as_version=4)
    notebook.cells = [
        cell for cell in notebook.cells if not HIDDEN_TAGS & set(cell.metadata.get("tags", []))
    ]
    notebook.metadata.pop("widgets", None)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
