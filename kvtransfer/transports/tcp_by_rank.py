"""TCP between the ranks of two groups, the prefill worker's end: each rank sends each what both hold.

This process sends what its host's ranks hold, ranks elsewhere send theirs. Every pair of holders with common
heads has a data socket; that of this process to the decode worker's own also brings back the number of shares
that were taken or dropped, at whatever rank.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.kv_routes import Holders, kv_routes, within
from diptych.engine.parallel.kv_shares import KVShare, whole_share
from diptych.runtime.bind_address import join_host_port
from kvtransfer.transports.base import Run, StillGranted, TransportError, Welcome
from kvtransfer.transports.blocking import finished
from kvtransfer.transports.data_connection import DataConnection, endpoint_address
from kvtransfer.transports.failpoints import damage_payload, damage_place
from kvtransfer.transports.held_blocks import read_pieces
from kvtransfer.transports.host_blocks import DIGEST_BYTES
from kvtransfer.transports.rank_data import (
    ACCEPTED,
    HEADER,
    PushTarget,
    RankBlocks,
    joined_digest,
    share_digest,
    share_hash,
)
from kvtransfer.transports.share_mapping import MappedRanks

STUCK_S = 15.0
"""Seconds in which a rank must have left a block, once its connections are closed."""
_channels = itertools.count(1)


def holders_of(memory: KVMemory) -> Holders:
    """Return the shares of each process of this worker that holds some of `memory`'s blocks."""
    if isinstance(memory.spread, RankBlocks):
        return memory.spread.holders
    return one_holder(memory.layout)


def mapped_ranks(memory: KVMemory) -> MappedRanks | None:
    """Return the other processes of this worker that hold shares of `memory`'s blocks, to map and be mapped;
    None: there are none.
    """
    return memory.spread.mapped if isinstance(memory.spread, RankBlocks) else None


def can_go_by_rank(layout: KVLayout) -> bool:
    """Return whether each rank can send and receive its own shares of blocks: nothing is in a block beside
    shares of heads, as a draft model's segment or a window.
    """
    return layout.draft is None and layout.windows is None


def one_holder(layout: KVLayout) -> Holders:
    """Return the holders of a worker whose processes have one memory."""
    return ((whole_share(layout),),)


@dataclass(frozen=True, slots=True)
class _OwnRoute:
    """Shares that this process sends to one receiver."""

    target: int
    pieces: tuple[KVShare, ...]
    connection: DataConnection


class ByRankChannel:
    """End of the prefill worker: a data socket for each pair of ranks."""

    def __init__(self, memory: KVMemory, welcome: Welcome) -> None:
        """Take the blocks that are sent. Raises TransportError where ranks of both workers do not fit."""
        self._memory = memory
        self._ranks = memory.spread if isinstance(memory.spread, RankBlocks) else None
        self._number = next(_channels)
        try:
            self._routes = kv_routes(holders_of(memory), [holder.shares for holder in welcome.holders])
        except ValueError as error:
            raise TransportError(str(error)) from error
        self._own: list[_OwnRoute] = []
        self._control: DataConnection | None = None
        self._elsewhere: dict[int, list[int]] = {}
        """Receivers of each rank elsewhere that sends."""
        for source, target in self._routes:
            if source:
                self._elsewhere.setdefault(source, []).append(target)
        self._sent = 0

    @classmethod
    async def open(cls, welcome: Welcome, memory: KVMemory) -> ByRankChannel:
        """Connect every rank that sends to every one that receives from it. Raises TransportError."""
        channel = cls(memory, welcome)
        try:
            await channel._connect(welcome)
        except BaseException:
            channel.close()
            raise
        return channel

    async def _connect(self, welcome: Welcome) -> None:
        opening = [self._open_elsewhere(source, welcome) for source in self._elsewhere]
        try:
            for target, holder in enumerate(welcome.holders):
                pieces = self._routes.get((0, target), ())
                if not pieces and target:
                    continue
                end = replace(welcome, endpoint=holder.endpoint, token=holder.tokens[0])
                connection = await DataConnection.open(end, len(ACCEPTED), counts=target == 0)
                if target == 0:
                    self._control = connection
                if pieces:
                    self._own.append(_OwnRoute(target, pieces, connection))
        finally:
            await self._settled(opening)
        for opened in opening:
            opened.result()

    def _open_elsewhere(self, source: int, welcome: Welcome) -> Future[None]:
        assert self._ranks is not None, "routes begin elsewhere"
        (held,) = self._ranks.holders[source]
        targets = []
        for target in self._elsewhere[source]:
            holder = welcome.holders[target]
            pieces = tuple(within(piece, held) for piece in self._routes[source, target])
            host, port = endpoint_address(replace(welcome, endpoint=holder.endpoint))
            targets.append(PushTarget(target, join_host_port(host, port), holder.tokens[source], pieces))
        return self._ranks.open_pushes(source, self._number, targets)

    @property
    def sent(self) -> int:
        """Number of shares that left this worker, or are about to."""
        return self._sent

    @property
    def acknowledged(self) -> int:
        """Number of shares that the other worker's ranks have taken or dropped."""
        return 0 if self._control is None else self._control.acknowledged

    @property
    def broken(self) -> bool:
        """True if the other end closed the socket."""
        return self._control is None or self._control.broken

    async def send(self, run: Run, still_granted: StillGranted) -> list[bytes] | None:
        """Send a run block by block, all ranks beside each other; returns when the kernels have its bytes.

        Raises TransportError.
        """
        digests = []
        for index, block in enumerate(run.block_ids, run.first):
            if not still_granted(run.ref):
                return None
            digests.append(await self._send_block(run, index, block))
        return digests

    async def _send_block(self, run: Run, index: int, block: int) -> bytes:
        elsewhere: dict[int, Future[bytes]] = {}
        if self._ranks is not None:
            for source in self._elsewhere:
                elsewhere[source] = self._ranks.push_share(source, self._number, block, run.ref, index)
        self._sent += len(self._routes)
        digests: dict[tuple[int, int], bytes] = {}
        try:
            for route in self._own:
                digests[0, route.target] = await self._send_own(route, run, index, block)
            for source, pushed in elsewhere.items():
                found = await asyncio.wrap_future(pushed)
                for at, target in enumerate(self._elsewhere[source]):
                    digests[source, target] = found[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
        except BaseException:
            self._close_elsewhere()  # so that no rank waits for its socket, and all leave the block
            await self._settled(elsewhere.values())
            raise
        return joined_digest([digests[pair] for pair in self._routes])

    async def _send_own(self, route: _OwnRoute, run: Run, index: int, block: int) -> bytes:
        payload = await self._read_own(route, run, block)
        digest = share_digest(run.ref, index, 0, route.target, share_hash(payload))
        ref, place = damage_place(run.ref, index)
        header = HEADER.pack(ref.slot, ref.generation, place, payload.nbytes, digest)
        await route.connection.send(header)
        await route.connection.send(damage_payload(payload))
        return digest

    async def _read_own(self, route: _OwnRoute, run: Run, block: int) -> memoryview:
        """Return the bytes of a route, without blocking the event loop for a GPU."""
        if self._memory.device.type == "cpu":
            return read_pieces(self._memory, block, route.pieces)
        reading = asyncio.to_thread(read_pieces, self._memory, block, route.pieces, run.computed)
        return await finished(asyncio.ensure_future(reading))

    def close(self) -> None:
        """Send no more. Call it when no `send` runs."""
        self._close_elsewhere()
        for connection in {route.connection for route in self._own} | {self._control} - {None}:
            if connection is not None:
                connection.close()

    def _close_elsewhere(self) -> None:
        for source in self._elsewhere:
            if self._ranks is not None:
                self._ranks.close_pushes(source, self._number)

    async def _settled(self, asked: Iterable[Future[None] | Future[bytes]]) -> None:
        """Wait until ranks have done what they were asked, also if this task is cancelled meanwhile.

        A rank that does not within `STUCK_S` is stopped: its group ends, as with a step that hangs.
        """
        cancelled: asyncio.CancelledError | None = None
        until = time.monotonic() + STUCK_S
        waiting = [asyncio.wrap_future(future) for future in asked]
        while left := [future for future in waiting if not future.done()]:
            try:
                done, _ = await asyncio.wait(left, timeout=max(until - time.monotonic(), 0.1))
            except asyncio.CancelledError as error:
                cancelled = error
                continue
            if not done and self._ranks is not None:
                self._ranks.fail(TransportError(f"{len(left)} ranks do not leave the blocks they send"))
        for future in waiting:
            future.exception()  # it is seen
        if cancelled is not None:
            raise cancelled
