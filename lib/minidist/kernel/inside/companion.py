"""The companion thread of a rank: answers the front while the main thread is blocked.

Collectives release the GIL, so this thread runs while the cell waits in one. It answers questions
("where are you?"), raises KeyboardInterrupt in the cell, frees a rank that is stuck in gloo, and
ends the process when the front is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

from minidist.kernel.inside import diagnose, recover
from minidist.kernel.link import Link
from minidist.processes.tree import kill_descendants

_ENDS_WITHIN_S = 20.0


class Companion(threading.Thread):
    """Serves the front's requests on `link`.

    Args:
        kernel: this rank's `RankKernel`.
        loop: the main thread's event loop; it gets the work that must run on the main thread.
        inherited: inodes of the sockets that exist before any cell has run; never cut.
    """

    def __init__(
        self,
        link: Link,
        *,
        kernel: Any,
        loop: Any,
        main_thread: threading.Thread,
        inherited: set[str],
    ) -> None:
        super().__init__(name="minidist companion", daemon=True)
        self._link = link
        self._kernel = kernel
        self._loop = loop
        self._main = main_thread
        self._inherited = inherited
        self._sending = threading.Lock()

    def run(self) -> None:
        while (message := self._link.receive()) is not None:
            try:
                answer = self._answer(message)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
            if answer is not None:
                self._reply(message, answer)
        # The front is gone: nobody will ever ask for anything again.
        kill_descendants(os.getpid(), deadline_s=0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    def _reply(self, message: dict[str, Any], answer: dict[str, Any]) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._link.send({**answer, "id": message.get("id")})

    def _answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        do = message.get("do")
        if do == "where":
            return diagnose.where(self._main, self._kernel)
        if do == "status":
            return diagnose.status()
        if do == "interrupt":
            # A second interrupt would break off the traceback of the first; an interrupt after the
            # end of the cell would break off the reply.
            # For a while after the traceback, a DataLoader may still be ending its workers.
            reported = time.monotonic() - self._kernel.interrupt_shown_s < _ENDS_WITHIN_S
            if not self._kernel.executing or reported or diagnose.is_reporting(self._main):
                return {"reporting": True}
            # Signal the main thread, so that a system call there is interrupted as well.
            if self._main.ident is not None:
                self._kernel.interrupted = True
                signal.pthread_kill(self._main.ident, signal.SIGINT)
                # A cell that awaits is cancelled by its event loop, which sleeps until then.
                self._loop.add_callback(lambda: None)
            return {"reporting": False}
        if do == "cut":
            return {"aborted": recover.abort_nccl(), "cut": recover.cut_sockets(self._inherited)}
        if do == "reset":
            self._loop.add_callback(self._reset, message)
            return None
        return {"error": f"unknown request {do!r}"}

    def _reset(self, message: dict[str, Any]) -> None:
        """Reset the process groups; runs on the main thread, between cells."""
        self._reply(message, recover.reset_groups())
