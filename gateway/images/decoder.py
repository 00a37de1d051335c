"""The child process that decodes images, and its successors.

See `diptych.runtime.images.decode` for why it is a process. It is started at the first image, takes one at a
time and is replaced when it dies. Tenants take turns: one that sends many images delays itself first.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import asdict
from typing import Any, Final
from weakref import WeakValueDictionary

from diptych.image_spec import ImageSpec
from diptych.runtime.bounded_child import frame
from diptych.runtime.errors import Draining, QueueFull
from diptych.runtime.image_rows import pixels_digest
from gateway.answering_child import AnsweringChild, ChildLost, OutOfTime, read_frame
from gateway.images.suspects import Suspects
from gateway.model.images import PreparedImage

MAX_WAITING: Final = 64
"""Images of one tenant that wait for the child."""


REFUSED_S: Final = 0.05
"""Time after a refused file before its tenant's next one, so that a flood of them costs others little."""
SUSPECTS_S: Final = 0.025
"""Time after a file of a tenant whose last one was refused, before that of another such tenant."""


class RefusedImage(Exception):
    """An image that is not decoded; the message follows the name of its field."""


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
        self._child = AnsweringChild("diptych.runtime.images.decode", "decodes images")
        self._turns: WeakValueDictionary[str, _Turn] = WeakValueDictionary()
        self._next = asyncio.Lock()  # of the tenants' first images
        self._suspects = Suspects()
        self._closed = False

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """Process of the child that will be asked, if one was started."""
        return self._child.process

    async def decode(self, data: bytes, media_type: str, tenant: str) -> PreparedImage:
        """Return an image file as tiles. Raises RefusedImage, QueueFull or Draining."""
        turn = self._turns.get(tenant)
        if turn is None:
            turn = self._turns[tenant] = _Turn()
        if turn.waiting >= MAX_WAITING:
            raise QueueFull()
        turn.waiting += 1
        try:
            async with turn.lock:
                try:
                    async with self._suspects.turn(tenant, SUSPECTS_S), self._next:
                        if self._closed:
                            raise Draining()
                        found = await self._ask(data, media_type)
                except RefusedImage:
                    self._suspects.refuse(tenant)
                    await asyncio.sleep(REFUSED_S)
                    raise
                self._suspects.accept(tenant)
                return found
        finally:
            turn.waiting -= 1

    async def close(self) -> None:
        """End the child; the image that it is at and those that still wait get Draining."""
        self._closed = True
        await self._child.close()

    async def _ask(self, data: bytes, media_type: str) -> PreparedImage:
        """Ask the child: that its successor dies as well is the image's fault."""
        head = {
            "spec": self._spec,
            "media_type": media_type,
            "max_pixels": self._max_pixels,
            "bytes": len(data),
        }
        try:
            return await self._child.exchange((frame(json.dumps(head).encode()), data), _read_answer)
        except OutOfTime:
            raise RefusedImage("takes too long to decode") from None
        except ChildLost:
            if self._closed:
                raise Draining() from None
            raise RefusedImage("could not be decoded: its decoder was lost over it") from None


async def _read_answer(reader: asyncio.StreamReader) -> PreparedImage:
    head: dict[str, Any] = json.loads(await read_frame(reader))
    if fault := head.get("fault"):
        raise RefusedImage(fault)
    tiles, channels, height, width = shape = head["shape"]
    pixels = await reader.readexactly(tiles * channels * height * width)
    digest = pixels_digest(shape, pixels)
    return PreparedImage((tiles, channels, height, width), pixels, head["rows"], head["columns"], digest)
