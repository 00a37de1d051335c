"""The pixels that gateways send before a dispatch, collected by attempt within a bound of memory.

Parts of an attempt's images come in order, and before its dispatch. What does not fit, or is not what its
digest says, is missing when the dispatch comes: that attempt fails, and no other. An attempt that is
cancelled, or whose gateway is lost, before its dispatch leaves nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from diptych.image_spec import ImageSpec
from diptych.runtime.image_rows import ImageRows, keyed_digest, pixels_digest
from diptych.worker.v1 import work_pb2
from kvtransfer.drivers.codec import key_of
from kvtransfer.protocol.messages import Key

TILE_AXES = 4  # tiles, channels, height, width


@dataclass(slots=True)
class _Arriving:
    shape: tuple[int, ...]
    data: bytearray = field(default_factory=bytearray)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) if len(self.shape) == TILE_AXES else -1


class BadImages(Exception):
    """Images that did not come whole; the message says which, without their content."""


class ImageStore:
    """Images on their way from gateways."""

    def __init__(self, max_bytes: int) -> None:
        """Hold at most `max_bytes` of pixels before dispatches."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._attempts: dict[Key, dict[bytes, _Arriving]] = {}
        self._owners: dict[Key, Hashable] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of what has come and was not dispatched."""
        return self._bytes

    def receive(self, part: work_pb2.ImagePart, gateway: Hashable) -> None:
        """Add a part. What exceeds the bound, or its image's own size, is dropped."""
        key = key_of(part.id)
        images = self._attempts.setdefault(key, {})
        self._owners[key] = gateway
        image = images.setdefault(part.digest, _Arriving(tuple(part.shape)))
        if self._bytes + len(part.data) > self._max_bytes or len(image.data) + len(part.data) > image.size:
            return
        image.data += part.data
        self._bytes += len(part.data)

    def take(
        self, key: Key, spans: Sequence[ImageRows], namespace: bytes, spec: ImageSpec
    ) -> dict[bytes, torch.Tensor]:
        """Return the pixels `[tiles, channels, height, width]` of an attempt with these spans, by digest;
        forget them here.

        Args:
            namespace: what its images' digests are keyed by.

        Raises BadImages unless all images of its spans are there, whole, as `spec` wants them, and with the
        rows and the grid that its spans have.
        """
        images = self._attempts.get(key, {})
        self.drop(key)
        found: dict[bytes, torch.Tensor] = {}
        for digest in dict.fromkeys(span.digest for span in spans):
            image = images.get(digest)
            if image is None or len(image.data) != image.size:
                raise BadImages("pixels of an image are missing")
            if not spec.rows_of(image.shape):
                raise BadImages(f"the encoder takes no image of {image.shape} tiles, channels and pixels")
            if keyed_digest(namespace, pixels_digest(image.shape, image.data)) != digest:
                raise BadImages("pixels of an image are not those of its digest")
            found[digest] = torch.frombuffer(image.data, dtype=torch.uint8).view(image.shape)
        for span in spans:
            shape = found[span.digest].shape
            if span.first_row + span.rows > spec.rows_of(shape):
                raise BadImages("an image has fewer rows than its tokens")
            if span.columns != spec.columns_of(shape):
                raise BadImages("an image's grid is another one than its tokens'")
        return found

    def drop(self, key: Key) -> None:
        """Forget what came of an attempt."""
        images = self._attempts.pop(key, {})
        self._owners.pop(key, None)
        self._bytes -= sum(len(image.data) for image in images.values())

    def gateway_lost(self, gateway: Hashable) -> None:
        """Forget what came over a stream that ended."""
        for key in [key for key, owner in self._owners.items() if owner is gateway]:
            self.drop(key)
