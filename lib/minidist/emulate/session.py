"""One session of the broker: matches the calls of the ranks, computes results, keeps the trace.

Nothing here blocks or touches a socket: `handle` takes one frame of one rank and returns at once;
replies go out through the `reply` function given by the broker. Frames come from untrusted
processes, so every field is checked; a ProtocolError means that this rank broke the protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from minidist.emulate import arrays
from minidist.emulate.calls import (
    Call,
    agree,
    amount,
    integer,
    num_bytes,
    numel_of,
    parse_call,
    request_number,
    results,
    splits_agree,
)
from minidist.emulate.plan import DIRECTIONS, ChargePlan
from minidist.emulate.trace import Collective, Event, Trace
from minidist.errors import ProtocolError

_MAX_EVENTS = 1_000_000
_MAX_GROUPS = 4096
_MAX_STREAMS = 1024
# Reply(rank, header, payload)
Reply = Callable[[int, dict[str, Any], "np.ndarray | None"], None]


@dataclass
class _Slot:
    """The k-th collective of a group, or the n-th message of one direction."""

    record: Collective
    number: str  # for messages: "#3 of group 0"
    members: tuple[int, ...]
    calls: dict[int, Call] = field(default_factory=dict)
    results: dict[int, np.ndarray | None] = field(default_factory=dict)
    fetches: list[tuple[int, int, float]] = field(default_factory=list)  # rank, request, since
    ready: set[int] = field(default_factory=set)  # ranks whose result is there


class Session:
    """State of one session.

    Args:
        number: what frames have to carry to belong to this session.
        reply: sends a reply to a rank; must not block or raise.
        max_bytes: payload bytes that one rank may send in the session.
        max_events: charges, calls and waits of one rank in the session; replaying a trace takes
            longer than in proportion to them.
    """

    def __init__(
        self,
        number: int,
        world_size: int,
        plan: ChargePlan | None,
        reply: Reply,
        *,
        keep_payloads: bool,
        deadline_s: float,
        max_bytes: int,
        max_events: int = _MAX_EVENTS,
    ) -> None:
        self.number = number
        self.world_size = world_size
        self.plan = plan
        self.deadline_s = deadline_s
        self.faults: list[str] = []
        self.failure: tuple[str, str] | None = None  # kind and text of what ended the session
        self.left: set[int] = set()
        self.joined: set[int] = set()
        self._reply = reply
        self._keep = keep_payloads
        self._max_bytes = max_bytes
        self._max_events = max_events
        self._events: list[list[Event]] = [[] for _ in range(world_size)]
        self._slots: dict[str, _Slot] = {}
        self._waiting: dict[str, _Slot] = {}  # those with unanswered fetches
        self._groups: dict[str, tuple[int, ...]] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._message_counts: dict[tuple[str, int], int] = {}
        self._charges: dict[tuple[int, int, str], int] = {}
        self._marks: list[set[int]] = [set() for _ in range(world_size)]
        self._bytes = [0] * world_size
        self._last: dict[int, str] = {}

    # ------------------------------------------------------------------ frames

    def handle(self, rank: int, header: dict[str, Any], payload: np.ndarray) -> None:
        """One frame of `rank`, already known to belong to this session."""
        kind = header.get("t")
        if len(self._events[rank]) >= self._max_events:
            raise ProtocolError(f"more than {self._max_events} events in one session")
        self._bytes[rank] += payload.nbytes
        if self._bytes[rank] > self._max_bytes:
            raise ProtocolError(f"sent more than {self._max_bytes} bytes in one session")
        if kind == "issue":
            self._issue(rank, header, payload)
            return
        if payload.nbytes:
            raise ProtocolError(f"a {str(kind)[:40]!r} frame carries no payload")
        if kind == "fetch":
            self._fetch(rank, header)
        elif kind == "poll":
            slot = self._slot_of(rank, header)
            done = rank in slot.ready or self.failure is not None
            self._reply(rank, {"q": request_number(header), "done": done}, None)
        elif kind == "wait":
            self._add_wait(rank, header, self._slot_of(rank, header))
        elif kind in ("record", "after"):
            self._add_mark(rank, header, kind)
        elif kind == "charge":
            self._charge(rank, header)
        elif kind == "compute":
            self._compute(rank, header)
        elif kind == "join":
            self._join(rank, header)
        elif kind == "leave":
            self._leave(rank, header)
        else:
            raise ProtocolError(f"unknown frame type {str(kind)[:40]!r}")

    def _join(self, rank: int, header: dict[str, Any]) -> None:
        request = request_number(header)
        if rank in self.joined:
            text = "this rank has already been in this session; the next one must begin first"
            self._reply(rank, {"q": request, "error": ["protocol", text]}, None)
            return
        self.joined.add(rank)
        answer = {
            "q": request,
            "s": self.number,
            "world_size": self.world_size,
            "deadline_s": self.deadline_s,
            "charged": self.plan is not None,
        }
        self._reply(rank, answer, None)

    def _leave(self, rank: int, header: dict[str, Any]) -> None:
        self.left.add(rank)
        self._reply(rank, {"q": request_number(header)}, None)
        # Who waits for this rank waits in vain: say so now, not at the deadline.
        for slot in list(self._waiting.values()):
            if rank in slot.members and rank not in slot.calls:
                self._fail_missing(slot, "waits")
                return

    def _charge(self, rank: int, header: dict[str, Any]) -> None:
        request = request_number(header)
        if self.plan is None:
            text = "there is no charge plan in this session"
            self._reply(rank, {"q": request, "error": ["protocol", text]}, None)
            return
        layer = integer(header, "layer", 0, self.plan.num_layers - 1)
        direction = header.get("dir")
        if direction not in DIRECTIONS:
            raise ProtocolError(f"direction must be one of {DIRECTIONS}")
        n = self._charges.get((rank, layer, direction), 0)
        self._charges[rank, layer, direction] = n + 1
        event = Event(
            kind="compute",
            name=f"{direction} {layer}",
            duration_s=self.plan.seconds(layer, direction),
            layer=layer,
            direction=direction,
            step=n,
        )
        self._events[rank].append(event)
        factor = self.plan.factor(rank, layer, direction, n)
        self._reply(rank, {"q": request, "factor": factor}, None)

    def _compute(self, rank: int, header: dict[str, Any]) -> None:
        if self.plan is not None:
            raise ProtocolError("reported compute of its own in a session that charges by plan")
        entries = header.get("ev")
        if not isinstance(entries, list):
            raise ProtocolError("compute needs a list of [name, flops, bytes, stream]")
        for entry in entries:
            if not isinstance(entry, list) or len(entry) != 4 or not isinstance(entry[0], str):
                raise ProtocolError("compute needs a list of [name, flops, bytes, stream]")
            event = Event(
                kind="compute",
                name=entry[0][:80],
                flops=amount(entry[1]),
                num_bytes=amount(entry[2]),
                stream=_stream({"st": entry[3]}),
            )
            self._events[rank].append(event)

    # ------------------------------------------------------------- collectives

    def _issue(self, rank: int, header: dict[str, Any], payload: np.ndarray) -> None:
        group, members = self._group(rank, header)
        kind = header.get("kind")
        call = parse_call(rank, header, payload, members)
        self._last[rank] = call.describe()
        if kind in ("send", "recv"):
            self._issue_message(call, header, group, members)
            return
        number = self._counts.get((group, rank), 0)
        self._counts[group, rank] = number + 1
        if integer(header, "k", 0, 1 << 40) != number:
            raise ProtocolError(f"called its collective number {number} of group {group!r} another")
        key = f"{group}/{number}"
        slot = self._slots.get(key)
        if slot is None:
            slot = _Slot(_record(key, group, members, call), f"#{number} of {group}", members)
            self._slots[key] = slot
        self._add_issue(call, header, slot.record)
        slot.calls[rank] = call
        slot.record.arrived += (rank,)
        if self._keep and call.payload.nbytes:
            slot.record.payloads[rank] = arrays.values(call.payload, call.dtype)
        self._match(slot)

    def _issue_message(
        self, call: Call, header: dict[str, Any], group: str, members: tuple[int, ...]
    ) -> None:
        peer = integer(header, "peer", 0, self.world_size - 1)
        tag = integer(header, "tag", -(1 << 31), 1 << 31)
        if peer not in members:
            raise ProtocolError(f"{call.kind} with rank {peer}, which is not in group {group!r}")
        ends = (call.rank, peer) if call.kind == "send" else (peer, call.rank)
        path = f"{group}/{ends[0]}>{ends[1]}/{tag}"
        side = (f"{path}/{call.kind}", call.rank)
        number = self._message_counts.get(side, 0)
        self._message_counts[side] = number + 1
        key = f"{path}/{number}"
        slot = self._slots.get(key)
        if slot is None:
            record = _record(key, group, ends, call)
            record.kind = "send"
            slot = _Slot(record, f"#{number} {ends[0]} -> {ends[1]} of {group}", ends)
            self._slots[key] = slot
        self._add_issue(call, header, slot.record)
        # A message of a rank to itself has both of its ends there: tell them apart by kind.
        side_of = ends[0] if call.kind == "send" else ends[1]
        slot.calls[side_of if ends[0] != ends[1] else (-1 if call.kind == "send" else -2)] = call
        slot.record.arrived += (call.rank,)
        if call.kind == "send" and self._keep:
            slot.record.payloads[call.rank] = arrays.values(call.payload, call.dtype)
        if len(slot.calls) == 2:
            sent, wanted = sorted(slot.calls.values(), key=lambda c: c.kind, reverse=True)
            if (sent.dtype, sent.shape) != (wanted.dtype, wanted.shape):
                self._mismatch(slot)
                return
            slot.ready.add(wanted.rank)
            slot.results[wanted.rank] = sent.payload
            slot.record.completed = True
        self._flush(slot)

    def _match(self, slot: _Slot) -> None:
        if self.failure is not None:
            return  # the session is over: nothing may depend on who was faster
        if len(slot.calls) < len(slot.members):
            gone = [r for r in slot.members if r not in slot.calls and r in self.left]
            if gone and slot.fetches:
                self._fail_missing(slot, "waits")
            return
        # Only now, so that the message tells what every rank called.
        calls = [slot.calls[r] for r in slot.members]
        if not agree(calls) or (calls[0].kind == "all_to_all" and not splits_agree(calls)):
            self._mismatch(slot)
            return
        slot.results = results(slot.members, calls)
        slot.ready = set(slot.members)
        slot.record.completed = True
        if self._keep and calls[0].kind in ("all_reduce", "reduce", "broadcast", "all_gather"):
            raw = next((r for r in slot.results.values() if r is not None), None)
            if raw is not None:
                slot.record.result = arrays.values(raw, calls[0].dtype)
        for call in calls:
            call.payload = call.payload[:0]
        self._flush(slot)

    def _fetch(self, rank: int, header: dict[str, Any]) -> None:
        slot = self._slot_of(rank, header)
        if header.get("wait") is True:
            self._add_wait(rank, header, slot)
        slot.fetches.append((rank, request_number(header), time.monotonic()))
        self._waiting[slot.record.key] = slot
        if self.failure is None and rank not in slot.ready:
            if any(r in self.left for r in slot.members if r not in slot.calls):
                self._fail_missing(slot, "waits")
            return
        self._flush(slot)

    def _flush(self, slot: _Slot) -> None:
        """Answer the fetches whose result is there; all of them once the session has failed."""
        waiting = []
        for rank, request, since in slot.fetches:
            if rank in slot.ready:
                self._reply(rank, {"q": request}, slot.results.pop(rank, None))
            elif self.failure is not None:
                self._reply(rank, {"q": request, "error": list(self.failure)}, None)
            else:
                waiting.append((rank, request, since))
        slot.fetches = waiting
        if not waiting:
            self._waiting.pop(slot.record.key, None)

    # ----------------------------------------------------------------- failure

    def fail(self, kind: str, text: str) -> None:
        """End the session: every fetch of a result that is not there gets this error."""
        self.faults.append(text)
        if self.failure is None:
            self.failure = (kind, text)
        for slot in list(self._waiting.values()):
            self._flush(slot)

    def close(self, why: str) -> None:
        """Give everyone who still waits an error; the trace taken before is not touched."""
        if self.failure is None:
            self.failure = ("ended", why)
        for slot in list(self._waiting.values()):
            self._flush(slot)

    def check_deadline(self, now_s: float) -> float | None:
        """Fail if a fetch has waited too long; returns the seconds until the next may have."""
        oldest: tuple[float, _Slot] | None = None
        for slot in self._waiting.values():
            for _, _, since in slot.fetches:
                if oldest is None or since < oldest[0]:
                    oldest = (since, slot)
        if oldest is None:
            return None
        left_s = oldest[0] + self.deadline_s - now_s
        if left_s <= 0:
            self._fail_missing(oldest[1], f"waited {self.deadline_s:g} s")
            return None
        return left_s

    def _fail_missing(self, slot: _Slot, verb: str) -> None:
        waiting = ", ".join(f"rank {rank}" for rank in sorted({f[0] for f in slot.fetches}))
        message = slot.record.kind == "send"
        if message:
            absent = [slot.members[0]]
            called = next(c.describe() for c in slot.calls.values() if c.kind == "recv")
        else:
            absent = [rank for rank in slot.members if rank not in slot.calls]
            called = next(iter(slot.calls.values())).describe()
        states = []
        for rank in absent:
            state = (
                "has left the emulated cluster"
                if rank in self.left
                else "has not come to it"
                if rank in self.joined
                else "is not connected to this session"
            )
            last = self._last.get(rank)
            did = f"its last call was {last}" if last else "it has called nothing"
            states.append(f"rank {rank} {state}; {did}")
        text = f"{waiting} {verb} in {called} {slot.number}; missing: " + "; ".join(states)
        agreed = message or agree(list(slot.calls.values()))
        if not agreed:
            text += f". Those that came disagree: {_who_called_what(slot)}"
        self.fail("missing" if agreed else "mismatch", text)

    def _mismatch(self, slot: _Slot) -> None:
        text = f"the ranks disagree about collective {slot.number}: {_who_called_what(slot)}"
        if all(call.kind == "all_to_all" for call in slot.calls.values()):
            text += "; the sizes sent and expected have to agree pair by pair"
        self.fail("mismatch", text)

    # ------------------------------------------------------------------- parts

    def _group(self, rank: int, header: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
        name = header.get("g")
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise ProtocolError("a group needs a name of 1 to 200 characters")
        ranks = header.get("r")
        if (
            not isinstance(ranks, list)
            or not ranks
            or not all(type(r) is int and 0 <= r < self.world_size for r in ranks)
            or len(set(ranks)) != len(ranks)
            or rank not in ranks
        ):
            raise ProtocolError(
                f"the ranks of group {name!r} must be different, within 0 to "
                f"{self.world_size - 1}, and contain the caller"
            )
        members = tuple(ranks)
        if self._groups.setdefault(name, members) != members:
            raise ProtocolError(
                f"group {name!r} has ranks {list(members)} here and "
                f"{list(self._groups[name])} elsewhere"
            )
        if len(self._groups) > _MAX_GROUPS:
            raise ProtocolError(f"more than {_MAX_GROUPS} groups in one session")
        return name, members

    def _slot_of(self, rank: int, header: dict[str, Any]) -> _Slot:
        key = header.get("key")
        slot = self._slots.get(key) if isinstance(key, str) else None
        if slot is None or not any(call.rank == rank for call in slot.calls.values()):
            raise ProtocolError(f"asked for collective {str(key)[:80]!r}, which it has not issued")
        return slot

    def _add_issue(self, call: Call, header: dict[str, Any], record: Collective) -> None:
        stream = _stream(header)
        if self.plan is not None and stream:
            # Nothing proves which computes a collective on another stream depends on, so it
            # depends on all that this rank has been charged for.
            mark = f"charges/{len(self._events[call.rank])}"
            self._events[call.rank] += [
                Event(kind="record", key=mark),
                Event(kind="after", key=mark, stream=stream),
            ]
        event = Event(
            kind="issue",
            stream=stream,
            name=call.describe(),
            key=record.key,
            collective=call.kind,
            op=call.op,
            group=record.group,
            ranks=record.ranks,
            nbytes=num_bytes(call, len(record.ranks)),
            numel=numel_of(call.shape),
            dtype=call.dtype,
            root=call.root,
        )
        self._events[call.rank].append(event)

    def _add_wait(self, rank: int, header: dict[str, Any], slot: _Slot) -> None:
        record, stream = slot.record, _stream(header)
        event = Event(kind="wait", name=record.kind, key=record.key, stream=stream)
        self._events[rank].append(event)

    def _add_mark(
        self, rank: int, header: dict[str, Any], kind: Literal["record", "after"]
    ) -> None:
        mark = integer(header, "e", 0, 1 << 40)
        marks = self._marks[rank]
        if (kind == "record") == (mark in marks):
            state = "has been" if mark in marks else "has not been"
            raise ProtocolError(f"{kind} of mark {mark}, which {state} recorded")
        marks.add(mark)
        event = Event(kind=kind, name="stream", key=f"mark/{mark}", stream=_stream(header))
        self._events[rank].append(event)

    def trace(self) -> Trace:
        first: dict[str, tuple[int, int]] = {}
        for rank, events in enumerate(self._events):
            for index, event in enumerate(events):
                if event.kind == "issue":
                    first.setdefault(event.key, (rank, index))
        records = [slot.record for slot in self._slots.values()]
        for record in records:
            record.arrived = tuple(sorted(record.arrived))
        # The order must not depend on who came first in real time.
        records.sort(key=lambda record: first[record.key])
        return Trace(
            world_size=self.world_size,
            events=[list(events) for events in self._events],
            collectives=records,
            faults=list(self.faults),
        )


def _stream(header: dict[str, Any]) -> int:
    return integer({"st": 0} | header, "st", 0, _MAX_STREAMS - 1)


def _record(key: str, group: str, ranks: tuple[int, ...], call: Call) -> Collective:
    return Collective(
        key=key,
        kind=call.kind,
        op=call.op,
        group=group,
        ranks=ranks,
        shape=call.shape,
        numel=numel_of(call.shape),
        nbytes=num_bytes(call, len(ranks)),
        dtype=call.dtype,
        root=call.root,
    )


def _who_called_what(slot: _Slot) -> str:
    calls = (call for _, call in sorted(slot.calls.items()))
    return "; ".join(f"rank {call.rank} called {call.describe()}" for call in calls)
