"""Sender of messages over a connection whose other host may fall silent, on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class QueuedSender:
    """Sends messages soon and in the order of the calls, so that no caller waits for a network.

    How much waits is bounded by the time after which the other end counts as lost (rendezvous.py).
    """

    def __init__(
        self, connection: Connection[Any, Any], name: str, fail: Callable[[OSError], object]
    ) -> None:
        """Call `fail` with what ends the connection."""
        self._connection, self._fail = connection, fail
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def send(self, message: object) -> None:
        """Send a message after those before it. Any thread may call."""
        self._messages.put(message)

    def _work(self) -> None:
        try:
            while True:
                self._connection.send(self._messages.get())
        except OSError as error:
            self._fail(error)
