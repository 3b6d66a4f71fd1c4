"""What a program that a cell has started (`!python script.py`) does while the cell waits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from minidist.processes.tree import descendants

# Where IPython and the standard library wait for a program.
_FILES = ("_process_posix.py", "_process_common.py", "subprocess.py")
_COMMAND_CHARS = 60


def program(frames: Sequence[FrameType], source: str) -> dict[str, Any]:
    """What the program does that the main thread waits for; an empty dict if there is none.

    Args:
        frames: of the main thread, innermost first.
        source: of the call in the innermost frame.

    Returns:
        doing and hint (which may be empty), texts; stack, constant while the same processes run;
        switches, their CPU time in tenths of a second. A program that stands still adds very
        little: torch, while it waits for ranks, polls with a few hundredths of a core.
    """
    waits = [f for f in frames[:24] if f.f_code.co_filename.endswith(_FILES)]
    if not waits and not source.startswith("os.system("):
        return {}
    # Take the program from the frames if they hold it: other children, such as a loader's workers,
    # use torch, too.
    known = [f.f_locals.get(name) for f in waits for name in ("self", "child")]
    root = next((pid for each in known if isinstance(pid := getattr(each, "pid", None), int)), 0)
    pids = [root, *descendants(root)] if root else descendants(os.getpid())
    ours = [pid for pid in pids if _read(pid, "cmdline")]
    if not ours:
        return {}
    words = _read(ours[-1], "cmdline").rstrip("\0").split("\0")
    command = " ".join([os.path.basename(words[0]), *words[1:]])
    if len(command) > _COMMAND_CHARS:
        command = f"{command[: _COMMAND_CHARS - 1]}…"
    hint, size = "", os.environ.get("WORLD_SIZE", "1")
    if size != "1" and any("libtorch" in _read(pid, "maps") for pid in ours):
        hint = (
            f"The program may wait for {size} ranks, but only the ranks that run this cell start "
            f"it. To start {size}: %%rank 0, then !torchrun --nproc-per-node {size} SCRIPT"
        )
    return {
        "doing": f"waits for its program ({command})",
        "hint": hint,
        "stack": hash(tuple(ours)),
        "switches": sum(_ticks(pid) for pid in ours) // 10,
    }


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _ticks(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0
