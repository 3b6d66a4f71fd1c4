"""The referee: trusted, outside the ranks. Draws inputs, receives every rank's answer, judges.

[Note: the referee's protocol]

A submission's ranks connect over one unix socket, before any of the student's code runs. Each rank
has one connection for checks and one for the emulated cluster, whose broker belongs to the referee.

    rank (`inside/probe.py`)          referee
    hello: rank, channel          →   welcome; refused: no such rank, or it is connected already
    ask: name of a criterion      →   inputs of this rank; refused: a different check is open
    answer: ok and values         →   noted, or at a student's desk: verdict
            error and message
            blocked and message       (only for extra points: this machine lacks the hardware)

1. The grader opens a check (`open`): the referee draws the inputs of all ranks with secret seeds.
2. Each rank asks once, and gets its own inputs, except those whose names begin with "_".
3. Each rank runs the student's code and answers once. The first answer counts, and only for the
   open check. A rank cannot send a verdict: there is no message for it.
4. The grader closes the check (`close`) when the cell has ended or the deadline has passed. If all
   ranks have answered ok, the criterion judges the answers and the broker's trace. If not, the
   worst status of a rank is the verdict.

What the ranks print, raise or claim about themselves is never evidence. `messages.py` has the form
of the messages. At a student's desk, the referee of `practice.py` opens and closes checks itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autograder.criteria.criterion import (
    Case,
    Criterion,
    Draw,
    Finding,
    Status,
    Values,
    Verdict,
    named_ranks,
    split,
)
from autograder.inside.messages import Message, receive, send
from autograder.referee.judging import judge
from minidist.emulate.broker import Broker
from minidist.emulate.client import CollectiveMismatch
from minidist.emulate.plan import ChargePlan
from minidist.errors import DeadlineError, ProtocolError
from minidist.kernel.cell import printable

HELLO_DEADLINE_S = 20.0
ANSWER_DEADLINE_S = 60.0
MAX_MESSAGE_CHARS = 6000
# Limits for the emulated cluster: bytes of one payload, and of all ranks together in one check.
# Payloads are kept until the check is judged, up to five times. Honest work needs an eighth of the
# limits on three ranks.
MAX_PAYLOAD_BYTES = 1 << 26
MAX_SESSION_BYTES = 1 << 28
MAX_SESSION_EVENTS = 5_000  # the time to replay events grows faster than their number
_REASONS = {
    Status.TIMEOUT: "no answer before the deadline",
    Status.RANK_LOST: "the process ended before it answered",
    Status.NOT_RUN: "the check was not reached",
    Status.STUDENT_ERROR: "the code raised",
    Status.WRONG: "no answer",
}
# The criterion gets the worst status of its ranks, in this order. BLOCKED comes first, because
# the other ranks could not work without the blocked rank.
_WORST = (
    Status.BLOCKED,
    Status.RANK_LOST,
    Status.TIMEOUT,
    Status.STUDENT_ERROR,
    Status.WRONG,
    Status.NOT_RUN,
)


def draw_for(key: bytes, lab: str, criterion: str, attempt: str, world_size: int) -> Draw:
    """Secret draws: seeds are 128 bits of an HMAC-SHA256.

    Its key is the course key; its text is lab, criterion, attempt, world size and purpose.
    """

    def seed(purpose: str) -> int:
        text = "\0".join((lab, criterion, attempt, str(world_size), purpose))
        return int.from_bytes(hmac.new(key, text.encode(), hashlib.sha256).digest()[:16], "big")

    return Draw(world_size, seed)


@dataclass
class OpenCheck:
    """The check that ranks may answer now."""

    case: int
    criterion: Criterion
    inputs: list[Values]
    plan: ChargePlan | None
    ours: str = ""  # source of functions that take the place of the student's
    asked: set[int] = field(default_factory=set)
    answers: dict[int, Values] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    blocked: dict[int, str] = field(default_factory=dict)  # only for criteria with extra points

    def has_heard(self, rank: int) -> bool:
        """Whether `rank` has sent an answer, an error or a missing-hardware message."""
        return rank in self.answers or rank in self.errors or rank in self.blocked


class Referee:
    """Serves one submission's ranks.

    Args:
        path: path of the unix socket; the constructor binds it, before any rank starts.
        world_size: number of ranks.
        draw: makes the draws of a criterion.
    """

    def __init__(self, path: Path, world_size: int, draw: Callable[[Criterion], Draw]) -> None:
        self.path, self.world_size = path, world_size
        self._draw = draw
        self._changed = threading.Condition()
        self._open: OpenCheck | None = None
        self._cases = 0
        self._connections: dict[tuple[str, int], socket.socket] = {}
        self._gone: set[int] = set()  # ranks that were connected and have disconnected
        self._stopped = False
        self._greeting = threading.BoundedSemaphore(8 * world_size)  # connections before a hello
        self.broker = Broker(
            world_size,
            keep_payloads=True,
            max_payload_bytes=MAX_PAYLOAD_BYTES,
            max_session_bytes=MAX_SESSION_BYTES,
            max_session_events=MAX_SESSION_EVENTS,
        )
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(4 * world_size)
        threading.Thread(target=self._accept, name="referee", daemon=True).start()

    # --- the grader's side -----------------------------------------------------------------------

    def open(self, criterion: Criterion, *, ours: str = "") -> None:
        """Draws inputs; from now on ranks may ask for and answer this criterion.

        Args:
            ours: source text; ranks use its functions for the criterion's `stand_ins`.
        """
        draw = self._draw(criterion)
        plan = criterion.plan(draw) if criterion.plan else None
        inputs = criterion.draw(draw)
        assert len(inputs) == self.world_size, f"{criterion.name} drew for {len(inputs)} ranks"
        if criterion.world == "emulated":
            self.broker.begin(plan)
        with self._changed:
            self._open = OpenCheck(self._cases, criterion, inputs, plan, ours)
            self._cases += 1

    def close(
        self, missing: Status, reason: str = "", ranks: dict[int, Status] | None = None
    ) -> Verdict:
        """Ends the open check and judges the answers.

        Args:
            missing: the status of a rank that did not answer.
            reason: why a rank did not answer, in words for the student (the kernel's diagnosis).
            ranks: rank -> status, for ranks without an answer whose status the kernel knows.
        """
        with self._changed:
            opened, self._open = self._open, None
            assert opened is not None, "close() without open()"
            criterion = opened.criterion
            # End the session under the lock: after the next open(), this would end the new session.
            trace = self.broker.end() if criterion.world == "emulated" else None
            self._changed.notify_all()
        statuses, notes = [], []
        for rank in range(self.world_size):
            if rank in opened.answers:
                statuses.append(Status.PASS)
            elif rank in opened.errors:
                statuses.append(Status.STUDENT_ERROR)
                # `_message` adds the rank, so remove the rank that errors of minidist already have.
                notes.append(Finding(opened.errors[rank].replace(f"[rank {rank}] ", "", 1), rank))
            elif rank in opened.blocked:
                statuses.append(Status.BLOCKED)
                notes.append(Finding(opened.blocked[rank], rank))
            else:
                statuses.append((ranks or {}).get(rank, missing))
        if all(status == Status.PASS for status in statuses):
            answers = [opened.answers[rank] for rank in range(self.world_size)]
            case = Case(self.world_size, opened.inputs, answers, trace, opened.plan)
            notes = judge(criterion, case)
            for finding in notes:
                for rank in range(self.world_size) if finding.rank is None else [finding.rank]:
                    statuses[rank] = Status.WRONG
        else:
            spoke = set(opened.errors) | set(opened.blocked)
            notes = self._explain_silence(statuses, spoke, reason) + notes
            if any(CollectiveMismatch.__name__ in said for said in opened.errors.values()):
                notes += [Finding(criterion.fault_hint)] if criterion.fault_hint else []
        worst = next((s for s in _WORST if s in statuses), Status.PASS)
        points = criterion.points if worst == Status.PASS else 0.0
        message = _message(notes, self.world_size) if worst != Status.PASS else ""
        return Verdict(
            criterion.name,
            worst,
            points,
            criterion.points,
            message,
            tuple(statuses),
            criterion.extra,
        )

    def _explain_silence(
        self, statuses: list[Status], spoke: set[int], reason: str
    ) -> list[Finding]:
        """Findings on why ranks did not answer; the first one is `reason`, if there is a reason."""
        notes: list[Finding] = []
        for status in _WORST:
            silent = [r for r, s in enumerate(statuses) if s == status and r not in spoke]
            if silent:
                what = (
                    reason if reason and not notes else f"{named_ranks(silent)}: {_REASONS[status]}"
                )
                notes.append(Finding(what))
        return notes

    def misses_ranks(self) -> bool:
        """Whether a rank that is connected for checks has lost the emulated cluster."""
        with self._changed:
            connected = {rank for channel, rank in self._connections if channel == "check"}
        return bool(connected - set(self.broker.attached()))

    def new_ranks(self) -> None:
        """Drops the connections of the old ranks, so that new ranks may connect."""
        with self._changed:
            connections, self._connections = self._connections, {}
            self._gone.clear()
        for (channel, rank), sock in connections.items():
            if channel == "broker":
                self.broker.detach(rank)  # the broker still watches the socket, so it closes it
            else:
                _close(sock)

    def stop(self) -> None:
        """Closes everything and removes the socket."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.new_ranks()
        self.broker.close()
        self.path.unlink(missing_ok=True)

    # --- the ranks' side -------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._stopped:
                    return
                time.sleep(0.05)  # too many open files, perhaps; ranks still have to connect
                continue
            if not self._greeting.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            channel, rank = self._hello(sock)
        except (ProtocolError, DeadlineError) as error:
            with contextlib.suppress(OSError, ProtocolError):
                send(sock, Message("refused", {"why": str(error)}))
            sock.close()
            return
        except OSError:
            sock.close()
            return
        finally:
            self._greeting.release()
        sock.settimeout(None)
        if channel == "broker":
            self.broker.attach(rank, sock)
        else:
            self._serve(rank, sock)

    def _hello(self, sock: socket.socket) -> tuple[str, int]:
        """Reads the first message, which must be a hello; returns channel and rank."""
        sock.settimeout(HELLO_DEADLINE_S)
        hello = receive(sock, max_array_bytes=0)
        rank, channel = hello.fields.get("rank"), hello.fields.get("channel")
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise ProtocolError(f"there is no rank {rank!r}")
        if channel not in ("check", "broker"):
            raise ProtocolError(f"there is no channel {channel!r}")
        with self._changed:
            # The broker drops broken connections without telling the referee.
            here = channel == "check" or rank in self.broker.attached()
            if here and (channel, rank) in self._connections:
                raise ProtocolError(f"rank {rank} is already connected for {channel}")
            self._connections[channel, rank] = sock
            self._gone.discard(rank)
        send(sock, Message("welcome"))
        return channel, rank

    def _serve(self, rank: int, sock: socket.socket) -> None:
        try:
            while True:
                message = receive(sock)
                reply = self._handle(rank, message)
                sock.settimeout(ANSWER_DEADLINE_S)
                send(sock, reply)
                sock.settimeout(None)
        except (ProtocolError, DeadlineError, OSError):
            pass
        finally:
            with self._changed:
                if self._connections.get(("check", rank)) is sock:
                    del self._connections["check", rank]
                    self._gone.add(rank)
                self._changed.notify_all()
            _close(sock)

    def _handle(self, rank: int, message: Message) -> Message:
        name = message.fields.get("criterion")
        if message.kind == "ask":
            return self._ask(rank, name)
        if message.kind == "answer":
            return self._answer(rank, name, message)
        raise ProtocolError(f"[rank {rank}] unknown message {message.kind!r}")

    def _ask(self, rank: int, name: object) -> Message:
        with self._changed:
            opened = self._open
            if opened is None or opened.criterion.name != name:
                now = opened.criterion.name if opened else "none"
                return Message("refused", {"why": f"the open check is {now}, not {name}"})
            if rank in opened.asked:
                return Message("refused", {"why": f"rank {rank} has asked for {name} already"})
            opened.asked.add(rank)
            handed_out = {k: v for k, v in opened.inputs[rank].items() if not k.startswith("_")}
            fields, arrays = split(handed_out)
            told = {"case": opened.case, "ours": opened.ours, "values": fields}
            return Message("inputs", told, arrays)

    def _answer(self, rank: int, name: object, message: Message) -> Message:
        with self._changed:
            opened = self._open
            if opened is None or opened.criterion.name != name or rank not in opened.asked:
                return Message("noted")
            if not opened.has_heard(rank):
                status, values = message.fields.get("status"), message.fields.get("values")
                said = str(message.fields.get("message", "an error"))[:4000]
                if status == "ok" and isinstance(values, dict):
                    opened.answers[rank] = values | message.arrays
                elif status == "blocked" and opened.criterion.extra:
                    opened.blocked[rank] = said
                else:
                    opened.errors[rank] = said
                self._changed.notify_all()
        return self._reply(opened, rank)

    def _reply(self, opened: OpenCheck, rank: int) -> Message:
        """The reply to a rank that has answered the open check."""
        return Message("noted")


def _message(findings: list[Finding], world_size: int, limit: int = 4) -> str:
    """The findings as lines; equal findings of several ranks share one line."""
    where: dict[str, list[int]] = {}
    for finding in findings:
        ranks = where.setdefault(finding.message, [])
        if finding.rank is not None and finding.rank not in ranks:
            ranks.append(finding.rank)
    lines = []
    for message, ranks in list(where.items())[:limit]:
        everywhere = not ranks or len(ranks) == world_size
        lines.append(message if everywhere else f"[{named_ranks(ranks)}] {message}")
    if len(where) > limit:
        lines.append(f"… and {len(where) - limit} more.")
    return printable("\n".join(lines)[:MAX_MESSAGE_CHARS])


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
