"""Starts, restarts and ends the ranks of a kernel, one generation after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import zmq.asyncio

from minidist.kernel.client import Client
from minidist.kernel.nodes.cluster import Cluster
from minidist.kernel.nodes.hub import Hub
from minidist.kernel.options import KernelOptions
from minidist.kernel.ranks import Ranks

HOW_TO_GO_ON = "Run %restart_ranks in a cell for fresh ranks, or restart the kernel."


class Generations:
    """Keeps ranks running, or records why there are none.

    `on_message` and `on_lost` are as for `Ranks`; `on_buried()` is called whenever ranks are ended.

    Attributes:
        count: number of ranks; number: number of the present generation, -1 before the first;
        ranks: the present ranks, None before the first; failure: why they cannot run a cell, or
        empty; settled: False while ranks are being started, True when they are ready or lost.
    """

    def __init__(
        self,
        *,
        client: Client,
        options: KernelOptions,
        context: zmq.asyncio.Context,
        run_dir: str,
        output_dir: str | None,
        on_message: Callable[[str, int, list[bytes]], Awaitable[None] | None],
        on_lost: Callable[[int | None, str], None],
        on_buried: Callable[[], None],
    ) -> None:
        self.count = options.num_ranks
        self.number = -1
        self.ranks: Ranks | None = None
        self.failure = ""
        self._hub = None if options.job is None else Hub(options.job)
        self._on_lost, self._on_buried = on_lost, on_buried
        self._new_ranks = partial(
            Ranks if self._hub is None else partial(Cluster, hub=self._hub),
            context=context,
            options=options,
            key=client.key,
            signature_scheme=client.signature_scheme,
            run_dir=run_dir,
            output_dir=output_dir,
            on_message=on_message,
            on_lost=self._lost,
        )
        self._settled = asyncio.Event()
        self._restarting = asyncio.Lock()
        self._stopping: asyncio.Task[bool] | None = None

    @property
    def settled(self) -> bool:
        return self._settled.is_set()

    @property
    def least(self) -> int:
        """The smallest number of ranks: one on each node."""
        return 1 if self._hub is None else self._hub.job.num_nodes

    async def until_settled(self) -> None:
        await self._settled.wait()

    async def restart(self, count: int | None = None) -> str:
        """Replace the ranks by fresh ones; returns why that failed, or an empty string."""
        if count is not None and count < self.least:
            return f"expected {self.least} ranks or more, one on each node, got {count}"
        async with self._restarting:
            self._settled.clear()
            self.bury()
            self.count = count or self.count
            self.number += 1
            self.failure = ""
            ranks = self.ranks
            if ranks is None or not await self._stopped() or not ranks.has_link():
                if ranks is not None:
                    ranks.close()
                ranks = self.ranks = self._new_ranks()
            try:
                await ranks.start(self.count, self.number)
            except (RuntimeError, OSError) as error:
                self.failure = f"The ranks could not be started. {error}\n{HOW_TO_GO_ON}"
            finally:
                self._settled.set()
            return self.failure

    async def _stopped(self) -> bool:
        """Whether the old ranks are gone and their launcher can start fresh ranks."""
        return self._stopping is not None and await self._stopping

    def bury(self) -> None:
        """End the ranks; a launcher that does not confirm this in time is ended as well."""
        self._on_buried()
        if self.ranks is not None and (self._stopping is None or self._stopping.done()):
            self._stopping = asyncio.get_running_loop().create_task(self._stop(self.ranks))

    async def _stop(self, ranks: Ranks) -> bool:
        stopped = await ranks.stop()
        if not stopped:
            ranks.close()
        return stopped

    def _lost(self, rank: int | None, text: str) -> None:
        """A rank or the launcher has ended by itself."""
        self.failure = f"{text}. {HOW_TO_GO_ON}"
        self._on_lost(rank, text)
        self.bury()

    def close(self) -> None:
        if self._hub is not None:
            self._hub.close()  # first: a client's shutdown may not wait until the ranks end
        if self.ranks is not None:
            self.ranks.close()

    def states(self) -> list[dict[str, Any]]:
        """Per rank: `rank`, `pid` (its process id as the rank reported it, or None), `alive`.

        Empty before the first generation.
        """
        ranks = self.ranks
        if ranks is None:
            return []
        return [
            {"rank": rank, "pid": ranks.pids.get(rank), "alive": ranks.alive(rank)}
            for rank in range(self.count)
        ]
