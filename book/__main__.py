"""`python book`: runs every lecture and writes the course as a static site.

    notebooks/*.ipynb   run by papermill, then a page each, with figures and claims
    labs/*/*.ipynb      a page each, as students get them; not run
    book/*.md           the front page and the teaching notes

The pages need no server and load nothing from elsewhere: formulas are MathML, pictures are inside.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from render import BookError, write_book

from autograder.authoring.lectures import run_lecture

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python book", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "book", help="folder")
    parser.add_argument(
        "--executed", type=Path, help="take lectures that were run before from this folder"
    )
    args = parser.parse_args(argv)
    lectures = {}
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        before = args.executed / path.name if args.executed else None
        if before is not None and before.is_file():
            lectures[path.stem] = before
        else:
            print(f"running {path.stem}", flush=True)
            lectures[path.stem] = run_lecture(path, ROOT / "build" / "lectures")
    labs = {path.stem: path for path in sorted((ROOT / "labs").glob("*/*.ipynb"))}
    try:
        pages = write_book(args.out, ROOT / "book", lectures, labs)
    except BookError as error:
        print(f"book: {error}", file=sys.stderr)
        return 1
    print(f"{len(pages)} pages, all links checked: {args.out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
