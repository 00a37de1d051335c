"""Pixels of an attempt as messages: in parts, an image that comes twice once."""

from __future__ import annotations

from diptych.runtime.image_rows import keyed_digest, pixels_digest
from diptych.worker.v1 import work_pb2
from gateway.model.images import PreparedImage, PromptImages
from gateway.worker_pool.image_messages import PART_BYTES, image_parts

NAMESPACE = bytes(range(32))
WORK = work_pb2.Work(
    id=work_pb2.AttemptId(request_id="r", attempt=2),
    token_ids=[1],
    prompt_tokens=1,
    cache_namespace=NAMESPACE,
)


def image(edge: int, fill: int) -> PreparedImage:
    shape = (1, 3, edge, edge)
    data = bytes([fill]) * (3 * edge * edge)
    return PreparedImage(shape, data, 0, 0, pixels_digest(shape, data))


def test_images_come_in_parts_each_once() -> None:
    large, small = image(700, 1), image(4, 2)
    parts = list(image_parts(WORK, PromptImages((large, small, large), ())))
    assert all(part.id == WORK.id for part in parts)
    assert all(len(part.data) <= PART_BYTES for part in parts)
    for one in (large, small):
        own = [part for part in parts if part.digest == keyed_digest(NAMESPACE, one.digest)]
        assert b"".join(part.data for part in own) == one.data
        assert [tuple(part.shape) for part in own] == [one.shape, *[()] * (len(own) - 1)]
    assert len(parts) == 3
