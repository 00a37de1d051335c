"""Rows of images that an encode worker makes: what prompts ask for, and when.

The rows of an image that the gateway expects to be computed are asked for when the prompt is dispatched, and
the prompt asks for blocks once they are here: no blocks wait for an encoder. The others, whose tokens should
be cached, are asked for if the grant says that they are not. Then the encode worker may forget the attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from diptych.engine.vision.embedding_cache import EmbeddingCache
from diptych.runtime.failpoints import reach
from diptych.worker.v1 import prefill_pb2, work_pb2
from diptych.worker_process.attempt import Attempt
from kvtransfer.drivers.embedding_client import EncoderAddress
from kvtransfer.protocol.messages import Key
from prefill_worker.request_images import ImageState, RequestImages


class RowSource(Protocol):
    """The links to encode workers; see `kvtransfer.drivers.embedding_client.EmbeddingClient`."""

    def ask(self, where: EncoderAddress, key: Key, digest: bytes) -> None: ...
    def taken(self, where: EncoderAddress, key: Key) -> None: ...
    def drop(self, key: Key) -> None: ...


@dataclass(slots=True, eq=False)
class _Fetch:
    where: EncoderAddress
    images: RequestImages
    expected: int
    """Tokens that the gateway expects to be cached."""
    asked: set[bytes] = field(default_factory=set)
    computed: int | None = None
    """Tokens that are cached; None before the grant."""


class ImageFetching:
    """Fetches the rows of prompts' images.

    Args:
        whole: rows of an image see one another (`ImageSpec.whole`).
        on_image: gets "cached" or "fetched" for each image.
        on_rows: called when rows came.
        on_failed: `on_failed(key, failure)`: an attempt does not get what it needs.
    """

    source: RowSource

    def __init__(
        self,
        cache: EmbeddingCache,
        *,
        whole: bool,
        on_image: Callable[[str], None] = lambda outcome: None,
        on_rows: Callable[[], None] = lambda: None,
        on_failed: Callable[[Key, work_pb2.Failure], None],
    ) -> None:
        self._cache = cache
        self._whole = whole
        self._on_image, self._on_rows, self._on_failed = on_image, on_rows, on_failed
        self._fetches: dict[Key, _Fetch] = {}

    def open(self, attempt: Attempt) -> RequestImages:
        """Return the images of a dispatched attempt, with rows where they were here before."""
        states = {span.digest: ImageState(span.digest, None) for span in attempt.images}
        for state in states.values():
            if state.take_cached(self._cache):
                self._on_image("cached")
        return RequestImages(attempt.images, states, self._whole)

    def begin(self, key: Key, images: RequestImages, encoder: prefill_pb2.Encoder) -> None:
        """Ask `encoder` for what an attempt will need, as far as that is known before its grant."""
        where = EncoderAddress(encoder.address, encoder.incarnation)
        fetch = self._fetches[key] = _Fetch(where, images, encoder.cached_tokens)
        self._ask(key, fetch, fetch.images.missing(fetch.expected))
        self._settle(key, fetch)

    def granted(self, key: Key, computed: int) -> None:
        """Ask for what it needs beyond that: `computed` tokens are cached."""
        if (fetch := self._fetches.get(key)) is None:
            return
        fetch.computed = computed
        self._ask(key, fetch, fetch.images.missing(computed))
        self._settle(key, fetch)

    def flush(self) -> None:
        """Forget the embeddings that are kept for other prompts."""
        self._cache.clear()

    def drop(self, key: Key) -> None:
        """Forget an attempt that has ended, or that another worker must compute."""
        if self._fetches.pop(key, None) is not None:
            self.source.drop(key)

    def arrived(self, key: Key, digest: bytes, rows: torch.Tensor) -> None:
        """Take an image's rows `[rows, width]`."""
        if (fetch := self._fetches.get(key)) is None:
            return
        reach("prefill.rows")
        images = fetch.images
        if any(s.digest == digest and s.first_row + s.rows > len(rows) for s in images.spans):
            reason, words = work_pb2.FAILURE_REASON_COMPUTE_FAILED, "an image has fewer rows than its tokens"
            self.failed(key, work_pb2.Failure(reason=reason, message=words))
            return
        images.states[digest].complete(rows)
        images.awaited.discard(digest)
        if fetch.computed is None:
            images.fetched_at = time.monotonic()
        else:
            images.encoded_at = time.monotonic()
        self._cache.put(digest, rows)
        self._on_image("fetched")
        self._settle(key, fetch)
        self._on_rows()

    def failed(self, key: Key, failure: work_pb2.Failure) -> None:
        """Report an attempt whose rows do not come."""
        if key in self._fetches:
            self.drop(key)
            self._on_failed(key, failure)

    def _ask(self, key: Key, fetch: _Fetch, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if digest not in fetch.asked:
                fetch.asked.add(digest)
                fetch.images.awaited.add(digest)
                self.source.ask(fetch.where, key, digest)

    def _settle(self, key: Key, fetch: _Fetch) -> None:
        """Let the encode worker forget an attempt that will ask for nothing more."""
        if not fetch.images.missing(fetch.computed or 0):
            del self._fetches[key]
            self.source.taken(fetch.where, key)
