"""Publisher of KV events over ZeroMQ: PUB for those who listen, ROUTER for those who missed something.

    PUB     topic | sequence number (8 bytes, big-endian) | batch
    ROUTER  asked: empty | sequence number;  answers: empty | sequence number | batch, …, empty | -1 | empty

Source: vLLM's ZmqEventPublisher. A thread owns the sockets, so that no reader holds up the event loop; it
sleeps until there is something to do. Who reads too slowly loses batches, and can ask for the last ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from threading import Thread
from typing import Any

from decode_worker.config import DecodeSettings
from decode_worker.kv_events.endpoint import USER, Endpoint, parse_endpoint, prepare
from decode_worker.kv_events.events import CLEARED, pack_batch
from decode_worker.kv_events.msgpack import Value
from diptych.runtime.settings import StartupError

REPLAYED = 10_000
"""Batches that can be asked for again, as vLLM's `buffer_steps`."""
HIGH_WATER = 100_000
"""Batches that wait for a slow reader, as vLLM's `hwm`."""
CLOSE_S = 1.0
_END = (-1).to_bytes(8, "big", signed=True)
_log = logging.getLogger(__name__)


class EventsUnusable(StartupError):
    """KV events that cannot be published as it is configured."""


class EventPublisher:
    """Publisher at one endpoint. `publish` is called on one thread."""

    def __init__(self, endpoint: Endpoint, *, topic: str, rank: int = 0) -> None:
        """Bind both sockets, and begin with an AllBlocksCleared: an earlier process' blocks are gone.

        Raises EventsUnusable.
        """
        try:
            import zmq
        except ImportError:
            why = "--kv-events needs the extra `kv-events`: pip install 'diptych[kv-events]'"
            raise EventsUnusable(why) from None
        self._zmq = zmq
        self._topic, self._rank = topic.encode(), rank
        self._waiting: deque[tuple[int, float, Sequence[Value]]] = deque(maxlen=HIGH_WATER)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAYED)
        self._next = 0
        self._context = zmq.Context()
        self._guard: Any = None
        try:
            password = prepare(endpoint)
            if password is not None:
                self._guard = _guard(self._context, password)
            self._events = self._bound(zmq.PUB, endpoint.address, password)
            self._replay = self._bound(zmq.ROUTER, endpoint.replay_address, password)
        except (zmq.ZMQError, OSError) as error:
            self._end()
            raise EventsUnusable(f"--kv-events {endpoint.address}: {error}") from None
        except StartupError:
            self._end()
            raise
        self._wake, woken = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._wake.bind("inproc://wake")
        woken.connect("inproc://wake")
        self._thread = Thread(target=self._run, args=(woken,), name="kv-events", daemon=True)
        self._thread.start()
        self.publish([CLEARED])

    def publish(self, events: Sequence[Value]) -> None:
        """Publish events that belong together. Never blocks."""
        self._waiting.append((self._next, time.time(), events))
        self._next += 1
        self._signal(b"")

    def close(self) -> None:
        """Send what is waiting, for a moment at most, and close the sockets."""
        self._signal(b"end")
        self._thread.join(CLOSE_S)
        self._wake.close(0)
        self._end()

    def _signal(self, what: bytes) -> None:
        with contextlib.suppress(self._zmq.Again):  # a thousand signals wait: it is awake
            self._wake.send(what, self._zmq.NOBLOCK)

    def _bound(self, kind: int, address: str, password: str | None) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(HIGH_WATER)
        socket.linger = int(CLOSE_S * 1000)
        if password is not None:
            socket.plain_server, socket.zap_domain = True, b"kv-events"
        socket.bind(address)
        if (path := address.removeprefix("ipc://")) != address:
            os.chmod(path, 0o600)
        return socket

    def _run(self, woken: Any) -> None:
        poller = self._zmq.Poller()
        poller.register(woken, self._zmq.POLLIN)
        poller.register(self._replay, self._zmq.POLLIN)
        going_on = True
        while going_on:
            for socket, _ in poller.poll():
                try:
                    if socket is woken:
                        going_on &= woken.recv() != b"end"
                    else:
                        self._answer(self._replay.recv_multipart())
                except self._zmq.ZMQError:
                    _log.exception("KV events")
            while self._waiting:
                self._send(*self._waiting.popleft())
        woken.close(0)
        self._events.close()
        self._replay.close()

    def _send(self, count: int, seconds: float, events: Sequence[Value]) -> None:
        number, batch = count.to_bytes(8, "big"), pack_batch(seconds, events, self._rank)
        self._kept.append((number, batch))
        self._events.send_multipart((self._topic, number, batch))

    def _answer(self, frames: Sequence[bytes]) -> None:
        """Send the batches from the asked number on, and the mark of the end."""
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        reader, _, first = frames
        for number, batch in self._kept:
            if number >= first:
                self._replay.send_multipart((reader, b"", number, batch))
        self._replay.send_multipart((reader, b"", _END, b""))

    def _end(self) -> None:
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=int(CLOSE_S * 1000))


def make_publisher(settings: DecodeSettings) -> EventPublisher | None:
    """Return the publisher that is configured, None without one. Raises StartupError."""
    if not settings.kv_events:
        return None
    endpoint = parse_endpoint(settings.kv_events, settings.kv_events_rank)
    publisher = EventPublisher(endpoint, topic=settings.kv_events_topic, rank=settings.kv_events_rank)
    _log.info("KV events, with token ids, at %s, replays at %s", endpoint.address, endpoint.replay_address)
    return publisher


def _guard(context: Any, password: str) -> Any:
    """Return the thread that compares passwords."""
    from zmq.auth.thread import ThreadAuthenticator

    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_plain(domain="kv-events", passwords={USER: password})
    return guard
