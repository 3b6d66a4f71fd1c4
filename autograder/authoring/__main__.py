"""Builds the notebooks of the course from their sources.

python -m autograder.authoring           writes every .ipynb that is missing or out of date
python -m autograder.authoring --check   only names those files, and exits 1 if there are any
python -m autograder.authoring --sync    first writes cells edited in an .ipynb into its .py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from autograder.authoring.notebooks import COURSE_ROOT, build_course, sources
from autograder.authoring.percent import BuildError
from autograder.authoring.sync import sync


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m autograder.authoring", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--root", type=Path, default=COURSE_ROOT, help="the course's checkout")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="write nothing; exit 1 if out of date")
    mode.add_argument("--sync", action="store_true", help="write edited cells back into the .py")
    args = parser.parse_args(argv)
    try:
        if args.sync:
            for py in sources(args.root):
                if sync(py):
                    print(f"{py}: took the cells edited in {py.with_suffix('.ipynb').name}")
        stale, complaints = build_course(args.root, write=not args.check)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    for path in stale:
        print(f"{'out of date' if args.check or complaints else 'built'}: {path}")
    return 1 if complaints or (args.check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
