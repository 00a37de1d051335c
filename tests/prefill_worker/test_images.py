"""Pixels on their way to prompts, which tile is encoded next, and the embeddings of a chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.engine.vision.embedding_cache import EmbeddingCache
from diptych.image_spec import ImageSpec
from diptych.runtime.image_rows import keyed_digest, pixels_digest
from diptych.worker.v1 import work_pb2
from diptych.worker_process.attempt import Attempt
from prefill_worker.gateway_stream import GatewayStream
from prefill_worker.image_encoding import ImageEncoding
from prefill_worker.image_store import BadImages, ImageStore
from prefill_worker.request import PrefillRequest, State, attempt_span
from prefill_worker.request_images import RequestImages

NAMESPACE = bytes(range(32))
SHAPE = (2, 3, 4, 4)
ROWS = 5  # of a tile
HALF = (0.5, 0.5, 0.5)
SPEC = ImageSpec("llava", (4, 4), ROWS, "<image>", 1, 3, 1 / 255, HALF, HALF)


class Encoder:
    """Gives each row of a tile the mean of its pixels and the row's number."""

    spec = SPEC

    def encode(self, tile: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.tensor([float(tile.float().mean()), row]) for row in range(ROWS)])


def pixels(seed: int) -> bytes:
    return bytes((seed + n) % 256 for n in range(96))


def digest(data: bytes) -> bytes:
    return keyed_digest(NAMESPACE, pixels_digest(SHAPE, data))


def attempt(*spans: work_pb2.ImageSpan, tokens: int = 40) -> Attempt:
    work = work_pb2.Work(
        id=work_pb2.AttemptId(request_id="r", attempt=1),
        token_ids=[1] * tokens,
        prompt_tokens=tokens,
        stopping=work_pb2.Stopping(max_tokens=1),
        cache_namespace=NAMESPACE,
        images=spans,
    )
    return Attempt.from_work(work, max_context=100)


def span(first: int, rows: int, data: bytes, first_row: int = 0) -> work_pb2.ImageSpan:
    return work_pb2.ImageSpan(first_position=first, rows=rows, digest=digest(data), first_row=first_row)


def parts(data: bytes, size: int = 40) -> list[work_pb2.ImagePart]:
    name = work_pb2.AttemptId(request_id="r", attempt=1)
    found = [
        work_pb2.ImagePart(id=name, digest=digest(data), data=data[at : at + size])
        for at in range(0, len(data), size)
    ]
    found[0].shape.extend(SHAPE)
    return found


def take(store: ImageStore, one: work_pb2.ImageSpan, spec: ImageSpec = SPEC) -> dict[bytes, torch.Tensor]:
    made = attempt(one)
    return store.take(made.key, made.images, made.cache_namespace, spec)


def encoding(store: ImageStore, cache_bytes: int = 1 << 20) -> tuple[ImageEncoding, list[str]]:
    seen: list[str] = []
    cache = EmbeddingCache(cache_bytes)
    return ImageEncoding(Encoder(), store, cache, threads=lambda: 1, on_image=seen.append), seen


def test_images_come_whole_and_leave_the_store_with_their_dispatch() -> None:
    store = ImageStore(1000)
    for part in parts(pixels(1)):
        store.receive(part, "gateway")
    assert store.num_bytes == 96
    taken = take(store, span(0, 10, pixels(1)))
    assert bytes(taken[digest(pixels(1))].flatten().tolist()) == pixels(1)
    assert store.num_bytes == 0


@pytest.mark.parametrize("fault", ["missing part", "too much", "other bytes", "no room", "other tiles"])
def test_images_that_did_not_come_whole_fail_their_attempt(fault: str) -> None:
    store = ImageStore(50 if fault == "no room" else 1000)
    sent = parts(pixels(1))
    if fault == "missing part":
        sent.pop()
    if fault == "too much":
        sent[-1].data += b"x"
    if fault == "other bytes":
        sent[-1].data = sent[-1].data[::-1]
    for part in sent:
        store.receive(part, "gateway")
    spec = replace(SPEC, tile=(8, 2)) if fault == "other tiles" else SPEC
    with pytest.raises(BadImages):
        take(store, span(0, 10, pixels(1)), spec)
    assert store.num_bytes == 0


def test_what_a_lost_gateway_sent_is_forgotten() -> None:
    store, gateway = ImageStore(1000), object()
    for part in parts(pixels(1)):
        store.receive(part, gateway)
    store.gateway_lost(object())
    assert store.num_bytes == 96
    store.gateway_lost(gateway)
    assert store.num_bytes == 0


def test_more_tokens_than_an_image_has_rows_are_refused() -> None:
    store = ImageStore(1000)
    made, _ = encoding(store)
    for part in parts(pixels(1)):
        store.receive(part, "gateway")
    with pytest.raises(BadImages, match="fewer rows"):
        made.open(attempt(span(0, 11, pixels(1))))


def test_a_grid_that_is_not_the_images_is_refused() -> None:
    store = ImageStore(1000)
    made, _ = encoding(store)
    for part in parts(pixels(1)):
        store.receive(part, "gateway")
    turned = span(0, 10, pixels(1))
    turned.columns = 5
    with pytest.raises(BadImages, match="grid"):
        made.open(attempt(turned))


def test_chunks_get_the_rows_of_their_tokens() -> None:
    store = ImageStore(1000)
    made, seen = encoding(store)
    for part in parts(pixels(1)):
        store.receive(part, "gateway")
    images = made.open(attempt(span(3, 5, pixels(1)), span(10, 5, pixels(1), first_row=5)))
    assert images is not None
    state = images.states[digest(pixels(1))]
    assert images.next_to_encode(0) is state
    assert images.ready(15)  # all its rows are cached
    assert not images.ready(14)
    assert not state.add(Encoder().encode(state.next_tile()))
    assert state.add(Encoder().encode(state.next_tile()))
    assert state.tiles is None
    assert images.ready(0)
    (first,) = images.rows(0, 6)
    assert (first.at, first.rows[:, 1].tolist()) == (3, [0.0, 1.0, 2.0])
    second, third = images.rows(6, 6)
    assert (second.at, second.rows[:, 1].tolist()) == (0, [3.0, 4.0])
    assert (third.at, third.rows[:, 1].tolist()) == (4, [0.0, 1.0])
    assert images.rows(15, 20) == []
    assert seen == []


def test_what_a_prompt_waits_for_its_rows_is_a_phase_of_its_own() -> None:
    images = RequestImages((), {})
    request = PrefillRequest(attempt(), [1], GatewayStream("g"), 0, 0.0, "", 0, images=images)
    request.entered = {State.QUEUED: 10.0, State.ASKED: 13.0, State.GRANTED: 13.5}
    request.computed_at = 20.0
    seconds = [_phases(request)]
    images.fetched_at = 12.0  # an encode worker's came, and some more after the grant
    seconds.append(_phases(request))
    images.encoded_at = 15.5
    seconds.append(_phases(request))
    assert seconds == [(3.0, 0.0, 6.5), (1.0, 2.0, 6.5), (1.0, 4.0, 4.5)]
    names = [one.name for one in attempt_span(request, "committed").children]
    assert names == ["encode", "queue", "kv_alloc_wait", "encode", "prefill", "kv_transfer.send"]


def _phases(request: PrefillRequest) -> tuple[float, ...]:
    times = request.times()
    return tuple(one.ToNanoseconds() / 1e9 for one in (times.prefill_queue, times.encode, times.prefill))


def test_a_known_image_is_not_encoded_again() -> None:
    store = ImageStore(1000)
    made, seen = encoding(store)
    made._cache.put(digest(pixels(1)), torch.zeros(10, 2))
    for part in parts(pixels(1)):
        store.receive(part, "gateway")
    images = made.open(attempt(span(0, 10, pixels(1))))
    assert images is not None
    assert images.ready(0)
    assert seen == ["cached"]


def test_the_cache_keeps_the_last_used_within_its_bound() -> None:
    cache, rows = EmbeddingCache(100), torch.zeros(5, 2)  # 40 bytes
    cache.put(b"a", rows)
    cache.put(b"b", rows)
    assert cache.get(b"a") is rows
    cache.put(b"c", rows)
    assert (len(cache), cache.num_bytes) == (2, 80)
    assert cache.get(b"b") is None
    cache.put(b"d", torch.zeros(50, 2))
    assert cache.get(b"d") is None
    assert EmbeddingCache(0).get(b"a") is None
