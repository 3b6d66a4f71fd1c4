"""The command line: `autograder COMMAND …`; `autograder --help` lists the commands."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import os
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, NoReturn

import argcomplete
from rich.console import Console

from autograder.cli import besides_grading, collect, grade, prepare, watch
from autograder.cli.arguments import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, exit_codes
from autograder.course.course import CourseError
from minidist import __version__

# Each command imports torch and nbgrader itself if it needs them, so that --help and usage errors
# answer at once.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, see `arguments.exit_codes`."""
    parser = _parser()
    argcomplete.autocomplete(parser)  # answers the shell if it asks for completions
    options = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show ✓ must not stop the command.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(stderr=options.command == "grade" and options.json == Path("-"))
    try:
        return options.run(options, console)
    except (CourseError, ValueError) as error:
        print(f"autograder: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f"{error.filename}: " if error.filename else ""
            mend = "what was graded is kept: make room, and run the same command again"
            print(f"autograder: {where}{error.strerror}; {mend}", file=sys.stderr)
            return EXIT_FAILED
        if error.filename is None:
            raise
        print(f"autograder: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("autograder: interrupted; what was graded is kept", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    codes = "; ".join(f"{code} {meaning}" for code, meaning in exit_codes())
    parser = argparse.ArgumentParser(
        prog="autograder", description=__doc__, epilog=f"Exit codes: {codes}."
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="name the versions that a report should name"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    prepare.add_commands(commands)
    collect.add_command(commands)
    grade.add_command(commands)
    watch.add_command(commands)
    besides_grading.add_commands(commands)
    return parser


class _Version(argparse.Action):
    """Prints versions without importing slow modules."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        packages = [f"{name} {version(name)}" for name in ("torch", "nbgrader")]
        print(f"autograder {__version__} (Python {python_version()}, {', '.join(packages)})")
        parser.exit()


def run() -> NoReturn:
    """Runs one command and ends the process at once.

    Python's usual exit first destroys every module; with torch and nbgrader this takes a second.
    """
    code = main()
    if any(not t.daemon for t in threading.enumerate() if t is not threading.main_thread()):
        sys.exit(code)  # Python waits for threads that still work
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # the normal exit reports the failed write
    os._exit(code)


if __name__ == "__main__":
    run()
