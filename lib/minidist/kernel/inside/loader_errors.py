"""A worker process of a DataLoader that died: the headline, without torch's own frames."""

from __future__ import annotations

import re
import signal
from types import TracebackType
from typing import Any

_DIED = re.compile(r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (?:is killed|exited)")
_LOADER = "torch/utils/data/dataloader.py"
_WHY = (
    "A worker process of a DataLoader died, not this rank. If it was killed, memory has most often "
    "run out: try fewer workers, or smaller batches."
)


def explain_dead_workers(shell: Any) -> None:
    """Makes IPython's shell show such an error as what it is."""
    shell.set_custom_exc((RuntimeError, ConnectionError, EOFError), _show)


def _show(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    frames: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    chain = []
    while frames is not None:
        chain.append(frames)
        frames = frames.tb_next
    files = [entry.tb_frame.f_code.co_filename for entry in chain]
    in_loader = not isinstance(error, RuntimeError) and any(_LOADER in name for name in files)
    if not in_loader and not _DIED.search(str(error)):
        shell.showtraceback((kind, error, chain[0] if chain else None), tb_offset=tb_offset)
        return
    # torch's handler raises the news once more, also while this error is being written.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        text = f"{_WHY}\n{error}"
        if isinstance(error, OSError):  # else its number and its text are shown, not `args`
            error.errno = error.strerror = None
        error.args = (text,)
        error.__cause__ = None  # how torch noticed; this suppresses the context, too
        theirs = [i for i, name in enumerate(files) if shell.compile.format_code_name(name)]
        if theirs:
            chain[theirs[-1]].tb_next = None
        shell.showtraceback((kind, error, chain[0]), tb_offset=tb_offset)
    finally:
        signal.signal(signal.SIGCHLD, before)
