"""`python book`: runs the lectures, and writes the course as a static site with Sphinx.

    notebooks/*.ipynb   run by papermill once per version, then a page each, with figures and claims
    labs/*/*.ipynb      a page each, as students get them; not run
    book/*.md           front page, guides and teaching notes
    lib/minidist        a page per package, from the docstrings of its public names

The pages need no server and load nothing from elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from sources import ROOT, SPHINX, write_sources
from sphinx.cmd.build import build_main

from autograder.authoring.lectures import run_once


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python book", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "book", help="folder")
    parser.add_argument("--as-is", action="store_true", help="do not run lectures")
    args = parser.parse_args(argv)
    library, ran = ROOT / "lib" / "minidist", ROOT / "build" / "lectures"
    source = args.out.with_name(f"{args.out.name}-source")
    run = partial(run_once, library=library, folder=ran, pictures=True)
    write_sources(source, (lambda path: path) if args.as_is else run)
    code = build_main([*SPHINX, str(source), str(args.out)])
    if code == 0:
        print(args.out / "index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
