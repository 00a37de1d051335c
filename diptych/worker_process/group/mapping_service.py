"""Service of a rank with memories of its own that maps memories of other workers, or offers its own to them.

An offer is served on an event loop of its own, mapped memories on a thread for each channel: neither waits
for the rank's steps.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from diptych.worker_process.group.orders import (
    Answered,
    CheckShares,
    CopyShares,
    FenceWriter,
    MappingOrder,
    MapTargets,
    NoteSource,
    OfferMemory,
    RankFailed,
    UnmapTargets,
)
from diptych.worker_process.group.share_memory import ShareMemory
from kvtransfer.transports.mapped_targets import MappedTargets
from kvtransfer.transports.memory_mapping import MemoryMapping
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.share_mapping import SourceEvent
from kvtransfer.transports.share_offer import ShareOffer

Send = Callable[[Answered | SourceEvent], None]


class MappingService:
    """Carries out rank 0's orders; `bind` it to the connection first.

    Args:
        source: number of this rank among the holders of its worker's blocks.
        own: this rank's blocks.
        pool_of: returns a memory by its number as others can map it.
        mapping: mapping of memories on this rank's device.
    """

    def __init__(
        self,
        source: int,
        own: ShareMemory,
        pool_of: Callable[[int], PoolMemory],
        mapping: MemoryMapping,
    ) -> None:
        self._source, self._own, self._pool_of, self._mapping = source, own, pool_of, mapping
        self._send: Send = lambda message: None
        self._channels: dict[int, _Channel] = {}
        self._offers: list[ShareOffer] = []
        """Offers to several transports; a writer's number is known to one of them."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, send: Send) -> None:
        """Send answers and events by `send`, from now on."""
        self._send = send

    def close(self) -> None:
        """Offer nothing more, and unmap what is mapped."""
        for channel in self._channels.values():
            channel.put(None)
        if self._loop is not None:
            for offer in self._offers:
                asyncio.run_coroutine_threadsafe(offer.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)

    def carry_out(self, order: MappingOrder) -> None:
        """Begin what an order wants; its answer follows."""
        match order:
            case MapTargets():
                targets = MappedTargets(self._source, self._mapping)
                self._channels[order.channel] = _Channel(order, targets, self._own, self._send)
            case CopyShares():
                if (channel := self._channels.get(order.channel)) is not None:
                    channel.put(order)
                else:
                    self._send(Answered(order.request, RankFailed("the channel was closed")))
            case UnmapTargets():
                if (channel := self._channels.pop(order.channel, None)) is not None:
                    channel.put(None)
            case OfferMemory():
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                    threading.Thread(
                        target=self._serve, args=(self._loop,), name="offer", daemon=True
                    ).start()
                asyncio.run_coroutine_threadsafe(self._begin_offer(order), self._loop)
            case NoteSource() | FenceWriter() | CheckShares():
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._on_loop, order)

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.close()

    async def _begin_offer(self, order: OfferMemory) -> None:
        try:
            pool = self._pool_of(order.number)
            offer = ShareOffer(pool, self._mapping, self._source, order.secret, self._send)
            await offer.start()
        except Exception as error:  # of any kind: rank 0 waits for the answer
            self._send(Answered(order.request, RankFailed(f"a rank cannot offer its memory: {error}")))
            return
        self._offers.append(offer)
        self._send(Answered(order.request, offer.endpoint))

    def _on_loop(self, order: NoteSource | FenceWriter | CheckShares) -> None:
        match order:
            case NoteSource(source):
                for offer in self._offers:
                    offer.note(source)
            case FenceWriter(writer):
                for offer in self._offers:
                    offer.fence(writer)
            case CheckShares(request, run):
                offers = [offer for offer in self._offers if offer.has_sources_of(run.writer)]
                if not offers:
                    self._send(Answered(request, RankFailed("no process of this writer maps the memory")))
                    return
                checking = asyncio.ensure_future(offers[0].check(run))
                checking.add_done_callback(lambda done: self._send(_answer(request, done)))


class _Channel:
    """Memories of the ranks of one decode worker, and the thread that copies into them."""

    def __init__(self, order: MapTargets, targets: MappedTargets, own: ShareMemory, send: Send) -> None:
        self._targets, self._own, self._send = targets, own, send
        self._orders: queue.SimpleQueue[MapTargets | CopyShares | None] = queue.SimpleQueue()
        self._orders.put(order)
        threading.Thread(target=self._work, name=f"copies-{order.channel}", daemon=True).start()

    def put(self, order: CopyShares | None) -> None:
        """Carry out an order after those before it; None ends the channel."""
        self._orders.put(order)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                result = self._carry_out(order)
            except Exception as error:  # of any kind: rank 0 waits for the answer
                self._send(Answered(order.request, RankFailed(str(error) or repr(error))))
            else:
                self._send(Answered(order.request, result))
        self._targets.close()

    def _carry_out(self, order: MapTargets | CopyShares) -> list[bytes] | None:
        if isinstance(order, MapTargets):
            self._targets.open(order.targets)
            return None
        memory = self._own.memory(order.number, order.after)
        return self._targets.copy(memory, order.run)


def _answer(request: int, done: asyncio.Future[list[bytes]]) -> Answered:
    if (error := done.exception()) is not None:
        return Answered(request, RankFailed(str(error) or repr(error)))
    return Answered(request, done.result())
