"""Ranks on several nodes: this node's ranks directly, the others through their nodes' agents.

The rest of the front sees one set of ranks. Messages from other nodes are checked like messages
from ranks: a node may speak only for its own ranks, and only for the present generation.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from minidist.kernel.cell import printable
from minidist.kernel.membership import Share, divide
from minidist.kernel.nodes.hub import Hub
from minidist.kernel.ranks import CHANNELS, Ranks
from minidist.processes.ports import free_port

STOP_DEADLINE_S = 10.0


class Cluster(Ranks):
    """`Ranks` on this node and on the nodes of `hub`, numbered consecutively."""

    def __init__(self, *, hub: Hub, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._hub = hub
        self._shares: list[Share] = []

    @property
    def _awaited(self) -> Collection[int]:
        return range(self.count)

    async def start(self, count: int, generation: int, share: Share | None = None) -> None:
        """As `Ranks.start`, on every node.

        Raises:
            RuntimeError: a node has not joined, or not all ranks were ready in time.
        """
        try:
            self._hub.open()
            self._hub.listener = self
            self._shares = []  # until all nodes have joined, no node speaks for a rank
            await self._hub.all_joined()
            # The port is for torch's rendezvous on this node; all nodes must know it before any of
            # them starts.
            self._shares = divide(self._hub.job, count, free_port())
            order = {
                "do": "start",
                "count": count,
                "generation": generation,
                "key": self._key.decode(),
                "signature_scheme": self._scheme,
                "cwd": os.getcwd(),
                "output_dir": self._output_dir,
            }
            for share in self._shares[1:]:
                self._hub.tell(share.node, {**order, "share": asdict(share)})
        except BaseException:
            self.close()
            raise
        # The nodes' answers are read only after this call has begun: no await lies in between.
        await super().start(count, generation, self._shares[0])

    def _why_not_ready(self, late: bool) -> str:
        missing = sorted(set(self._awaited) - self.ready)
        nodes = ", ".join(dict.fromkeys(map(self.node_of, missing)))
        text = super()._why_not_ready(late)
        return f"{text}\nNothing was heard of ranks on {nodes}" if late else text

    async def stop(self) -> bool:
        nodes = [f"node {share.node}" for share in self._shares[1:]]
        others = asyncio.gather(*(self._ask(node, "stop", STOP_DEADLINE_S) for node in nodes))
        stopped = await super().stop()
        await others
        return stopped

    def close(self) -> None:
        if not self._closed:
            for share in self._shares[1:]:
                self._hub.tell(share.node, {"do": "stop"})
        super().close()

    # -- to the nodes ----------------------------------------------------------------------------

    def _node(self, rank: int) -> int | None:
        """The number of the rank's node; None if no node has that rank."""
        return next((share.node for share in self._shares if rank in share.ranks), None)

    def node_of(self, rank: int) -> str:
        node = self._node(rank)
        return "" if node is None else self._hub.name(node)

    def send(self, channel: str, rank: int, frames: list[bytes]) -> None:
        node = self._node(rank)
        if node == 0:
            super().send(channel, rank, frames)
        elif self._running and node is not None:
            head = (channel, str(rank), str(self.generation))
            self._hub.send(node, [*(word.encode() for word in head), *frames])

    def _send_link(self, who: str, message: dict[str, Any]) -> bool:
        if who.startswith("node "):
            return self._hub.tell(int(who.removeprefix("node ")), message)
        if who.isdecimal() and (node := self._node(int(who))):
            return self._hub.tell(node, {**message, "rank": int(who)})
        return super()._send_link(who, message)

    def alive(self, rank: int) -> bool:
        node = self._node(rank)
        if not node:
            return super().alive(rank)
        return self._running and self._hub.is_here(node) and rank in self.ready

    # -- from the nodes --------------------------------------------------------------------------

    def node_sends(self, node: int, frames: list[bytes]) -> None:
        """Take a node's frames: channel, rank and generation, then a message of that rank."""
        share = self._share(node)
        if share is None or not self._running or len(frames) < 4:
            return
        channel, rank, generation = (frame[:16].decode("ascii", "replace") for frame in frames[:3])
        known = rank.isascii() and rank.isdecimal() and int(rank) in share.ranks
        if known and channel in CHANNELS and generation == str(self.generation):
            self._on_message(channel, int(rank), frames[3:])

    def node_says(self, node: int, message: dict[str, Any]) -> None:
        share = self._share(node)
        if share is None:
            return
        who = {f"node {node}", *map(str, share.ranks)}
        if isinstance(answer := message.get("answer"), dict):  # of a rank
            self._is_answer(who, {**answer, "id": message.get("id")})
            return
        if self._is_answer(who, message):
            return
        if message.get("generation") != self.generation:
            return
        if "started" in message:
            pids = message["started"] if isinstance(message["started"], list) else []
            pairs = zip(share.ranks, pids, strict=False)
            self.pids.update((rank, pid) for rank, pid in pairs if isinstance(pid, int))
            self.ready.update(share.ranks)
        elif "failed" in message:
            text = printable(str(message["failed"]))[-8000:]
            self._start_error = self._start_error or f"[{self._hub.name(node)}] {text}"
        elif "lost" in message:
            rank, text = message["lost"], printable(str(message.get("text")))[:500]
            known = isinstance(rank, int) and rank in share.ranks
            self._node_lost(rank if known else None, f"{text} on {self._hub.name(node)}")
        self._changed.set()

    def node_left(self, node: int, text: str) -> None:
        self._node_lost(None, text)

    def _node_lost(self, rank: int | None, text: str) -> None:
        if self._running and not self._complete():
            self._start_error = self._start_error or text
            self._changed.set()
        super()._tell_lost(rank, text)

    def _tell_lost(self, rank: int | None, text: str) -> None:
        super()._tell_lost(rank, f"{text} on {self._hub.name(0)}")

    def _share(self, node: int) -> Share | None:
        return self._shares[node] if 0 < node < len(self._shares) else None
