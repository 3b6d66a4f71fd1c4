"""Explains interrupts and dead DataLoader workers; prints errors that do not end the cell."""

from __future__ import annotations

import linecache
import re
import sys
import time
from traceback import walk_tb
from types import TracebackType
from typing import Any

from minidist.kernel.inside.diagnose import call_of

_DIED = re.compile(r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (?:is killed|exited)")
_LOADER = "torch/utils/data/dataloader.py"
_WHY = (
    "A worker process of a DataLoader died, not this rank. If it was killed, memory has most often "
    "run out: try fewer workers, or smaller batches."
)


class Shown:
    """Errors that IPython shows while a cell goes on: of a `_repr_html_`, or a cell in the cell.

    The front shows the error that ends a cell, from the reply. This class prints the others.
    """

    def __init__(self, shell: Any) -> None:
        self._shell, self._traces, self._last = shell, list[list[str]](), ("", "")
        shell._showtraceback = self._show

    def _show(self, kind: type[BaseException], error: BaseException, trace: list[str]) -> None:
        type(self._shell)._showtraceback(self._shell, kind, error, trace)
        if self._shell.kernel.executing:
            self._traces.append(trace)
            self._last = kind.__name__, str(error)
            if kind is KeyboardInterrupt:
                self._shell.kernel.interrupt_shown_s = time.monotonic()
        else:  # an error of a widget's callback
            print("\n".join(trace), file=sys.stderr)

    def end(self, reply: dict[str, Any]) -> None:
        """Prints the errors that are not the reply's."""
        if reply.get("ename") == "NoneType":  # ipykernel's, if a result cannot be shown
            reply["ename"], reply["evalue"] = self._last
        if reply.get("ename") == "CancelledError" and self._shell.kernel.interrupted:  # in await
            reply["ename"], reply["evalue"] = "KeyboardInterrupt", "the cell was interrupted"
        for trace in self._traces:
            if trace != reply.get("traceback"):
                print("\n".join(trace), file=sys.stderr)
        self._traces.clear()


def explain_errors(shell: Any) -> None:
    """Makes IPython's shell explain interrupts and the deaths of DataLoader workers.

    torch's handler of SIGCHLD is kept out. It raises wherever the program stands: where a lock has
    just been taken, which nobody gives back then, or in IPython. A DataLoader that waits for a
    batch also looks for dead workers itself, every 5 s.
    """
    from torch.utils.data._utils import signal_handling

    signal_handling._SIGCHLD_handler_set = True
    shell.set_custom_exc((RuntimeError, ConnectionError, EOFError, KeyboardInterrupt), _show)


def outside_of_cell(error: BaseException) -> dict[str, Any]:
    """The reply's error for one that was raised before a cell's first line or after its last."""
    text = str(error)
    if isinstance(error, KeyboardInterrupt):
        text = "the cell was interrupted before its first line or after its last"
    elif _DIED.search(text):
        text = f"{_WHY}\n{text}"
    kind = type(error).__name__
    shown = text if isinstance(error, KeyboardInterrupt) else f"{kind}: {text}"
    return {"ename": kind, "evalue": text, "traceback": [shown]}


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
    if isinstance(error, KeyboardInterrupt):
        show_interrupt(shell, error, chain)
        return
    files = [entry.tb_frame.f_code.co_filename for entry in chain]
    in_loader = not isinstance(error, RuntimeError) and any(_LOADER in name for name in files)
    if not in_loader and not _DIED.search(str(error)):
        shell.showtraceback((kind, error, chain[0] if chain else None), tb_offset=tb_offset)
        return
    text = f"{_WHY}\n{error}"
    if isinstance(error, OSError):  # else errno and strerror are shown, not `args`
        error.errno = error.strerror = None
    error.args = (text,)
    error.__cause__ = None  # it only says how torch noticed; None hides the context, too
    theirs = [i for i, name in enumerate(files) if shell.compile.format_code_name(name)]
    if theirs:
        chain[theirs[-1]].tb_next = None
    shell.showtraceback((kind, error, chain[0]), tb_offset=tb_offset)


def show_interrupt(shell: Any, error: KeyboardInterrupt, chain: list[TracebackType]) -> None:
    """Shows where the cells' code stood, a line per call, and which collective it was in."""
    lines = []
    for entry in chain:
        name = entry.tb_frame.f_code.co_filename
        if cell := shell.compile.format_code_name(name):
            source = linecache.getline(name, entry.tb_lineno).strip()
            lines.append(f"{' '.join(cell)}, line {entry.tb_lineno}: {source}")
    frames = [entry.tb_frame for entry in chain]
    if error.__context__ is not None:  # raised when this rank was cut off from its peers
        frames += [frame for frame, _ in walk_tb(error.__context__.__traceback__)]
    collective = next(filter(None, map(call_of, frames)), "")
    error.args = (f"in {collective}" if collective else "the cell was interrupted",)
    head = f"\x1b[31mKeyboardInterrupt\x1b[0m: {error}"
    shell._showtraceback(KeyboardInterrupt, error, [head, *lines])
