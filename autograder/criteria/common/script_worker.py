"""Runs a student's script as one rank of a job.

The script runs as `__main__`, with its own arguments and its own folder on the path. A traceback
begins at the script: it does not show the frames of this launcher.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from minidist.processes.lifetime import keep_backends


class ScriptError(Exception):
    """The script has failed; stderr has the reason. `code` is its exit code."""

    def __init__(self, what: str, code: int = 1) -> None:
        super().__init__(what)
        self.code = code


def work(script: str, arguments: Sequence[str]) -> None:
    """Runs the script to its end.

    Raises:
        ScriptError: the script raised, or exited with a code other than 0.
    """
    keep_backends()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code in (None, 0):
            return
        if isinstance(end.code, int):
            raise ScriptError(f"exit code {end.code}", end.code) from None
        print(end.code, file=sys.stderr)
        raise ScriptError(str(end.code)) from None
    except BaseException as error:
        of_script = error.__traceback__
        while of_script and of_script.tb_frame.f_code.co_filename != script:
            of_script = of_script.tb_next
        text = "".join(traceback.format_exception(error.with_traceback(of_script)))
        print(f"rank {os.environ.get('RANK')}: {text}", file=sys.stderr)
        raise ScriptError(f"{type(error).__name__}: {error}") from None
