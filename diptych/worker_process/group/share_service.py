"""Service of a rank with a memory of its own: shares of blocks, beside its steps, as rank 0 orders."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.connection import Connection
from typing import Any

from diptych.worker_process.group.mapping_service import MappingService
from diptych.worker_process.group.orders import (
    Answered,
    ClosePushes,
    DropShare,
    EndSession,
    ListenForShares,
    OpenPushes,
    PushShare,
    RankFailed,
    ShareOrder,
)
from diptych.worker_process.group.share_arrivals import ShareArrivals
from diptych.worker_process.group.share_memory import ShareMemory
from diptych.worker_process.group.share_pushes import PushChannel
from kvtransfer.transports.rank_data import RankEvent
from kvtransfer.transports.share_mapping import SourceEvent


class ShareService:
    """Carries out rank 0's orders over one connection.

    Args:
        host: address of this rank.
        source: number of this rank among the holders of its worker's blocks.
        own: this rank's blocks.
        mappings: carries out what is ordered of mapped memories, if anything is.
    """

    def __init__(
        self,
        connection: Connection[Any, Any],
        host: str,
        source: int,
        own: ShareMemory,
        mappings: MappingService | None = None,
    ) -> None:
        self._connection, self._host, self._source, self._own = connection, host, source, own
        self._mappings = mappings
        if mappings is not None:
            mappings.bind(self._send)
        self._sending = threading.Lock()
        self._channels: dict[int, PushChannel] = {}

    def serve(self) -> None:
        """Carry out orders until rank 0 is gone. Raises EOFError, OSError."""
        while True:
            self._carry_out(self._connection.recv())

    def _carry_out(self, order: ShareOrder) -> None:
        match order:
            case ListenForShares():
                self._send(Answered(order.request, self._listen(order)))
            case OpenPushes():
                self._channels[order.channel] = PushChannel(self._source, order, self._own, self._send)
            case PushShare():
                if (channel := self._channels.get(order.channel)) is not None:
                    channel.push(order)
                else:
                    self._send(Answered(order.request, RankFailed("the channel was closed")))
            case ClosePushes():
                if (channel := self._channels.pop(order.channel, None)) is not None:
                    channel.close()
            case EndSession():
                if self._own.arrivals is not None:
                    self._own.arrivals.end_session(order.session)
            case DropShare():
                if self._own.arrivals is not None:
                    self._own.arrivals.take(order.staged)
            case _:
                assert self._mappings is not None, "nothing is mapped between hosts"
                self._mappings.carry_out(order)

    def _listen(self, order: ListenForShares) -> str | RankFailed:
        largest = self._own.memory(order.number).layout.bytes_per_block
        try:
            self._own.arrivals = ShareArrivals(self._host, order.secret, largest, self._send)
        except OSError as error:
            return RankFailed(f"a rank on {self._host} cannot listen: {error}")
        return self._own.arrivals.endpoint

    def _send(self, message: Answered | RankEvent | SourceEvent) -> None:
        with self._sending, contextlib.suppress(OSError):  # rank 0 is gone, as `serve` sees
            self._connection.send(message)
