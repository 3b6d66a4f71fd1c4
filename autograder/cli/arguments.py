"""Exit codes and argument types that several commands share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def writable(text: str) -> Path:
    """A path that can be written to; checked before grading, which may take an hour."""
    path = Path(text)
    if text == "-":
        return path  # standard output
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"no folder {path.parent}: {error.strerror}") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, and {path} is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written to")
    return path
