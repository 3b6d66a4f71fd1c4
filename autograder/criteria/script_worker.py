"""Runs a student's script as one rank of a job.

The script runs as `__main__`, with its own arguments and its own folder on the path. A traceback
shows its lines only. It is kept from a hang that is not its fault, see `keep_groups`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d


class ScriptError(Exception):
    """The script has failed, and stderr says why; `code` is its exit code."""

    def __init__(self, what: str, code: int = 1) -> None:
        super().__init__(what)
        self.code = code


def work(script: str, arguments: Sequence[str]) -> None:
    """Runs the script to its end.

    Raises:
        ScriptError: it raised, or it exited with a code other than 0.
    """
    keep_groups()
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


def keep_groups() -> None:
    """Lets every process group live as long as its process, though the script destroys it.

    The last owner of a gloo group may be DDP's reducer. Its destructor joins gloo's thread and
    holds the GIL meanwhile, for which that thread may wait to drop the last all-reduce: on a busy
    machine a right script hung at its end.
    """
    destroy = distributed_c10d.destroy_process_group

    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        for each in distributed_c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # also through Python's own end
        destroy(group)

    dist.destroy_process_group = destroy_process_group
    distributed_c10d.destroy_process_group = destroy_process_group
