"""The events of the ranks in one session, and the frames that do nothing but add events.

Frames come from untrusted processes, so every field is checked; a ProtocolError means that this
rank broke the protocol.
"""

from __future__ import annotations

from typing import Any, Literal

from minidist.emulate.plan import DIRECTIONS, ChargePlan
from minidist.emulate.rank_calls import RankCall, amount, integer, num_bytes
from minidist.emulate.trace import Collective, Event
from minidist.errors import ProtocolError

_MAX_STREAMS = 1024


class Ledger:
    """The events of each rank, in that rank's order.

    Args:
        plan: what layers cost; None if ranks report their own compute.
        max_events: largest number of events of one rank.
    """

    def __init__(self, world_size: int, plan: ChargePlan | None, max_events: int) -> None:
        self.events: list[list[Event]] = [[] for _ in range(world_size)]
        self._plan, self._max_events = plan, max_events
        self._charges: dict[tuple[int, int, str], int] = {}
        self._marks: list[set[int]] = [set() for _ in range(world_size)]

    def check_room(self, rank: int) -> None:
        if len(self.events[rank]) >= self._max_events:
            raise ProtocolError(f"more than {self._max_events} events in one session")

    def charge(self, rank: int, header: dict[str, Any], plan: ChargePlan) -> float:
        """Charge the rank for a layer's pass; returns the factor that the rank gets for it."""
        layer = integer(header, "layer", 0, plan.num_layers - 1)
        direction = header.get("dir")
        if direction not in DIRECTIONS:
            raise ProtocolError(f"direction must be one of {DIRECTIONS}")
        n = self._charges.get((rank, layer, direction), 0)
        self._charges[rank, layer, direction] = n + 1
        event = Event(
            kind="compute",
            name=f"{direction} {layer}",
            duration_s=plan.seconds(layer, direction),
            layer=layer,
            direction=direction,
            step=n,
        )
        self.events[rank].append(event)
        return plan.factor(rank, layer, direction, n)

    def compute(self, rank: int, header: dict[str, Any]) -> None:
        """Record compute that the rank reports itself."""
        if self._plan is not None:
            raise ProtocolError("reported compute of its own in a session that charges by plan")
        entries = header.get("ev")
        if not isinstance(entries, list):
            raise ProtocolError("compute needs a list of [name, flops, bytes, stream]")
        for entry in entries:
            self.check_room(rank)
            if not isinstance(entry, list) or len(entry) != 4 or not isinstance(entry[0], str):
                raise ProtocolError("compute needs a list of [name, flops, bytes, stream]")
            event = Event(
                kind="compute",
                name=entry[0][:80],
                flops=amount(entry[1]),
                num_bytes=amount(entry[2]),
                stream=_stream({"st": entry[3]}),
            )
            self.events[rank].append(event)

    def issue(self, call: RankCall, header: dict[str, Any], record: Collective) -> None:
        stream = _stream(header)
        events = self.events[call.rank]
        if self._plan is not None and stream:
            # Nothing proves which computes a collective on a different stream depends on, so it
            # must wait for everything that this rank has been charged for.
            mark = f"charges/{len(events)}"
            events.append(Event(kind="record", key=mark))
            events.append(Event(kind="after", key=mark, stream=stream))
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
            numel=call.numel,
            dtype=call.dtype,
            root=call.root,
        )
        events.append(event)

    def wait(self, rank: int, header: dict[str, Any], record: Collective) -> None:
        event = Event(kind="wait", name=record.kind, key=record.key, stream=_stream(header))
        self.events[rank].append(event)

    def mark(self, rank: int, header: dict[str, Any], kind: Literal["record", "after"]) -> None:
        """Record a mark on a stream, or a stream's wait for a mark of the same rank."""
        mark = integer(header, "e", 0, 1 << 40)
        marks = self._marks[rank]
        if (kind == "record") == (mark in marks):
            state = "has been" if mark in marks else "has not been"
            raise ProtocolError(f"{kind} of mark {mark}, which {state} recorded")
        marks.add(mark)
        event = Event(kind=kind, name="stream", key=f"mark/{mark}", stream=_stream(header))
        self.events[rank].append(event)

    def first_issues(self) -> dict[str, tuple[int, int]]:
        """Collective -> (the lowest rank that issued it, the index in that rank's events)."""
        first: dict[str, tuple[int, int]] = {}
        for rank, events in enumerate(self.events):
            for index, event in enumerate(events):
                if event.kind == "issue":
                    first.setdefault(event.key, (rank, index))
        return first


def _stream(header: dict[str, Any]) -> int:
    return integer({"st": 0} | header, "st", 0, _MAX_STREAMS - 1)
