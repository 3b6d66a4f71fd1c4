"""One rank: a real IPython kernel whose sockets connect to the front instead of being bound."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, ClassVar

import zmq
from ipykernel.iostream import IOPubThread
from ipykernel.ipkernel import IPythonKernel
from ipykernel.jsonutil import json_clean
from ipykernel.kernelapp import IPKernelApp
from jupyter_client.jsonutil import json_default
from jupyter_client.session import json_packer
from tornado.ioloop import IOLoop
from traitlets.config import Config

from minidist.kernel.inside import diagnose, recover, rendezvous
from minidist.kernel.inside.companion import Companion
from minidist.kernel.inside.diagnose import collectives_started
from minidist.kernel.inside.errors import Shown, explain_errors, outside_of_cell
from minidist.kernel.inside.stream import BoundedStream, make_usable
from minidist.kernel.link import Link, socket_name
from minidist.processes.cores import num_cores
from minidist.processes.fork_server import reseed_numpy
from minidist.processes.last_calls import at_terminate, is_oversized
from minidist.processes.lifetime import die_with_parent, keep_backends

_CONNECT_MS = 20_000
# Gloo ends a rank when the size of a message is not the one expected. The front looks every half
# second and needs three seconds to see that ranks wait forever; a busy machine takes longer.
_HOLD_S = 30.0
_CHANNELS = {1: "shell", 2: "stdin", 3: "control"}


class RankKernel(IPythonKernel):
    """The IPython kernel with the front's cell numbers, so that all ranks agree on In[n]."""

    cells_started = 0
    cell_id = ""
    collectives_before = 0
    cells_begun: ClassVar[list[tuple[int, str]]] = []  # when, in ns, and the cell's name
    executing = False  # whether there is a cell to interrupt
    interrupted = False  # whether the present cell was interrupted
    interrupt_shown_s = -math.inf  # time.monotonic() of the last traceback of an interrupt

    async def do_execute(  # type: ignore[override]
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: Any = None,
        allow_stdin: bool = False,
        *,
        cell_meta: Any = None,
        cell_id: Any = None,
    ) -> dict[str, Any]:
        ours = (cell_meta or {}).get("minidist", {})
        shell: Any = self.shell
        if ours.get("count"):
            shell.execution_count = ours["count"]
            history = shell.history_manager
            for inputs in (history.input_hist_parsed, history.input_hist_raw):
                # Cells that this rank did not run leave empty entries, so In[n] stays right.
                inputs.extend([""] * (ours["count"] - len(inputs)))
        self.cells_started += 1
        self.cell_id = str(ours.get("cell", self.cells_started))
        self.collectives_before = collectives_started()
        self.cells_begun.append((time.time_ns(), f"In[{ours.get('count') or self.cell_id}]"))
        rendezvous.new_cell(self.cell_id)
        for stream in BoundedStream.of_rank:
            stream.new_cell(f"In{ours.get('count') or self.cell_id}")
        shown = Shown(shell)
        self.executing, self.interrupted, self.interrupt_shown_s = True, False, -math.inf
        try:
            reply = await super().do_execute(
                code,
                silent,
                store_history,
                user_expressions,
                allow_stdin,
                cell_meta=cell_meta,
                cell_id=cell_id,
            )
            shown.end(reply)
            return reply
        except (KeyboardInterrupt, Exception) as error:
            # A signal's handler raised it where IPython does not expect it: ipykernel would not
            # reply, and the front would wait for ever.
            more = {"execution_count": shell.execution_count, "user_expressions": {}, "payload": []}
            return {"status": "error", **outside_of_cell(error), **more}
        finally:
            self.executing = False
            make_usable()
            for stream in BoundedStream.of_rank:
                stream.end_cell()

    # ipykernel inspects the signature for every cell.
    do_execute.__signature__ = inspect.signature(do_execute)  # type: ignore[attr-defined]

    # The front publishes `execute_input` and `busy` once, so the ranks do not.

    def _publish_execute_input(self, *_: Any, **__: Any) -> None: ...

    def _publish_status(self, status: str, channel: str, parent: Any = None) -> None:
        request: Any = parent or self.get_parent(channel)
        asked = request.get("header", {}).get("msg_type")
        if (status, asked) != ("busy", "execute_request"):
            super()._publish_status(status, channel, parent)


class RankApp(IPKernelApp):
    """IPKernelApp that connects to sockets that the front has already bound."""

    run_dir = ""
    generation = 0
    rank = 0

    def _address(self, channel: str) -> str:
        return f"ipc://{self.run_dir}/{socket_name(self.generation, channel, self.rank)}"

    def _bind_socket(self, s: Any, port: int) -> int:
        _connect(s, self._address(_CHANNELS[port]))
        return port

    def init_control(self, context: Any) -> None:
        # super() connects the debugger's socket to the address of the shell's, which is the front's
        # here. The front deals its requests out to all sockets that are connected there, also to
        # one that is being closed, and this rank would miss a cell. So super() gets a shell socket
        # without an address.
        shell, self.shell_socket = self.shell_socket, context.socket(zmq.ROUTER)
        try:
            super().init_control(context)
        finally:
            self.shell_socket.close(0)
            self.shell_socket = shell

    def init_iopub(self, context: Any) -> None:
        # PUSH, not PUB: PUSH waits where PUB would drop messages, so no output is lost.
        self.iopub_socket = context.socket(zmq.PUSH)
        self.iopub_socket.linger = 1000
        _connect(self.iopub_socket, self._address("iopub"))
        self.configure_tornado_logger()
        self.iopub_thread = IOPubThread(self.iopub_socket, pipe=True, session=self.session)
        self.iopub_thread.start()
        self.iopub_socket = self.iopub_thread.background_socket

    def init_connection_file(self) -> None:
        pass

    def write_connection_file(self, **kwargs: Any) -> None:
        pass

    def init_poller(self) -> None:
        pass

    def init_heartbeat(self) -> None:
        pass

    def log_connection_info(self) -> None:
        pass


def _connect(sock: zmq.Socket[bytes], address: str) -> None:
    """Connect, and wait for the connection, because the front removes the socket files afterwards.

    Raises:
        ConnectionError: nobody has accepted the connection in time.
    """
    events = sock.get_monitor_socket(zmq.EVENT_CONNECTED)
    try:
        sock.connect(address)
        if not events.poll(_CONNECT_MS):
            raise ConnectionError(f"no connection to {address} within {_CONNECT_MS // 1000} s")
    finally:
        sock.disable_monitor()


def _make_app(config: dict[str, Any], rank: int) -> RankApp:
    settings = Config()
    settings.IPKernelApp.outstream_class = f"{BoundedStream.__module__}.BoundedStream"
    settings.IPKernelApp.kernel_class = RankKernel
    if rank != 0:  # one history is enough, and N writers would disturb each other in one file
        settings.HistoryManager.hist_file = ":memory:"
    BoundedStream.folder, BoundedStream.rank = config.get("output_dir"), rank
    app: Any = RankApp.instance(config=settings)
    app.kernel_class = RankKernel
    app.outstream_class = f"{BoundedStream.__module__}.BoundedStream"
    app.run_dir, app.generation, app.rank = config["run_dir"], config["generation"], rank
    app.shell_port, app.stdin_port, app.control_port = 1, 2, 3
    app.transport = "ipc"
    app.session.key = config["key"]
    app.session.signature_scheme = config["signature_scheme"]
    app.session.pack = _pack
    app.initialize([])
    app.shell.ask_exit = _refuse_exit
    explain_errors(app.shell)
    app.log.setLevel(logging.WARNING)  # lower levels are shown nowhere, but writing them takes time
    return app


def _pack(message: Any) -> bytes:
    """JSON of a message, with "?" for lone surrogates, which names of files may contain."""
    try:
        return json_packer(message)
    except UnicodeEncodeError:
        text = json.dumps(json_clean(message), default=json_default, ensure_ascii=False)
        return text.encode("utf-8", "replace")


def _refuse_exit() -> None:
    """What `exit()` and `quit()` do in a cell."""
    raise RuntimeError(
        "exit() and quit() would end this rank some time after the cell; nothing was ended. "
        "%restart_ranks starts fresh ranks"
    )


def _draw_in_cells() -> None:
    """If the launcher has imported pyplot already, switch it to the notebook's backend."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        name = pyplot.rcParams["backend"] = os.environ["MPLBACKEND"]
        pyplot.switch_backend(name)


def _hold(exception: str) -> None:
    """Keep a rank that gloo's thread is about to end, so that the front sees who called what.

    A rank that ends for a different reason is not kept: without memory, say, it cannot answer.
    """
    if is_oversized(exception):
        diagnose.got_oversized = True
        time.sleep(_HOLD_S)


def _run_hook() -> None:
    name = os.environ.get("MINIDIST_RANK_INIT")
    if name:
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)()


def main(config: dict[str, Any], launcher: int) -> None:
    """Serve cells until killed; runs in the process that torch's agent has forked."""
    die_with_parent(launcher)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the fork copied the agent's handlers
    faulthandler.disable()
    import torch

    torch.set_num_threads(max(1, num_cores() // config["ranks"]))
    reseed_numpy()
    rank = int(os.environ["RANK"])
    link = Link(config["run_dir"], config["key"], str(rank), config["generation"])
    link.send({"pid": os.getpid()})
    try:
        app = _make_app(config, rank)
        _draw_in_cells()
        rendezvous.install()
        keep_backends()
        at_terminate(_hold)
        _run_hook()
        app.iopub_thread.schedule(lambda: None)  # type: ignore[union-attr]
    except BaseException:
        link.send({"init_error": traceback.format_exc()[-8000:]})
        with contextlib.suppress(OSError):
            link.receive()  # the front ends this process
        raise
    Companion(
        link,
        kernel=app.kernel,
        loop=IOLoop.current(),
        main_thread=threading.main_thread(),
        inherited=recover.own_sockets(),
    ).start()
    link.send({"ready": True})
    app.start()
    time.sleep(0.2)  # let the last messages leave
    os._exit(0)  # otherwise the kernel's threads would keep a process alive that does not answer
