"""The parts in which the pixels of an attempt's images go to the worker that encodes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from diptych.worker.v1 import work_pb2
from gateway.model.images import PromptImages

PART_BYTES: Final = 1 << 20  # of a message: heartbeats and other requests' dispatches come between


def image_parts(work: work_pb2.Work, images: PromptImages) -> Iterator[work_pb2.ImagePart]:
    """Yield the parts of each image, an image that the prompt has twice once."""
    digests = images.digests(work.cache_namespace)
    for digest, image in dict(zip(digests, images.images, strict=True)).items():
        for begin in range(0, len(image.data), PART_BYTES):
            part = work_pb2.ImagePart(id=work.id, digest=digest, data=image.data[begin : begin + PART_BYTES])
            if not begin:
                part.shape.extend(image.shape)
            yield part
