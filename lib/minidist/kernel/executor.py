"""Runs cells on the ranks, and keeps the ranks: starts, restarts, interrupts, buries them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import zmq.asyncio

from minidist.kernel import magics
from minidist.kernel.cell import Cell, merge_errors
from minidist.kernel.client import Client
from minidist.kernel.interrupt import interrupt, recover
from minidist.kernel.options import Options
from minidist.kernel.outputs import Outputs
from minidist.kernel.ranks import Ranks
from minidist.kernel.watch import Watch, places_of, states_of

HOW_TO_GO_ON = "Run %restart_ranks in a cell for fresh ranks, or restart the kernel."
# Output outside of cells (threads, widgets): bytes from one cell to the next.
MAX_STRAY_BYTES = 4 * 1024 * 1024


class Executor:
    """The ranks and the cell that they run.

    Attributes:
        count: number of ranks; deadline_s: longest time of a cell in seconds, None for no limit;
        settled: whether ranks are ready, or known to be lost (not being started).
    """

    def __init__(
        self, *, client: Client, options: Options, context: zmq.asyncio.Context, run_dir: str
    ) -> None:
        self.count = options.num_ranks
        self.deadline_s = options.deadline_s
        self._client, self._options = client, options
        self._context, self._run_dir = context, run_dir
        self._ranks: Ranks | None = None
        self._generation = -1
        self._failure = ""  # why there are no usable ranks, or empty
        self._settled = asyncio.Event()
        self._restarting = asyncio.Lock()
        self._stopping: asyncio.Task[bool] | None = None
        self._cell: Cell | None = None
        self._interrupting: asyncio.Task[None] | None = None  # kept, or it could be collected
        self._executions = 0
        self._cells = 0
        self._pending: dict[str, tuple[str, list[bytes], dict[str, Any]]] = {}
        self._stray_left = MAX_STRAY_BYTES

    # -- the ranks -------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        return self._settled.is_set()

    async def until_settled(self) -> None:
        await self._settled.wait()

    async def start(self) -> None:
        await self.restart(None)

    async def restart(self, count: int | None) -> str:
        """Fresh ranks in place of the old ones; returns why it failed, or an empty string."""
        async with self._restarting:
            self._settled.clear()
            if self._cell is not None:
                self._cell.stop("rank_lost", "RankLost", "the ranks were restarted", [])
            self._bury()
            self.count = count or self.count
            self._generation += 1
            self._failure = ""
            ranks = self._ranks
            if ranks is None or not await self._stopped():
                if ranks is not None:
                    ranks.close()
                ranks = Ranks(
                    context=self._context,
                    options=self._options,
                    key=self._client.key,
                    signature_scheme=self._client.signature_scheme,
                    run_dir=self._run_dir,
                    on_message=self._from_rank,
                    on_lost=self._on_lost,
                )
                self._ranks = ranks
            try:
                await ranks.start(self.count, self._generation)
            except (RuntimeError, OSError) as error:
                self._failure = f"The ranks could not be started. {error}\n{HOW_TO_GO_ON}"
            finally:
                self._settled.set()
            return self._failure

    async def _stopped(self) -> bool:
        """Whether the old ranks are gone and their launcher is fit to start others."""
        return self._stopping is not None and await self._stopping

    def _bury(self) -> None:
        """End the ranks; a launcher that does not see to it at once goes with them."""
        if self._ranks is not None and (self._stopping is None or self._stopping.done()):
            self._stopping = asyncio.get_running_loop().create_task(self._stop(self._ranks))
        for channel, idents, message in self._pending.values():
            self._client.reply(channel, idents, message, {"status": "error", "ename": "RankLost"})
            self._client.status("idle", message)
        self._pending.clear()

    async def _stop(self, ranks: Ranks) -> bool:
        stopped = await ranks.stop()
        if not stopped:
            ranks.close()
        return stopped

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def status(self) -> dict[str, Any]:
        """Content of the reply to the `status` action."""
        state = "busy" if self._cell else "lost" if self._failure else "ready"
        ranks = self._ranks
        known = [] if ranks is None else range(self.count)
        return {
            "status": "ok",
            "state": state if self.settled else "starting",
            "generation": self._generation,
            "ranks": [
                {"rank": r, "pid": ranks.pids.get(r), "alive": ranks.alive(r)}
                for r in known
                if ranks is not None
            ],
        }

    def _on_lost(self, rank: int | None, text: str) -> None:
        """A rank or the launcher has ended by itself."""
        cell, ranks = self._cell, self._ranks
        states: list[dict[str, Any]] = []
        if cell is not None and ranks is not None:
            states = states_of(places_of(cell, ranks.count, {}))
            for state in states:
                if state["rank"] == rank:
                    state.update(status="lost", text=text.removeprefix(f"rank {rank} "))
                elif state["rank"] in cell.unfinished:
                    state.update(status="running", text="was ended because of it")
        self._failure = f"{text}. {HOW_TO_GO_ON}"
        if cell is not None:
            cell.stop("rank_lost", "RankLost", f"{text} in the middle of this cell", states)
        self._bury()

    # -- messages --------------------------------------------------------------------------------

    def to_rank_zero(
        self, channel: str, idents: list[bytes], message: dict[str, Any], frames: list[bytes]
    ) -> bool:
        """Pass a request on; False when there is no rank to pass it to."""
        if self._ranks is None or self._failure or not self.settled:
            return False
        if message["header"]["msg_type"].endswith("_request"):
            self._pending[message["header"]["msg_id"]] = (channel, idents, message)
        self._ranks.send(channel, 0, frames)
        return True

    def _from_rank(self, channel: str, rank: int, frames: list[bytes]) -> None:
        """Anything a rank sends; what is not a proper message is dropped."""
        with contextlib.suppress(ValueError):
            if channel == "iopub":
                self._output(rank, frames)
                return
            _, message = self._client.parse(frames)
            parent = message["parent_header"].get("msg_id")
            cell = self._cell
            if channel == "stdin":
                if cell is not None and parent == cell.msg_id and rank in cell.ranks:
                    self._asks(rank, message)
            elif cell is not None and parent == cell.msg_id and channel == "shell":
                if rank in cell.ranks:
                    cell.replies.setdefault(rank, message["content"])
                    cell.changed.set()
            elif rank == 0 and (waiting := self._pending.pop(str(parent), None)):
                self._client.forward(waiting[0], [*waiting[1], *frames])

    def _output(self, rank: int, frames: list[bytes]) -> None:
        _, message = self._client.parse(frames, content=False)
        kind, cell = message["header"]["msg_type"], self._cell
        if cell is None or message["parent_header"].get("msg_id") != cell.msg_id:
            size = sum(map(len, frames))
            starting = kind == "status" and not message["parent_header"]
            if rank == 0 and size <= self._stray_left and not starting:
                self._stray_left -= size
                self._client.forward("iopub", frames)
            return
        if rank not in cell.ranks:
            return
        content = self._unpack(message)
        if kind == "status":
            if content.get("execution_state") == "idle":
                cell.idle.add(rank)
                cell.changed.set()
        elif kind == "stream":
            name = "stderr" if content.get("name") == "stderr" else "stdout"
            cell.outputs.stream(rank, name, str(content.get("text", "")), frames)
        elif kind not in ("execute_input", "error"):
            cell.outputs.rich(rank, kind, content, frames)

    def _unpack(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            content = self._client.session.unpack(message["content"])
        except Exception as error:
            raise ValueError("content is not JSON") from error
        return content if isinstance(content, dict) else {}

    # -- input() ---------------------------------------------------------------------------------

    def _asks(self, rank: int, message: dict[str, Any]) -> None:
        """input() in a cell is asked once; every rank gets the same answer."""
        cell = self._cell
        assert cell is not None
        waiting = cell.inputs.setdefault(rank, [])
        waiting.append((len(waiting), message))
        number = len(waiting) - 1
        if number < len(cell.answers):
            self._give(rank, message, cell.answers[number])
        elif number == cell.asked:
            cell.asked += 1
            frames = self._client.frames(
                "input_request", message["content"], cell.request, ident=cell.idents
            )
            self._client.forward("stdin", frames)

    def typed(self, message: dict[str, Any]) -> None:
        """The user has answered."""
        cell = self._cell
        if cell is None:
            return
        cell.answers.append(str(message["content"].get("value", "")))
        number = len(cell.answers) - 1
        for rank, waiting in cell.inputs.items():
            if number < len(waiting):
                self._give(rank, waiting[number][1], cell.answers[number])

    def _give(self, rank: int, request: dict[str, Any], value: str) -> None:
        if self._ranks is not None:
            content = {"status": "ok", "value": value}
            self._ranks.send("stdin", rank, self._client.frames("input_reply", content, request))

    # -- a cell ----------------------------------------------------------------------------------

    async def execute(self, idents: list[bytes], request: dict[str, Any]) -> bool:
        """Run one execute request; returns whether cells that wait behind it must be dropped."""
        content = request["content"]
        silent = bool(content.get("silent"))
        keeps = bool(content.get("store_history", True)) and not silent
        code = str(content.get("code", ""))
        self._client.status("busy", request)
        self._executions += keeps
        if not silent:
            shown = {"code": code, "execution_count": self._executions}
            self._client.publish("execute_input", shown, request)
        reply = await self._run(idents, request, code)
        if reply["status"] == "error" and not silent:
            error = {key: reply[key] for key in ("ename", "evalue", "traceback")}
            self._client.publish("error", error, request)
        reply["execution_count"] = self._executions
        self._client.reply("shell", idents, request, reply)
        self._client.status("idle", request)
        return reply["status"] == "error" and bool(content.get("stop_on_error", True))

    async def _run(self, idents: list[bytes], request: dict, code: str) -> dict[str, Any]:
        """Content of the reply to a cell."""
        await self.until_settled()
        try:
            plan = magics.read(code, self.count)
        except magics.MagicError as error:
            return _error("error", "UsageError", str(error), [])
        if plan.restart:
            failed = await self.restart(plan.count)
            if not failed:
                text = f"[{self.count} fresh rank{'s' if self.count > 1 else ''}]\n"
                self._client.publish("stream", {"name": "stdout", "text": text}, request)
            if not failed and not plan.code.strip():
                return _ok({}, [])
        if self._failure or self._ranks is None:
            return _error("rank_lost", "RankLost", self._failure, [])
        cell = self._send(idents, request, plan)
        try:
            await self._until_done(cell)
            note = await recover(cell, self._ranks) if cell.interrupted else ""
        finally:
            self._cell = None
            self._stray_left = MAX_STRAY_BYTES
        cell.outputs.finish()
        if note:
            content = {"name": "stderr", "text": f"[{note}]\n"}
            self._client.publish("stream", content, request)
        return self._conclude(cell)

    def _send(self, idents: list[bytes], request: dict[str, Any], plan: magics.Plan) -> Cell:
        ranks = list(range(self.count) if plan.ranks is None else plan.ranks)
        outputs = Outputs(
            ranks,
            lambda kind, content: self._client.publish(kind, content, request),
            lambda frames: self._client.forward("iopub", frames),
        )
        self._cells += 1
        cell = Cell(request, idents, ranks, outputs, self._executions, self._generation)
        self._cell = cell
        ours = {"cell": f"{self._generation}.{self._cells}"}
        if request["content"].get("store_history", True):
            ours["count"] = self._executions  # type: ignore[assignment]
        message = {
            **request,
            "content": {**request["content"], "code": plan.code, "stop_on_error": False},
            "metadata": {**request.get("metadata", {}), "minidist": ours},
        }
        frames = self._client.session.serialize(message)
        assert self._ranks is not None
        for rank in ranks:
            self._ranks.send("shell", rank, frames)
        return cell

    async def _until_done(self, cell: Cell) -> None:
        assert self._ranks is not None
        watch = Watch(cell, self._ranks, self.deadline_s)
        replied_at = None
        while cell.unfinished and cell.broken is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(cell.changed.wait(), watch.wait_s())
            cell.changed.clear()
            if len(cell.replies) == len(cell.ranks):
                replied_at = replied_at or time.monotonic()
                if time.monotonic() - replied_at > 5.0:
                    return  # an idle message got lost with output that was too large
            await watch.look()

    def _conclude(self, cell: Cell) -> dict[str, Any]:
        errors = merge_errors(cell.replies, self.count)
        if cell.broken is not None:
            broken = cell.broken
            if not self._failure and cell.generation == self._generation:
                cause = f"{broken['ename']}: {broken['text'].splitlines()[0]}"
                self._failure = f"no ranks since In[{cell.count}] ({cause}). {HOW_TO_GO_ON}"
                self._bury()
            before = errors["traceback"] if errors else []
            text = f"\x1b[31m{broken['ename']}\x1b[0m: {broken['text']}\n{HOW_TO_GO_ON}"
            reply = _error(broken["kind"], broken["ename"], broken["text"], broken["ranks"])
            return {**reply, "traceback": [*before, text]}
        states = [
            {
                "rank": rank,
                "status": "ok" if reply.get("status") == "ok" else "error",
                "text": "finished the cell"
                if reply.get("status") == "ok"
                else f"{reply.get('ename')}: {reply.get('evalue')}"[:300],
            }
            for rank, reply in sorted(cell.replies.items())
        ]
        if errors is not None:
            reply = _error("error", errors["ename"], errors["evalue"], states)
            return {**reply, "traceback": errors["traceback"]}
        return _ok(cell.replies.get(cell.outputs.plain, {}), states)

    async def interrupt(self) -> dict[str, Any]:
        """Start interrupting the running cell, if there is one."""
        if self._cell is not None and self._ranks is not None:
            work = interrupt(self._cell, self._ranks)
            self._interrupting = asyncio.get_running_loop().create_task(work)
        return {"status": "ok"}


def _ok(reply: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, Any]:
    keep = {key: reply[key] for key in ("payload", "user_expressions") if key in reply}
    return {
        "payload": [],
        "user_expressions": {},
        **keep,
        "status": "ok",
        "minidist": {"kind": "ok", "ranks": states},
    }


def _error(kind: str, ename: str, text: str, states: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "status": "error",
        "ename": ename,
        "evalue": text,
        "traceback": [f"\x1b[31m{ename}\x1b[0m: {text}"],
        "payload": [],
        "user_expressions": {},
        "minidist": {"kind": kind, "ranks": states},
    }
