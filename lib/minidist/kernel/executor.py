"""Runs cells on the ranks, and keeps the ranks: starts, restarts, interrupts, buries them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import zmq.asyncio

from minidist.kernel import magics, reply, table
from minidist.kernel.cell import Cell, merge_errors
from minidist.kernel.client import Client
from minidist.kernel.cluster import Cluster
from minidist.kernel.history import History, Past, key_of
from minidist.kernel.hub import Hub
from minidist.kernel.interrupt import interrupt, recover
from minidist.kernel.options import Options
from minidist.kernel.outputs import Outputs, label
from minidist.kernel.ranks import Ranks
from minidist.kernel.watch import Watch, places_of, states_of

HOW_TO_GO_ON = "Run %restart_ranks in a cell for fresh ranks, or restart the kernel."
# Output outside of cells (threads, widgets): bytes from one cell to the next.
MAX_STRAY_BYTES = 4 * 1024 * 1024
# Calls of input() of one rank in a cell, and bytes of one: they are kept until the cell ends.
MAX_INPUTS, MAX_INPUT_BYTES = 1000, 64 * 1024


class Executor:
    """The ranks and the cell that they run.

    Attributes:
        count: number of ranks; deadline_s: longest time of a cell in seconds, None for no limit;
        settled: whether ranks are ready, or known to be lost (not being started).
    """

    def __init__(
        self,
        *,
        client: Client,
        options: Options,
        context: zmq.asyncio.Context,
        run_dir: str,
        output_dir: str | None,
    ) -> None:
        self.count = options.num_ranks
        self.deadline_s = options.deadline_s
        self._client, self._options = client, options
        self._context, self._run_dir, self._output_dir = context, run_dir, output_dir
        self._hub = None if options.job is None else Hub(options.job)
        self._ranks: Ranks | None = None
        self._generation = -1
        self._failure = ""  # why there are no usable ranks, or empty
        self._settled = asyncio.Event()
        self._restarting = asyncio.Lock()
        self._stopping: asyncio.Task[bool] | None = None
        self._cell: Cell | None = None
        self._interrupting: asyncio.Task[None] | None = None  # kept, or it could be collected
        self._unsaid: Callable[[], None] | None = None  # that the cell has begun
        self._busy = False  # with a request, of which the ranks may know nothing yet
        self._interrupted = False  # before they did
        self._executions = 0
        self._cells = 0
        self._pending: dict[str, tuple[str, list[bytes], dict[str, Any]]] = {}
        self._stray_left = MAX_STRAY_BYTES
        self._history = History()
        self._failed_rank = 0  # where `%debug` goes

    # -- the ranks -------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        return self._settled.is_set()

    @property
    def least(self) -> int:
        """How many ranks there must be: one on each node."""
        return 1 if self._hub is None else self._hub.job.num_nodes

    async def until_settled(self) -> None:
        await self._settled.wait()

    async def start(self) -> None:
        await self.restart(None)

    async def restart(self, count: int | None) -> str:
        """Fresh ranks in place of the old ones; returns why it failed, or an empty string."""
        if count is not None and count < self.least:
            return f"expected {self.least} ranks or more, one on each node, got {count}"
        async with self._restarting:
            self._settled.clear()
            if self._cell is not None:
                self._cell.stop("rank_lost", "RankLost", "the ranks were restarted", [])
            self._bury()
            self.count = count or self.count
            self._generation += 1
            self._failure, self._failed_rank = "", 0
            ranks = self._ranks
            if ranks is None or not await self._stopped():
                if ranks is not None:
                    ranks.close()
                ranks = self._new_ranks()
                self._ranks = ranks
            try:
                await ranks.start(self.count, self._generation)
            except (RuntimeError, OSError) as error:
                self._failure = f"The ranks could not be started. {error}\n{HOW_TO_GO_ON}"
            finally:
                self._settled.set()
            return self._failure

    def _new_ranks(self) -> Ranks:
        make = Ranks if self._hub is None else partial(Cluster, hub=self._hub)
        return make(
            context=self._context,
            options=self._options,
            key=self._client.key,
            signature_scheme=self._client.signature_scheme,
            run_dir=self._run_dir,
            output_dir=self._output_dir,
            on_message=self._from_rank,
            on_lost=self._on_lost,
        )

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
        if self._hub is not None:
            self._hub.close()

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
            message = self._client.read(frames)
            parent = message["parent_header"].get("msg_id")
            cell = self._cell
            if channel == "stdin":
                fits = sum(map(len, frames)) <= MAX_INPUT_BYTES
                if cell is not None and parent == cell.msg_id and rank in cell.ranks and fits:
                    self._asks(rank, message)
            elif cell is not None and parent == cell.msg_id and channel == "shell":
                if rank in cell.ranks:
                    cell.replies.setdefault(rank, message["content"])
                    cell.changed.set()
            elif rank == 0 and (waiting := self._pending.pop(str(parent), None)):
                self._client.forward(waiting[0], [*waiting[1], *frames])

    def _output(self, rank: int, frames: list[bytes]) -> None:
        message = self._client.read(frames, content=False)
        kind, cell = message["header"]["msg_type"], self._cell
        if cell is None or message["parent_header"].get("msg_id") != cell.msg_id:
            size = sum(map(len, frames))
            starting = kind == "status" and not message["parent_header"]
            if rank == 0 and size <= self._stray_left and not starting:
                self._unpack(message)  # raises where the notebook could not read it either
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
        elif rank not in cell.outputs.ranks:
            return
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
        if len(waiting) >= MAX_INPUTS:
            return
        waiting.append((len(waiting), message))
        number = len(waiting) - 1
        if number < len(cell.answers):
            self._give(rank, message, cell.answers[number])
        elif number == cell.asked:
            cell.asked += 1
            frames = self._client.frames(
                "input_request", message["content"], cell.source, ident=cell.idents
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
        self._executions += keeps
        self._unsaid = partial(self._say_busy, request, None if silent else code)
        self._busy, self._interrupted = True, False
        try:
            answer = await self._run(idents, request, code, keeps)
        finally:
            self._busy = False
            self._announce()
        if answer["status"] == "error" and not silent:
            error = {key: answer[key] for key in ("ename", "evalue", "traceback")}
            self._client.publish("error", error, request)
        answer["execution_count"] = self._executions
        self._client.reply("shell", idents, request, answer)
        self._client.status("idle", request)
        return answer["status"] == "error" and bool(content.get("stop_on_error", True))

    def _announce(self) -> None:
        """Tell frontends that the cell has begun, unless they know; nothing may be shown before."""
        say, self._unsaid = self._unsaid, None
        if say is not None:
            say()

    def _say_busy(self, request: dict[str, Any], code: str | None) -> None:
        self._client.status("busy", request)
        if code is not None:
            shown = {"code": code, "execution_count": self._executions}
            self._client.publish("execute_input", shown, request)

    async def _run(
        self, idents: list[bytes], request: dict[str, Any], code: str, keeps: bool
    ) -> dict[str, Any]:
        """Content of the reply to a cell: first what its magics ask of the front, then its code."""
        if not self.settled:
            self._announce()
            await self.until_settled()
        try:
            plan = magics.read(code, self.count, self.least, fixed=self._options.fixed_ranks)
        except magics.MagicError as error:
            return reply.error("error", "UsageError", str(error), [])
        if plan.restart or plan.show or plan.debug:
            self._announce()
        answer = await self._fresh_ranks(plan, idents, request) if plan.restart else None
        if answer is None and plan.show:
            self._print(await self._table(), request)
        if answer is None and (plan.restart or plan.show) and not plan.code.strip():
            answer = reply.ok({}, [])
        if answer is None and plan.debug:
            plan = replace(plan, ranks=(min(self._failed_rank, self.count - 1),))
            if self.count > 1:
                self._print(f"[%debug on {label(plan.ranks or ())}]\n", request)
        if answer is None:
            answer = await self._one(idents, request, plan, count=self._executions)
        if keeps:
            again = "" if plan.debug or not plan.code.strip() else magics.without_restart(code)
            number, ok = self._executions, answer["status"] == "ok"
            self._history.note(key_of(request), number, again, ok=ok)
        return answer

    def _print(self, text: str, request: dict[str, Any]) -> None:
        self._client.publish("stream", {"name": "stdout", "text": text}, request)

    async def _table(self) -> str:
        """What `%ranks` shows."""
        ranks, everyone = self._ranks, list(range(self.count))
        reports = {} if ranks is None else await ranks.ask_all(everyone, "status", 1.0)
        rows = []
        for rank in everyone:
            state = "ready" if ranks is not None and ranks.alive(rank) else "ended"
            node = "" if ranks is None else ranks.node_of(rank)
            rows.append(table.row(rank, state, reports.get(rank), node))
        return table.table(rows) + (f"{self._failure}\n" if self._failure else "")

    async def _fresh_ranks(
        self, plan: magics.Plan, idents: list[bytes], request: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Start fresh ranks and, if asked to, run the cells above; the reply if that failed."""
        if failed := await self.restart(plan.count):
            return reply.error("rank_lost", "RankLost", failed, [])
        told = f"{self.count} fresh rank{'s' if self.count > 1 else ''}"
        if not plan.rerun:
            self._print(f"[{told}]\n", request)
            return None
        left_out: list[str] = []
        done = highest = 0
        for past in self._history.above(key_of(request)):
            if not past.ok:
                left_out.append(f"In[{past.number}]")
                continue
            answer = await self._again(past, idents, request, past.number > highest)
            if answer["status"] == "error":
                text = f"In[{past.number}], run again: {answer['evalue']}"
                return {**answer, "evalue": text}
            done, highest = done + 1, max(highest, past.number)
        told += f"; {done} cell{'' if done == 1 else 's'} run again"
        if left_out:
            told += f", not {', '.join(left_out)}, which had failed"
        if self._history.forgotten:
            told += (
                f", not the first {self._history.forgotten} of the notebook, which are forgotten"
            )
        self._print(f"[{told}]\n", request)
        return None

    async def _again(
        self, past: Past, idents: list[bytes], request: dict[str, Any], keeps: bool
    ) -> dict[str, Any]:
        """Run a cell again under its old number; its output is in the notebook already."""
        try:
            plan = magics.read(past.code, self.count)
        except magics.MagicError as error:
            return reply.error("error", "UsageError", str(error), [])
        # A message id of its own keeps late messages of one cell out of the next.
        header = {**request["header"], "msg_id": uuid.uuid4().hex}
        # Numbers that do not rise would put its source into the wrong place of In.
        content = {**request["content"], "store_history": keeps, "user_expressions": {}}
        own = {**request, "header": header, "content": content}
        return await self._one(idents, own, plan, count=past.number, source=request)

    async def _one(
        self,
        idents: list[bytes],
        request: dict[str, Any],
        plan: magics.Plan,
        *,
        count: int,
        source: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run the plan's code as In[count]; with a `source`, its output is not shown."""
        if self._failure or self._ranks is None:
            return reply.error("rank_lost", "RankLost", self._failure, [])
        if self._interrupted:
            return reply.error("error", "KeyboardInterrupt", "before the cell had begun", [])
        cell = self._send(idents, request, plan, count, source)
        self._announce()  # only now: the ranks can work meanwhile
        try:
            await self._until_done(cell)
            note = await recover(cell, self._ranks) if cell.interrupted else ""
        finally:
            self._cell = None
            self._stray_left = MAX_STRAY_BYTES
        cell.outputs.finish()
        if note:
            content = {"name": "stderr", "text": f"[{note}]\n"}
            self._client.publish("stream", content, cell.source)
        return self._conclude(cell)

    def _send(
        self,
        idents: list[bytes],
        request: dict[str, Any],
        plan: magics.Plan,
        count: int,
        source: dict[str, Any] | None,
    ) -> Cell:
        ranks = list(range(self.count) if plan.ranks is None else plan.ranks)
        wanted = request["content"]
        numbered = bool(wanted.get("store_history", True)) and not wanted.get("silent")
        if source is None:
            outputs = Outputs(
                # Code that an editor runs unseen (for its list of variables, say) reads what one
                # kernel would print.
                ranks if numbered else ranks[:1],
                lambda kind, content: self._client.publish(kind, content, request),
                lambda frames: self._client.forward("iopub", frames),
            )
        else:
            outputs = Outputs(ranks, lambda kind, content: None, lambda frames: None)
        self._cells += 1
        cell = Cell(request, idents, ranks, outputs, count, self._generation, source or request)
        self._cell = cell
        ours: dict[str, Any] = {"cell": f"{self._generation}.{self._cells}"}
        if source is not None or numbered:
            ours["count"] = count
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
        heard = {r: cell.replies[r] for r in cell.outputs.ranks if r in cell.replies}
        errors = merge_errors(heard, self.count)
        if cell.broken is not None:
            broken = cell.broken
            if not self._failure and cell.generation == self._generation:
                cause = f"{broken['ename']}: {broken['text'].splitlines()[0]}"
                self._failure = f"no ranks since In[{cell.count}] ({cause}). {HOW_TO_GO_ON}"
                self._bury()
            before = errors["traceback"] if errors else []
            text = f"\x1b[31m{broken['ename']}\x1b[0m: {broken['text']}\n{HOW_TO_GO_ON}"
            answer = reply.error(broken["kind"], broken["ename"], broken["text"], broken["ranks"])
            return {**answer, "traceback": [*before, text]}
        states = reply.states_at_end(cell.replies)
        if errors is not None:
            self._failed_rank = min(s["rank"] for s in states if s["status"] == "error")
            answer = reply.error("error", errors["ename"], errors["evalue"], states)
            return {**answer, "traceback": errors["traceback"]}
        return reply.ok(cell.replies.get(cell.outputs.plain, {}), states)

    async def interrupt(self) -> dict[str, Any]:
        """Start interrupting the running cell, if there is one."""
        if self._cell is not None and self._ranks is not None:
            work = interrupt(self._cell, self._ranks)
            self._interrupting = asyncio.get_running_loop().create_task(work)
        elif self._busy:
            self._interrupted = True
        return {"status": "ok"}
