"""Rank 0's end of what a rank with memories of its own does with shares of blocks, beside its steps."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from diptych.worker_process.group.orders import Answered, RankFailed, ShareOrder
from diptych.worker_process.group.queued_sender import QueuedSender
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.rank_data import RankEvent
from kvtransfer.transports.share_mapping import SourceDied, SourceEvent, SourceMapped


class ShareLink:
    """Orders to one rank, their answers, and its events. Any thread may call."""

    def __init__(
        self, connection: Connection[Any, Any], name: str, fail: Callable[[BaseException], object]
    ) -> None:
        """Call `fail` with what ends the connection."""
        self.on_event: Callable[[RankEvent], None] | None = None
        """Takes events, on a thread."""
        self.on_source: list[Callable[[SourceEvent], None]] = []
        """Take what processes do that map the rank's memory, on a thread; one for each offer of it."""
        self._connection, self._fail = connection, fail
        self._sender = QueuedSender(connection, f"{name}-orders", fail)
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        threading.Thread(target=self._read, name=f"{name}-events", daemon=True).start()

    def tell(self, order: ShareOrder) -> None:
        """Send an order that has no answer."""
        self._sender.send(order)

    def ask(self, order: Callable[[int], ShareOrder]) -> Future[Any]:
        """Send an order with its number; return the answer to come, a TransportError if it failed."""
        request, answer = next(self._numbers), Future[Any]()
        answer.set_running_or_notify_cancel()  # it cannot be cancelled: the rank is at work
        self._asked[request] = answer
        self._sender.send(order(request))
        return answer

    def _read(self) -> None:
        try:
            while True:
                self._take(self._connection.recv())
        except (OSError, EOFError) as error:
            self._fail(error)

    def _take(self, message: Answered | RankEvent | SourceEvent) -> None:
        if isinstance(message, SourceMapped | SourceDied):
            for on_source in self.on_source:
                on_source(message)
            return
        if not isinstance(message, Answered):
            if self.on_event is not None:
                self.on_event(message)
            return
        answer = self._asked.pop(message.request)
        if isinstance(message.result, RankFailed):
            answer.set_exception(TransportError(message.result.why))
        else:
            answer.set_result(message.result)
