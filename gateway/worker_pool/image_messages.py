"""The messages that bring the pixels of an attempt's images to its prefill worker, ahead of its dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from diptych.worker.v1 import prefill_pb2, work_pb2
from gateway.model.images import PromptImages

PART_BYTES: Final = 1 << 20  # of a message: heartbeats and other requests' dispatches come between


def image_messages(
    work: work_pb2.Work, images: PromptImages
) -> Iterator[prefill_pb2.PrefillServiceLinkRequest]:
    """Yield the parts of each image, an image that the prompt has twice once."""
    digests = images.digests(work.cache_namespace)
    for digest, image in dict(zip(digests, images.images, strict=True)).items():
        for begin in range(0, len(image.data), PART_BYTES):
            part = prefill_pb2.ImagePart(
                id=work.id, digest=digest, data=image.data[begin : begin + PART_BYTES]
            )
            if not begin:
                part.shape.extend(image.shape)
            yield prefill_pb2.PrefillServiceLinkRequest(image=part)
