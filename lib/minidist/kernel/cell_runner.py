"""Runs cells on the ranks: obeys their magics, waits for their end, sends one reply per cell.

See [Note: the life of a cell] in README.md.
"""

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
from minidist.kernel.generations import HOW_TO_GO_ON, Generations
from minidist.kernel.history import History, Past, key_of
from minidist.kernel.inbox import Inbox
from minidist.kernel.interrupt import interrupt, recover
from minidist.kernel.options import KernelOptions
from minidist.kernel.outputs import Outputs, label
from minidist.kernel.watch import Watch, places_of, states_of


class CellRunner:
    """Runs one cell after the other on the present ranks.

    Attributes:
        generations: the ranks; inbox: receives what the ranks send;
        deadline_s: longest time of a cell in seconds, None for no limit.
    """

    def __init__(
        self,
        *,
        client: Client,
        options: KernelOptions,
        context: zmq.asyncio.Context,
        run_dir: str,
        output_dir: str | None,
    ) -> None:
        self.deadline_s = options.deadline_s
        self._client, self._options = client, options
        self.inbox = Inbox(client, self._to_rank)
        self.generations = Generations(
            client=client,
            options=options,
            context=context,
            run_dir=run_dir,
            output_dir=output_dir,
            on_message=self.inbox.receive,
            on_lost=self._on_lost,
            on_buried=self._on_buried,
        )
        self._interrupting: asyncio.Task[None] | None = None  # keeps it from garbage collection
        self._unsaid: Callable[[], None] | None = None  # publishes that the cell has begun
        self._busy = False  # whether a request is processed, even if the ranks do not have it yet
        self._interrupted = False  # whether the interrupt came before the ranks had the request
        self._executions = 0
        self._cells = 0
        self._history = History()
        self._failed_rank = 0  # the rank on which `%debug` runs

    # -- the ranks -------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Content of the reply to the `status` action."""
        ranks = self.generations
        state = "busy" if self.inbox.cell else "lost" if ranks.failure else "ready"
        return {
            "status": "ok",
            "state": state if ranks.settled else "starting",
            "generation": ranks.number,
            "ranks": ranks.states(),
        }

    def _to_rank(self, channel: str, rank: int, frames: list[bytes]) -> None:
        if self.generations.ranks is not None:
            self.generations.ranks.send(channel, rank, frames)

    def to_rank_zero(
        self, channel: str, idents: list[bytes], message: dict[str, Any], frames: list[bytes]
    ) -> bool:
        """Forward a message to rank 0; False if there are no ranks that could take it."""
        generations = self.generations
        if generations.ranks is None or generations.failure or not generations.settled:
            return False
        if message["header"]["msg_type"].endswith("_request"):
            self.inbox.expect(channel, idents, message)
        self._to_rank(channel, 0, frames)
        return True

    def _on_lost(self, rank: int | None, text: str) -> None:
        """A rank or the launcher has ended by itself."""
        cell = self.inbox.cell
        if cell is None:
            return
        states = states_of(places_of(cell, self.generations.count, {}))
        for state in states:
            if state["rank"] == rank:
                state.update(status="lost", text=text.removeprefix(f"rank {rank} "))
            elif state["rank"] in cell.unfinished:
                state.update(status="running", text="was ended because of it")
        cell.stop("rank_lost", "RankLost", f"{text} in the middle of this cell", states)

    def _on_buried(self) -> None:
        """The ranks are being ended. If the cell has ended already, its reason stays."""
        if self.inbox.cell is not None:
            self.inbox.cell.stop("rank_lost", "RankLost", "the ranks were restarted", [])
        self.inbox.give_up()
        self._failed_rank = 0

    # -- a cell ----------------------------------------------------------------------------------

    async def execute(self, idents: list[bytes], request: dict[str, Any]) -> bool:
        """Run one execute request; returns whether cells queued behind it must be aborted."""
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
        """Tell the clients, once, that the cell has begun; no output may be shown before that."""
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
        """Obey the cell's magics, then run its code; returns the content of the reply."""
        if not self.generations.settled:
            self._announce()
            await self.generations.until_settled()
        try:
            plan = magics.read(
                code,
                self.generations.count,
                self.generations.least,
                fixed=self._options.fixed_ranks,
            )
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
            plan = replace(plan, ranks=(min(self._failed_rank, self.generations.count - 1),))
            if self.generations.count > 1:
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
        ranks, everyone = self.generations.ranks, list(range(self.generations.count))
        reports = {} if ranks is None else await ranks.ask_all(everyone, "status", 5.0)
        rows = []
        for rank in everyone:
            state = "ready" if ranks is not None and ranks.alive(rank) else "ended"
            node = "" if ranks is None else ranks.node_of(rank)
            rows.append(table.row(rank, state, reports.get(rank), node))
        return table.table(rows) + (
            f"{self.generations.failure}\n" if self.generations.failure else ""
        )

    async def _fresh_ranks(
        self, plan: magics.Plan, idents: list[bytes], request: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Start fresh ranks; rerun the cells above if asked to. Returns a reply if that failed."""
        if failed := await self.generations.restart(plan.count):
            return reply.error("rank_lost", "RankLost", failed, [])
        told = f"{self.generations.count} fresh rank{'s' if self.generations.count > 1 else ''}"
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
        """Rerun a cell under its old number. The notebook shows its output already, so drop it."""
        try:
            plan = magics.read(past.code, self.generations.count)
        except magics.MagicError as error:
            return reply.error("error", "UsageError", str(error), [])
        # Each rerun has its own message id, so that late messages do not reach the next cell.
        header = {**request["header"], "msg_id": uuid.uuid4().hex}
        # IPython stores a source at the right place of In only if the numbers rise.
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
        """Run the plan's code as In[count]; if `source` is given (a rerun), no output is shown."""
        if self.generations.failure or self.generations.ranks is None:
            return reply.error("rank_lost", "RankLost", self.generations.failure, [])
        if self._interrupted:
            return reply.error("error", "KeyboardInterrupt", "before the cell had begun", [])
        cell = self._send(idents, request, plan, count, source)
        self._announce()  # after the send, so that the ranks work meanwhile
        try:
            await self._until_done(cell)
            note = await recover(cell, self.generations.ranks) if cell.interrupted else ""
        finally:
            self.inbox.end_cell()
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
        ranks = list(range(self.generations.count) if plan.ranks is None else plan.ranks)
        wanted = request["content"]
        numbered = bool(wanted.get("store_history", True)) and not wanted.get("silent")
        if source is None:
            outputs = Outputs(
                # An editor that runs hidden code (for its list of variables, say) expects the
                # output of one kernel.
                ranks if numbered else ranks[:1],
                lambda kind, content: self._client.publish(kind, content, request),
                lambda frames: self._client.forward("iopub", frames),
            )
        else:
            outputs = Outputs(ranks, lambda kind, content: None, lambda frames: None)
        self._cells += 1
        cell = Cell(
            request, idents, ranks, outputs, count, self.generations.number, source or request
        )
        self.inbox.cell = cell
        ours: dict[str, Any] = {"cell": f"{self.generations.number}.{self._cells}"}
        if source is not None or numbered:
            ours["count"] = count
        message = {
            **request,
            "content": {**request["content"], "code": plan.code, "stop_on_error": False},
            "metadata": {**request.get("metadata", {}), "minidist": ours},
        }
        frames = self._client.session.serialize(message)
        assert self.generations.ranks is not None
        for rank in ranks:
            self.generations.ranks.send("shell", rank, frames)
        return cell

    async def _until_done(self, cell: Cell) -> None:
        assert self.generations.ranks is not None
        watch = Watch(cell, self.generations.ranks, self.deadline_s)
        replied_at = None
        while cell.unfinished and cell.broken is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(cell.changed.wait(), watch.wait_s())
            cell.changed.clear()
            if len(cell.replies) == len(cell.ranks):
                replied_at = replied_at or time.monotonic()
                if time.monotonic() - replied_at > 5.0:
                    return  # an idle message was dropped with output that was too large
            await watch.look()

    def _conclude(self, cell: Cell) -> dict[str, Any]:
        heard = {r: cell.replies[r] for r in cell.outputs.ranks if r in cell.replies}
        errors = merge_errors(heard, self.generations.count)
        if cell.broken is not None:
            broken = cell.broken
            if not self.generations.failure and cell.generation == self.generations.number:
                cause = f"{broken['ename']}: {broken['text'].splitlines()[0]}"
                self.generations.failure = (
                    f"no ranks since In[{cell.count}] ({cause}). {HOW_TO_GO_ON}"
                )
                self.generations.bury()
            before = errors["traceback"] if errors else []
            text = f"\x1b[31m{broken['ename']}\x1b[0m: {broken['text']}\n{HOW_TO_GO_ON}"
            answer = reply.error(broken["kind"], broken["ename"], broken["text"], broken["ranks"])
            return {**answer, "traceback": [*before, text]}
        states = reply.states_at_end(cell.replies)
        if errors is not None:
            self._failed_rank = min(s["rank"] for s in states if s["status"] == "error")
            answer = reply.error("error", errors["ename"], errors["evalue"], states)
            return {**answer, "traceback": errors["traceback"]}
        return reply.ok(cell.replies.get(cell.outputs.lowest, {}), states)

    async def interrupt(self) -> dict[str, Any]:
        """Start interrupting the running cell, if there is one."""
        if self.inbox.cell is not None and self.generations.ranks is not None:
            work = interrupt(self.inbox.cell, self.generations.ranks)
            self._interrupting = asyncio.get_running_loop().create_task(work)
        elif self._busy:
            self._interrupted = True
        return {"status": "ok"}
