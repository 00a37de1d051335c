"""Mapped memories between the ranks of two groups of one host, the prefill worker's end.

Each rank maps the memory of every decode rank with which it has heads and layers in common, and copies its
own there: this process orders it of the others. What it promises comes when every rank has copied.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_routes import kv_routes, within
from diptych.engine.parallel.kv_shares import KVShare
from kvtransfer.transports.base import Run, TransportError, Welcome
from kvtransfer.transports.blocking import BlockingThread, finished
from kvtransfer.transports.mapped_channel import MappedChannel
from kvtransfer.transports.mapped_targets import MappedTargets
from kvtransfer.transports.memory_mapping import MemoryMapping
from kvtransfer.transports.rank_data import joined_digest
from kvtransfer.transports.share_mapping import CopyRun, MappedRanks, MapTarget
from kvtransfer.transports.tcp_by_rank import holders_of, mapped_ranks

_channels = itertools.count(1)
T = TypeVar("T")


class IpcByRankChannel(MappedChannel):
    """End of the prefill worker; every pair of ranks that has something in common is mapped."""

    def __init__(self, memory: KVMemory, welcome: Welcome, mapping: MemoryMapping) -> None:
        """Take the blocks that are copied. Raises TransportError where ranks of both workers do not fit."""
        super().__init__()
        self._memory = memory
        self._ranks = mapped_ranks(memory)
        self._number = next(_channels)
        self._holders = holders_of(memory)
        try:
            self._routes = kv_routes(self._holders, [holder.shares for holder in welcome.holders])
        except ValueError as error:
            raise TransportError(str(error)) from error
        self._targets: dict[int, list[MapTarget]] = {}
        """Targets of each process of this worker that has some."""
        for source, target in self._routes:
            self._targets.setdefault(source, []).append(self._target(welcome, source, target))
        self._own = MappedTargets(0, mapping)
        self._thread = BlockingThread("push")

    def _target(self, welcome: Welcome, source: int, target: int) -> MapTarget:
        """Return what `source` maps of `target`, and writes there."""
        holder, pieces = welcome.holders[target], self._routes[source, target]
        (held,) = holder.shares
        return MapTarget(
            target,
            welcome.address,
            holder.endpoint,
            holder.tokens[source],
            held.narrow(welcome.layout),
            welcome.num_blocks,
            pieces if source == 0 else _moved(pieces, self._holders[source][0]),
            _moved(pieces, held),
        )

    @classmethod
    async def open(cls, welcome: Welcome, memory: KVMemory, mapping: MemoryMapping) -> IpcByRankChannel:
        """Have every rank map what it writes to. Raises TransportError."""
        channel = cls(memory, welcome, mapping)
        try:
            opening = [asyncio.wrap_future(future) for future in channel._map_elsewhere()]
            if 0 in channel._targets:
                own = channel._thread.run(channel._own.open, channel._targets[0])
                opening.append(asyncio.ensure_future(own))
            await _all(opening)
        except BaseException:
            channel.close()
            raise
        return channel

    def _map_elsewhere(self) -> list[Future[None]]:
        return [
            self._others.map_targets(source, self._number, targets)
            for source, targets in self._targets.items()
            if source
        ]

    @property
    def _others(self) -> MappedRanks:
        assert self._ranks is not None, "routes begin elsewhere"
        return self._ranks

    async def _copied(self, run: Run) -> list[bytes]:
        """Have all ranks copy beside each other; returns when all are over."""
        order = CopyRun(run.ref, run.first, tuple(run.block_ids), tuple(run.target_ids))
        copying = []
        for source in self._targets:
            if source:
                copying.append(asyncio.wrap_future(self._others.copy_shares(source, self._number, order)))
            else:
                own = self._thread.run(self._own.copy, self._memory, order, run.computed)
                copying.append(asyncio.ensure_future(own))
        found = dict(zip(self._targets, await _all(copying), strict=True))
        return self._joined(found, len(run.block_ids))

    def _joined(self, found: dict[int, list[bytes]], count: int) -> list[bytes]:
        """Return the digest of each of `count` blocks from those of its shares."""
        by_pair = {
            (source, target.target): found[source][at * count : (at + 1) * count]
            for source, targets in self._targets.items()
            for at, target in enumerate(targets)
        }
        return [joined_digest([by_pair[pair][at] for pair in self._routes]) for at in range(count)]

    def _unmap(self) -> None:
        for source in self._targets:
            if source:
                self._others.unmap_targets(source, self._number)
        self._thread.call(self._own.close)
        self._thread.stop()


async def _all(calls: Sequence[asyncio.Future[T]]) -> list[T]:
    """Return the results of all calls, once all are over, also if this task is cancelled meanwhile.

    Raises the first error.
    """
    await finished(asyncio.gather(*calls, return_exceptions=True))
    return [call.result() for call in calls]


def _moved(pieces: Sequence[KVShare], holder: KVShare) -> tuple[KVShare, ...]:
    return tuple(within(piece, holder) for piece in pieces)
