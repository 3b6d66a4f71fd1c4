"""The papermill engine that runs a submission: every cell, even if earlier cells failed.

The engine skips only the lab's demonstrations: no other cell depends on them.

After a hang or a lost rank, the engine asks the kernel for fresh ranks, runs the earlier cells
again and goes on with the next cell, so that one bug costs one criterion. An earlier cell may have
ended the rank, by a thread or a timer: so a cell whose rank was lost gets a second try. The referee
decides the points of a check; the engine tells the referee when a check begins and how its cell
ended.
"""

from __future__ import annotations

import asyncio
import atexit
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import zmq
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from nbclient import NotebookClient
from nbclient.client import CellExecutionComplete
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_output
from papermill.engines import Engine, papermill_engines

from autograder.box.guard import Guard, Wall
from autograder.criteria import read_ours
from autograder.criteria.criterion import Criterion, Lab, Status, Verdict
from autograder.referee.referee import Referee
from autograder.submission.failed_cells import FailedCell, explain, read_failure
from autograder.submission.outputs import Tidier
from autograder.submission.rerun import CellToRerun
from minidist.kernel.cell import printable

START_TIMEOUT_S = 120.0
RESTART_TIMEOUT_S = 90.0
CONTROL_TIMEOUT_S = 60.0  # long, because the front may first have to read many other messages
KERNEL_SLACK_S = 45.0  # the kernel ends a cell at most this long after its deadline
MAX_RESTARTS = 80
BROKEN = ("hang", "deadline", "rank_lost")


class InfrastructureError(Exception):
    """The grader's failure, not the student's: the kernel's front died or did not answer."""


@dataclass
class Session:
    """Inputs and results of one submission's run."""

    lab: Lab
    world_size: int
    referee: Referee
    kernel_arguments: list[str]
    on_verdict: Callable[[Verdict, float], None]
    connection_file: str
    wall: Wall | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    worked: list[CellToRerun] = field(default_factory=list)  # to run again on fresh ranks
    renumbered: dict[str, str] = field(default_factory=dict)  # In[n] of a rerun -> original In[n]
    restarts: int = 0


class RefereeEngine(Engine):
    """Registered with papermill as "referee"."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, *, session: Session, **kwargs):
        """Runs all cells of `nb_man.nb` on the ranks of `session`."""
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(_Run(nb_man, kernel_name, session).run())


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that leaves signals to the grader.

    nbclient would install a handler for SIGTERM and SIGINT that ends only the kernel. A worker
    that was told to end would take this for a failure of the grader, and would grade again.
    """

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> NoReturn:
        raise RuntimeError("signals are not this loop's")  # as a loop outside the main thread does


papermill_engines.register("referee", RefereeEngine)


class _Client(NotebookClient):
    """Survives malformed messages: outputs come from the student's ranks."""

    def handle_comm_msg(self, outs: Any, msg: Any, cell_index: int) -> None:
        """Keeps no state of widgets: nobody sees them, and nothing would bound the state's size."""

    async def _async_poll_output_msg(
        self, parent_msg_id: str, cell: NotebookNode, cell_index: int
    ) -> None:
        """Reads output until the cell is idle; ignores messages that cannot be read or stored.

        nbclient's own method would raise at the first such message, and the grader would stop.
        """
        assert self.kc is not None
        while True:
            try:
                msg = await self.kc.iopub_channel.get_msg(timeout=None)
                if msg["parent_header"].get("msg_id") == parent_msg_id:
                    self.process_message(msg, cell, cell_index)
            except CellExecutionComplete:
                return
            except zmq.ZMQError:
                raise  # the channel itself failed
            except Exception:
                # For example: a repeated signature, an invalid date or version, too deep JSON
                continue

    def forget_displays(self) -> None:
        """Keeps later display updates from changing the tidied outputs of a cell that has ended."""
        self._display_id_map.clear()


class _Run:
    def __init__(self, nb_man: Any, kernel_name: str, session: Session) -> None:
        self.nb_man, self.session = nb_man, session
        self.ends_at = time.monotonic() + session.lab.limits.wall_s
        self.outcome: dict[str, Any] = {}
        self.broken = False
        self.failed: list[FailedCell] = []
        self.told: dict[str, FailedCell] = {}  # criterion -> the failed cell it tells of
        self.client = _Client(
            nb_man.nb,
            kernel_name=kernel_name,
            allow_errors=True,
            timeout_func=self._timeout,
            startup_timeout=int(START_TIMEOUT_S),
            extra_arguments=list(session.kernel_arguments),
            on_cell_executed=self._executed,
            coalesce_streams=False,  # slow: the square of a line's length; Tidier joins streams
        )
        self.deadline_s = session.lab.cell_deadline_s
        self.tidier = Tidier(session.lab.limits.output_bytes)
        self.guard: Guard | None = None

    async def run(self) -> None:
        self.client.km = self.client.create_kernel_manager()
        # Unix sockets in the submission's own folder: no port of the machine is used.
        self.client.km.transport = "ipc"
        self.client.km.connection_file = self.session.connection_file
        try:
            async with self.client.async_setup_kernel():
                front = self.client.km.provisioner
                assert isinstance(front, LocalProvisioner)
                assert front.pid is not None
                self.guard = Guard(
                    front.pid, self.session.lab.limits, self.session.wall, self.session.sizes
                ).start()
                for index, cell in enumerate(self.nb_man.nb.cells):
                    if cell.cell_type == "code" and cell.source.strip():
                        await self._cell(cell, index)
        except (DeadKernelError, CellTimeoutError, RuntimeError, TimeoutError) as error:
            raise InfrastructureError(f"the kernel failed: {error}") from error
        finally:
            if self.client.km is None:
                # The kernel has ended. After a failed start, nbclient leaves this exit handler,
                # which would raise when the process ends.
                atexit.unregister(self.client._cleanup_kernel)
            if self.guard is not None:
                self.guard.stop()
        self.nb_man.nb.metadata.pop("widgets", None)

    async def _cell(self, cell: NotebookNode, index: int) -> None:
        meta = cell.metadata.minidist
        check = meta.grade_id if meta.kind == "check" else None
        if meta.kind == "given" and not meta.replay:
            return  # a demonstration; nothing depends on it
        if time.monotonic() > self.ends_at:
            return  # the remaining checks stay NOT_RUN
        self.nb_man.cell_start(cell, index)
        # If ranks died between two cells, something that an earlier cell has left behind ended
        # them. It would end fresh ranks, too.
        if lost := not self.broken and await self._are_lost():
            self._shorten()
        if (self.broken or lost) and not await self._fresh_ranks():
            self.ends_at = 0.0
            return
        began = time.monotonic()
        if check is None:
            await self._execute(cell, index, self.session.lab.cell_deadline_s)
            await self._second_try(cell, self.session.lab.cell_deadline_s)
            if failure := read_failure(cell, self.outcome):
                self.failed.append(failure)
        else:
            criterion = self.session.lab[check]
            self.session.referee.open(criterion)
            await self._execute(cell, index, criterion.deadline_s)
            verdict = self._close()
            verdict = await self._second_try(cell, criterion.deadline_s, criterion) or verdict
            verdict = self._own_numbers(verdict)
            if causes := follows_from(criterion, verdict, self.session.verdicts):
                verdict = await self._with_stand_ins(criterion, cell, verdict, causes)
            verdict, cause = explain(verdict, self.failed, self.told)
            if cause is not None:
                self.told[check] = cause
            self.session.verdicts[check] = verdict
            self.session.on_verdict(verdict, time.monotonic() - began)
        kind = self.outcome["kind"]
        if check is None and meta.replay:
            past = CellToRerun(cell.source, cell.execution_count or 0, meta.kind == "given")
            self.session.worked.append(past.defining() if kind in BROKEN else past)
        # A rank that the emulated cluster has lost would be missing in the next check, too.
        self.broken = kind in BROKEN or (check is not None and self.session.referee.misses_ranks())
        self.nb_man.cell_complete(cell, index)

    async def _second_try(
        self, cell: NotebookNode, deadline_s: float, criterion: Criterion | None = None
    ) -> Verdict | None:
        """Runs a cell whose rank was lost once more, because an earlier cell may have ended it.

        The earlier cells run without their bare calls, then with their definitions only. If ranks
        are lost again, this cell is to blame, and the earlier cells keep their code. They also keep
        it if the cell raises with definitions only, because a value may then be missing.

        Returns:
            the verdict of a second try at a check that lost no rank, else None.
        """
        first, before = self.outcome, self.session.worked
        if first["kind"] != "rank_lost":
            return None
        quiet, defining = [p.quiet() for p in before], [p.defining() for p in before]
        for worked in [quiet] if quiet == defining else [quiet, defining]:
            self.session.worked = worked
            if not await self._fresh_ranks():
                break
            if criterion is not None:
                self.session.referee.open(criterion)
            await self._again(cell.source, cell.execution_count or 0, deadline_s)
            verdict = self._close() if criterion is not None else None
            raised = self.outcome["kind"] == "error"
            if self.outcome["kind"] != "rank_lost" and not (raised and worked is defining):
                return verdict
        self.outcome, self.session.worked = first, before
        return None

    async def _with_stand_ins(
        self, criterion: Criterion, cell: NotebookNode, verdict: Verdict, causes: list[str]
    ) -> Verdict:
        """Runs a lost check again with our functions for earlier tasks; judges by both runs."""
        if self.outcome["kind"] in BROKEN and not await self._fresh_ranks():
            self.ends_at = 0.0
            return verdict
        self.session.referee.open(criterion, ours=read_ours(self.session.lab.name))
        await self._again(cell.source, cell.execution_count or 0, criterion.deadline_s)
        second = self._own_numbers(self._close())
        ours, found = ", ".join(criterion.stand_ins), ", ".join(causes)
        if second.status == Status.PASS:
            return replace(
                second,
                message=f"Passes with our {ours}, and costs nothing here. With yours it does not: "
                f"the fault is in one of them; {found} may have told it.",
            )
        if second.status == Status.STUDENT_ERROR and verdict.status != Status.STUDENT_ERROR:
            return verdict  # it may rely on details of the student's own functions
        return replace(second, message=f"Even with our {ours} (see {found}): {second.message}")

    def _shorten(self) -> bool:
        """Takes the bare calls out of the cells to rerun; if there are none, all but definitions.

        All cells are shortened, because nobody can tell which one is to blame: a timer may end a
        rank at any later time, and this time must not decide about marks.

        Returns:
            whether there was something to take out.
        """
        worked = self.session.worked
        quiet = [past.quiet() for past in worked]
        self.session.worked = quiet if quiet != worked else [past.defining() for past in worked]
        return self.session.worked != worked

    async def _execute(self, cell: NotebookNode, index: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.outcome = {}
        await self._control("deadline", seconds=deadline_s)
        await self.client.async_execute_cell(cell, index)
        self.client.forget_displays()
        self.tidier.tidy(cell)
        if not self.outcome:
            raise InfrastructureError("the kernel answered a cell without saying how it ended")
        if self.guard is not None and (reason := self.guard.take_reason()):
            self.outcome["why"] = reason
            cell.outputs.append(new_output("stream", name="stderr", text=f"{reason}\n"))

    def _executed(self, *, execute_reply: Any, **_: Any) -> None:
        content = execute_reply["content"]
        kind = "ok" if content.get("status") == "ok" else "error"
        self.outcome = {"kind": kind, "ranks": []} | dict(content.get("minidist") or {})
        self.outcome["ename"] = printable(str(content.get("ename") or "an error")[:100])
        self.outcome["why"] = printable(str(content.get("evalue") or "")[:6000])

    def _timeout(self, _: Any) -> float:
        return self.deadline_s + KERNEL_SLACK_S

    def _close(self) -> Verdict:
        """Has the referee judge the open check.

        What the kernel says counts only for ranks that did not answer.
        """
        kind, why = self.outcome["kind"], self.outcome["why"]
        said = {r["rank"]: r["status"] for r in self.outcome["ranks"]}
        if kind == "rank_lost":
            lost = {r: Status.RANK_LOST for r, status in said.items() if status == "lost"}
            missing = Status.NOT_RUN if lost else Status.RANK_LOST
            return self.session.referee.close(missing, why, lost)
        if kind in ("hang", "deadline"):
            failed = {r: Status.STUDENT_ERROR for r, status in said.items() if status == "error"}
            return self.session.referee.close(Status.TIMEOUT, why, failed)
        if kind == "error":
            return self.session.referee.close(Status.STUDENT_ERROR, why)
        return self.session.referee.close(Status.NOT_RUN, "the cell ended without an answer")

    async def _are_lost(self) -> bool:
        """Whether the ranks are lost; waits while ranks are being started."""
        ends_at = time.monotonic() + START_TIMEOUT_S
        while (state := (await self._control("status"))["state"]) == "starting":
            if time.monotonic() > ends_at:
                raise InfrastructureError(f"the ranks did not start in {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.1)
        return state == "lost"

    async def _fresh_ranks(self) -> bool:
        """Starts new ranks and reruns the cells in `worked`; False if restarts or time run out."""
        while True:
            self.session.restarts += 1
            if self.session.restarts > MAX_RESTARTS or time.monotonic() > self.ends_at:
                return False
            reply = await self._start()
            if reply.get("status") != "ok":
                # The submission may have left something in its box that keeps ranks from starting.
                # A failed start ends the box, so the next start gets a new box.
                reply = await self._start()
            if reply.get("status") != "ok":
                raise InfrastructureError(f"new ranks could not be started: {reply.get('evalue')}")
            for position, past in enumerate(self.session.worked):
                if not past.source.strip():
                    continue
                if time.monotonic() > self.ends_at:
                    return False
                await self._again(past.source, past.number, self.session.lab.cell_deadline_s)
                if self.outcome["kind"] == "rank_lost" and self._shorten():
                    break
                if self.outcome["kind"] in BROKEN:
                    # The cell worked before and fails now: keep its definitions at most.
                    shorter = past.defining()
                    self.session.worked[position] = (
                        shorter if shorter != past else replace(past, source="")
                    )
                    break
            else:
                return True

    async def _start(self) -> dict[str, Any]:
        """Asks the front for new ranks in place of the lost ranks; returns the front's reply."""
        self.session.referee.new_ranks()
        return await self._control(
            "restart", timeout=RESTART_TIMEOUT_S, ranks=self.session.world_size
        )

    async def _again(self, source: str, number: int, deadline_s: float) -> None:
        """Reruns a cell whose first run was In[`number`]."""
        cell = NotebookNode(cell_type="code", source=source, metadata={}, outputs=[])
        self.client.nb.cells.append(cell)  # nbclient needs the cell to be in the notebook
        try:
            index = len(self.client.nb.cells) - 1
            await self._execute(cell, index, deadline_s)
        finally:
            self.client.nb.cells.pop()
        self.session.renumbered[f"In[{cell.get('execution_count')}]"] = f"In[{number}]"

    def _own_numbers(self, verdict: Verdict) -> Verdict:
        """Replaces the In[n] of reruns in the message by the numbers that the student sees."""
        names = self.session.renumbered
        message = re.sub(r"In\[\d+\]", lambda m: names.get(m[0], m[0]), verdict.message)
        return replace(verdict, message=message)

    async def _control(
        self, action: str, timeout: float = CONTROL_TIMEOUT_S, **content: Any
    ) -> dict[str, Any]:
        """Sends a request to the front on its control channel and returns the reply's content."""
        kc = self.client.kc
        assert kc is not None
        message = kc.session.msg("minidist_request", {"action": action, **content})
        kc.control_channel.send(message)
        ends_at = time.monotonic() + timeout
        while (left := ends_at - time.monotonic()) > 0:
            try:
                reply = await kc.control_channel.get_msg(timeout=left)
            except Exception as error:  # queue.Empty, or the channel is closed
                raise InfrastructureError(f"the kernel did not answer {action!r}") from error
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return reply["content"]
        raise InfrastructureError(f"the kernel did not answer {action!r} in {timeout:.0f} s")


def follows_from(
    criterion: Criterion, verdict: Verdict, earlier: Mapping[str, Verdict]
) -> list[str]:
    """The lost criteria that judge what a lost criterion relies on."""
    if not verdict.status.is_lost:
        return []
    return [n for n in criterion.relies_on if n in earlier and earlier[n].status.is_lost]
