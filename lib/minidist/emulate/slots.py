"""One collective or message of a session: which ranks have called it, what each rank gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from minidist.emulate import arrays
from minidist.emulate.rank_calls import RankCall, agree, num_bytes, results, splits_agree
from minidist.emulate.trace import Collective
from minidist.errors import ProtocolError


@dataclass
class Slot:
    """The k-th collective of a group, or the n-th message of one direction.

    Attributes:
        number: its name in error texts, such as "#3 from rank 0 to rank 1"; members: ranks that
        have to call it; results: raw bytes per rank, until fetched; fetches: unanswered fetches
        as (rank, request, since); ready: ranks whose result is ready.
    """

    record: Collective
    number: str
    members: tuple[int, ...]
    calls: dict[int, RankCall] = field(default_factory=dict)
    results: dict[int, np.ndarray | None] = field(default_factory=dict)
    fetches: list[tuple[int, int, float]] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls, key: str, number: str, group: str, members: tuple[int, ...], call: RankCall
    ) -> Slot:
        """A slot for the first call `call`; the caller still has to `add` the call."""
        record = Collective(
            key=key,
            kind="send" if call.kind == "recv" else call.kind,
            op=call.op,
            group=group,
            ranks=members,
            shape=call.shape,
            numel=call.numel,
            nbytes=num_bytes(call, len(members)),
            dtype=call.dtype,
            root=call.root,
        )
        return cls(record, number, members)

    @property
    def is_message(self) -> bool:
        return self.record.kind == "send"

    def absent(self) -> list[int]:
        """Ranks that have not called it; for a message always the sender: only it is awaited."""
        if self.is_message:
            return [self.members[0]]
        return [rank for rank in self.members if rank not in self.calls]

    def check(self, call: RankCall) -> None:
        """Check that `call` fits this slot.

        Raises:
            ProtocolError: a collective in a group whose name is that of a message, or the reverse.
        """
        if self.is_message != (call.kind in ("send", "recv")):
            raise ProtocolError(f"named a group so that {call.describe()} meets {self.number}")

    def add(self, call: RankCall, *, keep: bool) -> None:
        """Add a rank's call; with `keep`, the trace keeps the payload."""
        side = call.rank
        if self.is_message and self.members[0] == self.members[1]:
            # Both ends of a message from a rank to itself are that rank: tell them apart by kind.
            side = -1 if call.kind == "send" else -2
        self.calls[side] = call
        self.record.arrived += (call.rank,)
        sends = call.kind == "send" if self.is_message else bool(call.payload.nbytes)
        if keep and sends:
            self.record.payloads[call.rank] = arrays.values(call.payload, call.dtype)

    def complete(self, *, keep: bool) -> bool:
        """Compute what each rank gets, after all calls were added; False if the calls disagree."""
        done = self._deliver() if self.is_message else self._combine(keep)
        self.record.completed = done
        return done

    def _deliver(self) -> bool:
        sent, wanted = sorted(self.calls.values(), key=lambda c: c.kind, reverse=True)
        # Shapes may differ: gloo and NCCL send a flat tensor into a buffer with the layer's shape.
        if (sent.dtype, sent.numel) != (wanted.dtype, wanted.numel):
            return False
        self.record.shape = sent.shape  # not that of the first caller
        self.ready.add(wanted.rank)
        self.results[wanted.rank] = sent.payload
        sent.payload = np.empty(0, np.uint8)  # so that the payload is freed after the fetch
        return True

    def _combine(self, keep: bool) -> bool:
        calls = [self.calls[rank] for rank in self.members]
        first = calls[0]
        if not agree(calls) or (first.kind == "all_to_all" and not splits_agree(calls)):
            return False
        if first.kind == "all_to_all":  # ranks may send different sizes: the largest counts
            largest = max(calls, key=lambda call: call.numel)
            self.record.shape, self.record.numel = largest.shape, largest.numel
            self.record.nbytes = num_bytes(largest, len(self.members))
        self.results = results(self.members, calls)
        self.ready = set(self.members)
        if keep and first.kind in ("all_reduce", "reduce", "broadcast", "all_gather"):
            raw = next((r for r in self.results.values() if r is not None), None)
            if raw is not None:
                self.record.result = arrays.values(raw, first.dtype)
        for call in calls:
            call.payload = np.empty(0, np.uint8)  # a view would keep the whole payload
        return True

    # -- words -----------------------------------------------------------------------------------

    def who_called_what(self) -> str:
        calls = (call for _, call in sorted(self.calls.items()))
        return "; ".join(f"rank {call.rank} called {call.describe()}" for call in calls)

    def disagreement(self) -> str:
        what = "message" if self.is_message else "collective"
        text = f"the ranks disagree about {what} {self.number}: {self.who_called_what()}"
        if all(call.kind == "all_to_all" for call in self.calls.values()):
            text += "; the sizes sent and expected have to agree pair by pair"
        return text

    def missing(
        self, verb: str, joined: Collection[int], left: Collection[int], last: Mapping[int, str]
    ) -> tuple[str, str]:
        """Kind and text of the failure "some ranks have not called it".

        Args:
            verb: what the ranks do that have called it: "waits", "waited 30 s".
            joined, left: ranks that have joined, and ranks that have left, the session.
            last: rank -> its last call.
        """
        waiting = ", ".join(f"rank {rank}" for rank in sorted({f[0] for f in self.fetches}))
        came = list(self.calls.values())
        states = []
        for rank in self.absent():
            state = (
                "has left the emulated cluster"
                if rank in left
                else "has not come to it"
                if rank in joined
                else "is not connected to this session"
            )
            did = f"its last call was {last[rank]}" if rank in last else "it has called nothing"
            states.append(f"rank {rank} {state}; {did}")
        text = f"{waiting} {verb} in {came[0].describe()} {self.number}; missing: " + "; ".join(
            states
        )
        if self.is_message or agree(came):
            return "missing", text
        return "mismatch", f"{text}. Those that came disagree: {self.who_called_what()}"
