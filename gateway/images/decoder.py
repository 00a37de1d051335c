"""The child process that decodes images, and its successors.

See `diptych.runtime.images.decode` for why it is a process. It is started at the first image, takes one at a
time and is replaced when it dies. Tenants take turns: one that sends many images delays itself first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

from diptych.image_spec import ImageSpec
from diptych.runtime.errors import Draining, QueueFull
from diptych.runtime.image_rows import pixels_digest
from diptych.runtime.images.framing import LENGTH
from diptych.runtime.python_module import module_command
from gateway.model.images import PreparedImage

_log = logging.getLogger(__name__)
ATTEMPTS: Final = 2
SILENT_SECONDS: Final = 30.0
"""A child without an answer for so long is lost; its own limit is on processor time and lower."""
MAX_WAITING: Final = 64
"""Images of one tenant that wait for the child."""


class RefusedImage(Exception):
    """An image that is not decoded; the message follows the name of its field."""


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class _Turn:
    """Turn of one tenant, kept alive by those that wait for it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0


class ImageDecoder:
    """Decodes images of one model in a child process; one object per gateway."""

    def __init__(self, spec: ImageSpec, max_pixels: int) -> None:
        self._spec = asdict(spec)
        self._max_pixels = max_pixels
        self._child: _Child | None = None
        self._turns: WeakValueDictionary[str, _Turn] = WeakValueDictionary()
        self._next = asyncio.Lock()  # of the tenants' first images
        self._closed = False

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """Process of the child that will be asked, if one was started."""
        return None if self._child is None else self._child.process

    async def decode(self, data: bytes, media_type: str, tenant: str) -> PreparedImage:
        """Return an image file as tiles. Raises RefusedImage, QueueFull or Draining."""
        turn = self._turns.get(tenant)
        if turn is None:
            turn = self._turns[tenant] = _Turn()
        if turn.waiting >= MAX_WAITING:
            raise QueueFull()
        turn.waiting += 1
        try:
            async with turn.lock, self._next:
                if self._closed:
                    raise Draining()
                return await self._ask(data, media_type)
        finally:
            turn.waiting -= 1

    async def close(self) -> None:
        """End the child; images that still wait get Draining."""
        self._closed = True
        await self._end()

    async def _ask(self, data: bytes, media_type: str) -> PreparedImage:
        """Ask the child, and once more its successor: a child may die of anything, two die of the image."""
        head = {
            "spec": self._spec,
            "media_type": media_type,
            "max_pixels": self._max_pixels,
            "bytes": len(data),
        }
        question = json.dumps(head).encode()
        for _ in range(ATTEMPTS):
            if self.process is not None and self.process.poll() is not None:
                await self._end()  # it died of something else than a question
            try:
                return await self._answer(question, data)
            except (asyncio.IncompleteReadError, OSError):  # TimeoutError is one
                if await self._end() == -signal.SIGPROF:
                    raise RefusedImage("takes too long to decode") from None
                _log.warning("the process that decodes images was lost")
            except asyncio.CancelledError:
                await self._end()  # its answer would be taken for that to the next question
                raise
        raise RefusedImage("could not be decoded: its decoder was lost over it")

    async def _answer(self, question: bytes, data: bytes) -> PreparedImage:
        child = self._child or await self._start()
        async with asyncio.timeout(SILENT_SECONDS):
            child.writer.write(LENGTH.pack(len(question)) + question)
            child.writer.write(data)
            await child.writer.drain()
            (size,) = LENGTH.unpack(await child.reader.readexactly(LENGTH.size))
            head: dict[str, Any] = json.loads(await child.reader.readexactly(size))
            if fault := head.get("fault"):
                raise RefusedImage(fault)
            tiles, channels, height, width = head["shape"]
            pixels = await child.reader.readexactly(tiles * channels * height * width)
        return _prepared((tiles, channels, height, width), pixels, (head["rows"], head["columns"]))

    async def _start(self) -> _Child:
        process, ours = _spawn()
        self._child = _Child(process, *(await asyncio.open_connection(sock=ours)))
        return self._child

    async def _end(self) -> int | None:
        """End the child, if there is one. Returns its return code."""
        child, self._child = self._child, None
        if child is None:
            return None
        child.process.kill()
        child.writer.close()
        with contextlib.suppress(ConnectionError):
            await child.writer.wait_closed()
        return await asyncio.to_thread(child.process.wait)


def _prepared(shape: tuple[int, int, int, int], pixels: bytes, grid: Sequence[int]) -> PreparedImage:
    return PreparedImage(shape, pixels, grid[0], grid[1], pixels_digest(shape, pixels))


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the child with vfork(2), as `gateway.request.grammar_check` does, and return our end as well."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            module_command("diptych.runtime.images.decode"),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
        )
    return process, ours
