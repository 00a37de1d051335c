"""The links to the workers: one long-lived stream each, with heartbeats both ways and loss detection.

A link comes up when the worker that answers is the expected one (id and incarnation). It goes down when the
stream ends, or when no message came for `LinkTiming.silence_ticks` heartbeats: a stopped process keeps its
TCP connections. So does one whose engine hangs: its heartbeats say by how much the running step is past its
predicted end, and after `LinkTiming.late_s` of that the link is down until the step has ended. Half way there
the worker is suspected, and should get no new work. Silence is counted in this process's own ticks, so that a
pause of this process is not taken for the worker's death. A link that is down reconnects until it is closed.
The listener is called at once, from the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import Message

from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.rpc_streams.connect import open_link
from diptych.runtime.rpc_streams.stream import Stream, StreamLost
from gateway.worker_pool.codec import (
    AdapterAnswer,
    Flushed,
    Heartbeat,
    Load,
    WorkerCodec,
    WorkerEvent,
    WorkerHello,
)

_log = logging.getLogger(__name__)
_LOSSES = (StreamLost, TimeoutError)  # of a link


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """The timing of a link, in seconds but for the ticks.

    With the defaults a worker is suspected after 1 s of silence, and lost after 2 s.
    """

    heartbeat_s: float = 0.25
    suspect_ticks: int = 4
    silence_ticks: int = 8
    suspect_late_s: float = 1.0
    late_s: float = 2.0
    connect_s: float = 3.0
    retry_s: float = 0.25


class LinkListener(Protocol):
    """The receiver of links' events. All calls come from the event loop and must not block."""

    def on_up(self, worker_id: str) -> None: ...
    def on_down(self, worker_id: str) -> None: ...
    def on_load(self, worker_id: str, load: Load) -> None: ...
    def on_events(self, worker_id: str, events: list[WorkerEvent]) -> None: ...
    def on_flushed(self, worker_id: str, flushed: Flushed) -> None: ...
    def on_adapter_answer(self, worker_id: str, answer: AdapterAnswer) -> None: ...


class LinkDown(Exception):
    """The absence of a link to this worker."""


class WrongWorker(Exception):
    """The answer of another process, or of a stuck engine, at the worker's address."""


class Link:
    """A link to the worker ``worker_id`` (of this ``incarnation``) at ``address``; it reconnects."""

    def __init__(
        self,
        codec: WorkerCodec,
        listener: LinkListener,
        *,
        worker_id: str,
        incarnation: int,
        address: str,
        timing: LinkTiming | None = None,
        tls: InternalTls | None = None,
    ) -> None:
        self._tls = tls
        self.codec = codec
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.address = address
        self._listener = listener
        self._timing = timing or LinkTiming()
        self._send_queue: asyncio.Queue[Message] | None = None  # there while the link is up
        self._silent_ticks = 0
        self._late_s = 0.0  # as last reported
        self.last_seen: float | None = None  # time of the last message, on the event loop's clock
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self._send_queue is not None

    @property
    def suspected(self) -> bool:
        """True while the worker is silent, or its step late, for too long to get new work."""
        timing = self._timing
        return self._silent_ticks >= timing.suspect_ticks or self._late_s >= timing.suspect_late_s

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link {self.worker_id}")

    def send(self, message: Message) -> None:
        """Queue a message to the worker; they go out in order. Raises LinkDown."""
        if self._send_queue is None:
            raise LinkDown(self.worker_id)
        self._send_queue.put_nowait(message)

    def stop(self) -> None:
        """End the stream, and call `on_down` if it was up. The worker cancels all work that came over it."""
        if self._task is not None:
            self._task.cancel()
        self._end()

    async def close(self) -> None:
        """Stop, and wait until the stream is closed."""
        self.stop()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        logged = ""
        while True:
            try:
                await self._connect_once()
            except (StreamLost, WrongWorker, TimeoutError) as error:
                reason = str(error) or type(error).__name__
                if reason != logged:  # once per reason, not four times a second
                    _log.warning("%s worker %s: %s", self.codec.role.value, self.worker_id, reason)
                logged = reason
            else:
                logged = ""
            await asyncio.sleep(self._timing.retry_s)

    async def _connect_once(self) -> None:
        """Connect, and serve the connection until it is lost."""
        stream = await open_link(self.address, self.codec.method, self._tls)
        try:
            async with asyncio.timeout(self._timing.connect_s):
                await stream.write(self.codec.build_hello())
                await self._read_hello(stream)
                await self._check_progress(stream)
            await self._serve(stream)
        finally:
            await stream.close()

    async def _read_hello(self, stream: Stream) -> None:
        message = await stream.read()
        parsed = None if message is None else self.codec.parse(message)
        if parsed != WorkerHello(self.worker_id, self.incarnation):
            raise WrongWorker(f"another process answers at {self.address}")

    async def _check_progress(self, stream: Stream) -> None:
        """Raise WrongWorker unless the first heartbeat after a stall reports its end."""
        while self._late_s >= self._timing.late_s:
            message = await stream.read()
            parsed = None if message is None else self.codec.parse(message)
            if isinstance(parsed, Heartbeat):
                self._late_s = parsed.late_s
            if parsed is None or self._late_s >= self._timing.late_s:
                raise WrongWorker("its engine is stuck")

    async def _serve(self, stream: Stream) -> None:
        """Run the three loops until one ends; then the link is down, whatever the others do."""
        send_queue: asyncio.Queue[Message] = asyncio.Queue()
        self._send_queue = send_queue
        self._silent_ticks = 0
        self.last_seen = asyncio.get_running_loop().time()
        tasks = [
            asyncio.create_task(self._read(stream)),
            asyncio.create_task(self._write(stream, send_queue)),
            asyncio.create_task(self._send_heartbeats(send_queue)),
        ]
        _log.info("%s worker %s: linked", self.codec.role.value, self.worker_id)
        try:
            self._listener.on_up(self.worker_id)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._end()
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, _LOSSES):
                    _log.error("link to %s", self.worker_id, exc_info=result)

    def _end(self) -> None:
        """Report the end of the link, once."""
        if self._send_queue is not None:
            self._send_queue = None
            self._listener.on_down(self.worker_id)
            _log.warning("%s worker %s: link lost", self.codec.role.value, self.worker_id)

    async def _read(self, stream: Stream) -> None:
        clock = asyncio.get_running_loop().time
        while (message := await stream.read()) is not None and self.up:
            self._silent_ticks = 0
            self.last_seen = clock()
            parsed = self.codec.parse(message)
            if isinstance(parsed, list):
                self._listener.on_events(self.worker_id, parsed)
            elif isinstance(parsed, Heartbeat):
                self._late_s = parsed.late_s
                if parsed.load is not None:
                    self._listener.on_load(self.worker_id, parsed.load)
            elif isinstance(parsed, Flushed):
                self._listener.on_flushed(self.worker_id, parsed)
            elif isinstance(parsed, AdapterAnswer):
                self._listener.on_adapter_answer(self.worker_id, parsed)

    async def _write(self, stream: Stream, send_queue: asyncio.Queue[Message]) -> None:
        while True:
            await stream.write(await send_queue.get())

    async def _send_heartbeats(self, send_queue: asyncio.Queue[Message]) -> None:
        """Send heartbeats, count silence and check lateness; raises TimeoutError when either is too long."""
        progress = 0
        timing = self._timing
        while self._silent_ticks < timing.silence_ticks and self._late_s < timing.late_s:
            send_queue.put_nowait(self.codec.build_heartbeat(progress))
            progress += 1
            await asyncio.sleep(self._timing.heartbeat_s)
            self._silent_ticks += 1
        raise TimeoutError


class PendingFlushes:
    """The flushes of prefix caches that workers have not answered yet, by worker and number.

    A worker that is lost meanwhile has no cache any more: its answer is 0.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[str, int], asyncio.Future[int]] = {}

    def add(self, worker_id: str) -> tuple[int, asyncio.Future[int]]:
        """Return a number for a flush, and the future of the number of forgotten blocks."""
        number = next(self._numbers)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[worker_id, number] = future
        future.add_done_callback(lambda _: self._waiting.pop((worker_id, number), None))
        return number, future

    def on_flushed(self, worker_id: str, flushed: Flushed) -> None:
        """Complete the flush that a worker answered."""
        future = self._waiting.get((worker_id, flushed.request))
        if future is not None and not future.done():
            future.set_result(flushed.blocks)

    def on_worker_down(self, worker_id: str) -> None:
        """Complete the flushes of a lost worker with 0."""
        for (waiting_id, _), future in list(self._waiting.items()):
            if waiting_id == worker_id and not future.done():
                future.set_result(0)
