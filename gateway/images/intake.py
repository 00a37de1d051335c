"""Intake of a request's images, before anything else is done with it: limits, decoding, and their memory."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.runtime.images.media_types import MEDIA_TYPES
from diptych.v1 import inference_pb2 as pb
from gateway.images.decoder import ImageDecoder, RefusedImage
from gateway.images.fetcher import ImageFetcher
from gateway.images.memory import ByteBudget, HeldMemory
from gateway.images.url_rules import RefusedUrl
from gateway.model.images import PreparedImage

TEXT_ONLY: Final = "this model reads text only"


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds on the images of requests."""

    count: int
    """Images of a request."""
    file_bytes: int
    """Bytes of the files of a request's images together."""


class ImageIntake:
    """Takes the images of all requests for a model."""

    def __init__(
        self,
        decoder: ImageDecoder | None,
        limits: ImageLimits,
        memory: HeldMemory,
        why_none: str = TEXT_ONLY,
        fetcher: ImageFetcher | None = None,
    ) -> None:
        """Take images with ``decoder``; without one all are refused, with the words ``why_none``.

        Args:
            memory: holds their pixels, and files that are fetched.
            fetcher: fetches remote ones; without it they are refused.
        """
        self._decoder = decoder
        self._fetcher = fetcher
        self._limits = limits
        self._why_none = why_none
        self._memory = memory

    async def close(self) -> None:
        """End the process that decodes."""
        if self._decoder is not None:
            await self._decoder.close()

    async def prepare(self, chat: pb.ChatPrompt, tenant: str) -> tuple[PreparedImage, ...]:
        """Return a conversation's images in their order, decoded.

        Raises InvalidParameter and UnsupportedFeature, naming the field, QueueFull, ImageMemory or Draining.
        """
        found = list(_images_of(chat))
        if not found:
            return ()
        decoder = self._decoder
        if decoder is None:
            raise UnsupportedFeature(found[0][0], self._why_none)
        budget = ByteBudget(self._check(found), self._memory)
        try:
            return await self._decoded(decoder, await self._files(found, budget, tenant), tenant)
        finally:
            budget.close()

    async def _decoded(
        self, decoder: ImageDecoder, files: list[tuple[str, bytes, str]], tenant: str
    ) -> tuple[PreparedImage, ...]:
        made: dict[tuple[bytes, str], PreparedImage] = {}
        order = []
        for field, data, media_type in files:
            key = data, media_type
            order.append(key)
            if key in made:
                continue
            try:
                made[key] = await decoder.decode(data, media_type, tenant)
            except RefusedImage as refused:
                raise InvalidParameter(field, str(refused)) from None
            self._hold(made[key])
        return tuple(made[key] for key in order)

    def _check(self, found: list[tuple[str, pb.Image]]) -> int:
        """Return how many bytes images may have that are still to be fetched."""
        limits = self._limits
        if len(found) > limits.count:
            raise InvalidParameter(found[limits.count][0], f"a request may have {limits.count} images")
        left = limits.file_bytes
        for field, image in found:
            if image.url and image.data:
                raise InvalidParameter(field, "has data and a url: give one")
            if image.url and self._fetcher is None:
                raise UnsupportedFeature(
                    f"{field}.url", "this server fetches no images: send the file itself"
                )
            if not (image.data or image.url):
                raise InvalidParameter(field, "has no data")
            if image.media_type and image.media_type not in MEDIA_TYPES:
                raise InvalidParameter(f"{field}.media_type", f"must be {', '.join(MEDIA_TYPES)}")
            left -= len(image.data)
            if left < 0:
                raise InvalidParameter(
                    field, f"a request's images may have {limits.file_bytes} bytes together"
                )
        return left

    async def _files(
        self, found: list[tuple[str, pb.Image]], budget: ByteBudget, tenant: str
    ) -> list[tuple[str, bytes, str]]:
        """Return field, file and media type of each image; those at URLs are fetched within `budget`."""
        remote = {image.url: f"{field}.url" for field, image in reversed(found) if image.url}
        tasks = {
            url: asyncio.create_task(self._fetched(url, field, budget, tenant), name="image url")
            for url, field in remote.items()
        }
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        return [
            (field, tasks[image.url].result() if image.url else image.data, image.media_type)
            for field, image in found
        ]

    async def _fetched(self, url: str, field: str, budget: ByteBudget, tenant: str) -> bytes:
        if self._fetcher is None:
            raise RuntimeError("no images are fetched")
        try:
            return await self._fetcher.fetch(url, budget, tenant)
        except RefusedUrl as refused:
            raise InvalidParameter(field, str(refused)) from None

    def _hold(self, image: PreparedImage) -> None:
        """Count an image's pixels for as long as it lives."""
        self._memory.take(len(image.data))
        weakref.finalize(image, self._memory.release, len(image.data))


def _images_of(chat: pb.ChatPrompt) -> Iterator[tuple[str, pb.Image]]:
    """Yield each image with the name of its field."""
    for index, message in enumerate(chat.messages):
        for place, part in enumerate(message.parts):
            if part.WhichOneof("part") == "image":
                yield f"chat.messages[{index}].parts[{place}].image", part.image
