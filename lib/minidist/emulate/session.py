"""One session of the broker: matches the calls of the ranks, computes results, keeps the trace.

Nothing here blocks or touches a socket: `handle` takes one frame of one rank and returns at once;
replies go out through the `reply` function given by the broker. Frames come from untrusted
processes, so every field is checked; a ProtocolError means that this rank broke the protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.emulate.ledger import Ledger
from minidist.emulate.plan import ChargePlan
from minidist.emulate.rank_calls import RankCall, integer, parse_call, request_number
from minidist.emulate.slots import Slot
from minidist.emulate.trace import Trace
from minidist.errors import ProtocolError

_MAX_EVENTS = 1_000_000
_MAX_GROUPS = 4096
_MAX_FAULTS = 100
# Reply(rank, header, payload)
Reply = Callable[[int, dict[str, Any], "np.ndarray | None"], None]


class Session:
    """State of one session.

    Args:
        number: the number that frames must carry to belong to this session.
        reply: sends a reply to a rank; must not block or raise.
        max_bytes: payload bytes that the ranks may send in the session, all together.
        max_events: charges, calls and waits of one rank in the session; the time to replay a trace
            grows faster than their number.
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
        self._ledger = Ledger(world_size, plan, max_events)
        self._slots: dict[str, Slot] = {}
        self._waiting: dict[str, Slot] = {}  # slots with unanswered fetches
        self._groups: dict[str, tuple[tuple[int, ...], int]] = {}  # ranks, and the first caller
        self._apart: set[int] = set()  # ranks that gave a group's name to different members
        self._counts: dict[tuple[str, int], int] = {}
        self._message_counts: dict[tuple[str, int], int] = {}
        self._bytes = 0
        self._last: dict[int, str] = {}

    # ------------------------------------------------------------------ frames

    def handle(self, rank: int, header: dict[str, Any], payload: np.ndarray) -> None:
        """Process one frame of `rank`; the caller has checked that it belongs to this session."""
        kind = header.get("t")
        self._ledger.check_room(rank)
        self._bytes += payload.nbytes
        if self._bytes > self._max_bytes:
            raise ProtocolError(f"the ranks sent more than {self._max_bytes} bytes in one session")
        if rank in self._apart and kind in ("issue", "fetch", "poll", "wait"):
            self._refuse(rank, header)
            return
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
            self._ledger.wait(rank, header, self._slot_of(rank, header).record)
        elif kind in ("record", "after"):
            self._ledger.mark(rank, header, kind)
        elif kind == "charge":
            self._charge(rank, header)
        elif kind == "compute":
            self._ledger.compute(rank, header)
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
        # Ranks that wait for this rank wait in vain: fail now, not at the deadline.
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
        factor = self._ledger.charge(rank, header, self.plan)
        self._reply(rank, {"q": request, "factor": factor}, None)

    # ------------------------------------------------------------- collectives

    def _issue(self, rank: int, header: dict[str, Any], payload: np.ndarray) -> None:
        group, members = self._group(rank, header)
        if rank in self._apart:
            return
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
        name = f"#{number} of the group of {self._named(members)}"
        slot = self._slots.get(key) or Slot.of(key, name, group, members, call)
        self._add(slot, call, header)
        self._match(slot)

    def _issue_message(
        self, call: RankCall, header: dict[str, Any], group: str, members: tuple[int, ...]
    ) -> None:
        peer = integer(header, "peer", 0, self.world_size - 1)
        tag = integer(header, "tag", -(1 << 31), 1 << 31)
        if peer not in members:
            raise ProtocolError(f"{call.kind} with rank {peer}, which is not in group {group!r}")
        self._last[call.rank] += f" {'to' if call.kind == 'send' else 'from'} rank {peer}"
        ends = (call.rank, peer) if call.kind == "send" else (peer, call.rank)
        path = f"{group}/{ends[0]}>{ends[1]}/{tag}"
        side = (f"{path}/{call.kind}", call.rank)
        number = self._message_counts.get(side, 0)
        self._message_counts[side] = number + 1
        key = f"{path}/{number}"
        name = f"#{number} from rank {ends[0]} to rank {ends[1]}"
        slot = self._slots.get(key) or Slot.of(key, name, group, ends, call)
        self._add(slot, call, header)
        if len(slot.calls) == 2 and not slot.complete(keep=self._keep):
            self.fail("mismatch", slot.disagreement())
            return
        self._flush(slot)

    def _add(self, slot: Slot, call: RankCall, header: dict[str, Any]) -> None:
        """Enter the call into the ledger and the slot, or into neither if the call is invalid."""
        slot.check(call)
        self._ledger.issue(call, header, slot.record)
        self._slots[slot.record.key] = slot
        slot.add(call, keep=self._keep)

    def _match(self, slot: Slot) -> None:
        if self.failure is not None:
            return  # the session is over: nothing may depend on which rank was faster
        if len(slot.calls) < len(slot.members):
            gone = [r for r in slot.members if r not in slot.calls and r in self.left]
            if gone and slot.fetches:
                self._fail_missing(slot, "waits")
            return
        # Compare only after all calls, so that the message says what every rank called.
        if slot.complete(keep=self._keep):
            self._flush(slot)
        else:
            self.fail("mismatch", slot.disagreement())

    def _fetch(self, rank: int, header: dict[str, Any]) -> None:
        slot = self._slot_of(rank, header)
        if slot.is_message and not any(
            call.rank == rank and call.kind == "recv" for call in slot.calls.values()
        ):
            raise ProtocolError(f"asked for the result of {slot.number}, which it has sent itself")
        if any(waiting == rank for waiting, *_ in slot.fetches):
            raise ProtocolError(f"asked again for collective {slot.number}, unanswered yet")
        if header.get("wait") is True:
            self._ledger.wait(rank, header, slot.record)
        slot.fetches.append((rank, request_number(header), time.monotonic()))
        self._waiting[slot.record.key] = slot
        if self.failure is None and rank not in slot.ready:
            if any(r in self.left for r in slot.members if r not in slot.calls):
                self._fail_missing(slot, "waits")
            return
        self._flush(slot)

    def _flush(self, slot: Slot) -> None:
        """Answer the fetches whose result is ready, or all of them if the session has failed."""
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
        """End the session: every fetch of a result that is not ready gets this error."""
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(text)
        if self.failure is None:
            self.failure = (kind, text)
        for slot in list(self._waiting.values()):
            self._flush(slot)

    def _refuse(self, rank: int, header: dict[str, Any]) -> None:
        """Answer a rank whose calls are in no slot; the session has failed."""
        if header["t"] in ("fetch", "poll") and self.failure is not None:
            self._reply(rank, {"q": request_number(header), "error": list(self.failure)}, None)

    def close(self, why: str) -> None:
        """Give each rank that still waits an error; a trace taken before does not change."""
        if self.failure is None:
            self.failure = ("ended", why)
        for slot in list(self._waiting.values()):
            self._flush(slot)

    def check_deadline(self, now_s: float) -> float | None:
        """Fail if a fetch has waited too long; returns the seconds until the next deadline."""
        oldest: tuple[float, Slot] | None = None
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

    def _fail_missing(self, slot: Slot, verb: str) -> None:
        self.fail(*slot.missing(verb, self.joined, self.left, self._last))

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
        known, first = self._groups.setdefault(name, (members, rank))
        if known != members:
            self._apart.add(rank)
            self.fail(
                "mismatch",
                f"rank {first} made a group of the ranks {list(known)} when rank {rank} made one "
                f"of {list(members)}: all ranks have to call new_group for all groups, in the same "
                "order, also for those to which they do not belong",
            )
        if len(self._groups) > _MAX_GROUPS:
            raise ProtocolError(f"more than {_MAX_GROUPS} groups in one session")
        return name, members

    def _named(self, members: tuple[int, ...]) -> str:
        """A group in an error text, by its ranks: a reader cannot know its number."""
        return "all ranks" if len(members) == self.world_size else f"the ranks {list(members)}"

    def _slot_of(self, rank: int, header: dict[str, Any]) -> Slot:
        key = header.get("key")
        slot = self._slots.get(key) if isinstance(key, str) else None
        if slot is None or not any(call.rank == rank for call in slot.calls.values()):
            raise ProtocolError(f"asked for collective {str(key)[:80]!r}, which it has not issued")
        return slot

    def trace(self) -> Trace:
        first = self._ledger.first_issues()
        records = [slot.record for slot in self._slots.values()]
        for record in records:
            record.arrived = tuple(sorted(record.arrived))
        # The order must not depend on which rank was first in real time.
        records.sort(key=lambda record: first[record.key])
        return Trace(
            world_size=self.world_size,
            events=[list(events) for events in self._ledger.events],
            collectives=records,
            faults=list(self.faults),
        )
