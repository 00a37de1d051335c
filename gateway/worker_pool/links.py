"""One long-lived stream to one worker: hello, heartbeats both ways, and the certainty that loss is noticed.

A link comes up when the worker that answers is the one that was meant (id and incarnation). It goes down
when the stream ends, or when nothing was heard for `LinkTiming.silence_ticks` heartbeats: a stopped process
keeps its TCP connections. So does one whose engine hangs: its heartbeats say by how much the running step is
past its predicted end, and after `LinkTiming.late_s` of that the link is down until the step has ended. Half
way there the worker is suspected, and should get nothing new. Silence is counted in our own ticks, so that a
pause of this process is not taken for the worker's death. A link that is down tries again until it is closed.
The listener is told at once, from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import Message

from diptych.runtime.rpc_streams.connect import open_link
from diptych.runtime.rpc_streams.stream import Stream, StreamLost
from gateway.worker_pool.codec import Flushed, Heartbeat, LinkEvent, Load, WorkerCodec, WorkerHello

_log = logging.getLogger(__name__)
_LOSSES = (StreamLost, TimeoutError)
"""What ends a link."""


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """In seconds, but for the ticks: with the defaults 1 s of silence is suspicious, and 2 s are a loss."""

    heartbeat_s: float = 0.25
    suspect_ticks: int = 4
    silence_ticks: int = 8
    suspect_late_s: float = 1.0
    late_s: float = 2.0
    connect_s: float = 3.0
    retry_s: float = 0.25


class LinkListener(Protocol):
    """Who is told. All calls come from the event loop and must not block."""

    def on_up(self, worker_id: str) -> None: ...
    def on_down(self, worker_id: str) -> None: ...
    def on_load(self, worker_id: str, load: Load) -> None: ...
    def on_news(self, worker_id: str, news: list[LinkEvent]) -> None: ...
    def on_flushed(self, worker_id: str, flushed: Flushed) -> None: ...


class LinkDown(Exception):
    """There is no link to this worker now."""


class WrongWorker(Exception):
    """Another process answers at the worker's address."""


class Link:
    """A link to the worker ``worker_id`` (of this ``incarnation``) at ``address``, over and over again."""

    def __init__(
        self,
        wire: WorkerCodec,
        listener: LinkListener,
        *,
        worker_id: str,
        incarnation: int,
        address: str,
        timing: LinkTiming | None = None,
    ) -> None:
        self.wire = wire
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.address = address
        self._listener = listener
        self._timing = timing or LinkTiming()
        self._outbox: asyncio.Queue[Message] | None = None  # there while the link is up
        self._silent_ticks = 0
        self._late_s = 0.0  # as the worker said last
        self.heard_at: float | None = None
        """When the worker last said anything, on the event loop's clock."""
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self._outbox is not None

    @property
    def suspected(self) -> bool:
        """Whether the worker is silent, or its step late, for too long to be given anything new."""
        timing = self._timing
        return self._silent_ticks >= timing.suspect_ticks or self._late_s >= timing.suspect_late_s

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link {self.worker_id}")

    def send(self, message: Message) -> None:
        """Queue a message; they go out in order. Raises LinkDown."""
        if self._outbox is None:
            raise LinkDown(self.worker_id)
        self._outbox.put_nowait(message)

    async def close(self) -> None:
        """End the stream. The worker cancels what came over it; the listener hears `on_down` if it was up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        complaint = ""
        while True:
            try:
                await self._connect_once()
            except (StreamLost, WrongWorker, TimeoutError) as error:
                reason = str(error) or type(error).__name__
                if reason != complaint:  # once per reason, not four times a second
                    _log.warning("%s worker %s: %s", self.wire.role.value, self.worker_id, reason)
                complaint = reason
            else:
                complaint = ""
            await asyncio.sleep(self._timing.retry_s)

    async def _connect_once(self) -> None:
        """One connection from hello to loss."""
        stream = await open_link(self.address, self.wire.method)
        try:
            async with asyncio.timeout(self._timing.connect_s):
                await stream.write(self.wire.hello())
                await self._check_greeting(stream)
                await self._check_that_it_moves(stream)
            await self._serve(stream)
        finally:
            await stream.close()

    async def _check_greeting(self, stream: Stream) -> None:
        message = await stream.read()
        heard = None if message is None else self.wire.read(message)
        if heard != WorkerHello(self.worker_id, self.incarnation):
            raise WrongWorker(f"another process answers at {self.address}")

    async def _check_that_it_moves(self, stream: Stream) -> None:
        """After a stall the first heartbeat has to tell of its end."""
        while self._late_s >= self._timing.late_s:
            message = await stream.read()
            heard = None if message is None else self.wire.read(message)
            if isinstance(heard, Heartbeat):
                self._late_s = heard.late_s
            if heard is None or self._late_s >= self._timing.late_s:
                raise WrongWorker("its engine is stuck")

    async def _serve(self, stream: Stream) -> None:
        """Run the three loops until one ends; then the link is down, whatever the others still do."""
        outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox = outbox
        self._silent_ticks = 0
        tasks = [
            asyncio.create_task(self._read(stream)),
            asyncio.create_task(self._write(stream, outbox)),
            asyncio.create_task(self._beat(outbox)),
        ]
        _log.info("%s worker %s: linked", self.wire.role.value, self.worker_id)
        try:
            self._listener.on_up(self.worker_id)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._outbox = None
            self._listener.on_down(self.worker_id)
            _log.warning("%s worker %s: link lost", self.wire.role.value, self.worker_id)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, _LOSSES):
                    _log.error("link to %s", self.worker_id, exc_info=result)

    async def _read(self, stream: Stream) -> None:
        clock = asyncio.get_running_loop().time
        while (message := await stream.read()) is not None:
            self._silent_ticks = 0
            self.heard_at = clock()
            heard = self.wire.read(message)
            if isinstance(heard, list):
                self._listener.on_news(self.worker_id, heard)
            elif isinstance(heard, Heartbeat):
                self._late_s = heard.late_s
                if heard.load is not None:
                    self._listener.on_load(self.worker_id, heard.load)
            elif isinstance(heard, Flushed):
                self._listener.on_flushed(self.worker_id, heard)

    async def _write(self, stream: Stream, outbox: asyncio.Queue[Message]) -> None:
        while True:
            await stream.write(await outbox.get())

    async def _beat(self, outbox: asyncio.Queue[Message]) -> None:
        """Send heartbeats, count silence and look at lateness; raises TimeoutError when there is too much."""
        progress = 0
        timing = self._timing
        while self._silent_ticks < timing.silence_ticks and self._late_s < timing.late_s:
            outbox.put_nowait(self.wire.heartbeat(progress))
            progress += 1
            await asyncio.sleep(self._timing.heartbeat_s)
            self._silent_ticks += 1
        raise TimeoutError
