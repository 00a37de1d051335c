"""The images of this worker's prompts: what came, what is encoded, and which tile is encoded next.

The engine loop encodes one tile between two steps, on the engine's thread, so that prompts of text wait for a
tile at most. A prompt's chunks wait until all its images are encoded that its cached prefix does not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch

from diptych.engine.vision.embedding_cache import EmbeddingCache
from diptych.engine.vision.encoder import ImageEncoder
from diptych.worker.v1 import work_pb2
from diptych.worker_process.attempt import Attempt
from diptych.worker_process.step_thread import StepThread
from prefill_worker.image_store import ImageStore
from prefill_worker.request import PrefillRequest, State
from prefill_worker.request_images import ImageState, RequestImages


class ImageEncoding:
    """Encodes the images of prompts, for a model with an encoder."""

    def __init__(
        self,
        encoder: ImageEncoder,
        store: ImageStore,
        cache: EmbeddingCache,
        *,
        threads: Callable[[], int],
        on_image: Callable[[str], None] = lambda outcome: None,  # cached or encoded
    ) -> None:
        self._encoder = encoder
        self._store = store
        self._cache = cache
        self._threads = threads
        self._on_image = on_image

    def receive(self, part: work_pb2.ImagePart, gateway: Hashable) -> None:
        """See `ImageStore.receive`."""
        self._store.receive(part, gateway)

    def drop(self, key: tuple[str, int]) -> None:
        """Forget the pixels of an attempt that will not be dispatched."""
        self._store.drop(key)

    def gateway_lost(self, gateway: Hashable) -> None:
        """See `ImageStore.gateway_lost`."""
        self._store.gateway_lost(gateway)

    def open(self, attempt: Attempt) -> RequestImages | None:
        """Return the images of a dispatched attempt, encoded where they were before; None if it has none.

        Raises BadImages.
        """
        if not attempt.images:
            return None
        spec = self._encoder.spec
        pixels = self._store.take(attempt.key, attempt.images, attempt.cache_namespace, spec)
        states = {digest: ImageState(digest, tiles) for digest, tiles in pixels.items()}
        for state in states.values():
            self._take_cached(state)
        return RequestImages(attempt.images, states, spec.whole)

    def next_waiting(self, requests: Iterable[PrefillRequest]) -> tuple[PrefillRequest, ImageState] | None:
        """Return the first prompt with blocks that waits for an image, and that image; None without one."""
        for request in requests:
            if (image := self._waiting(request)) is not None:
                return request, image
        return None

    async def encode(self, image: ImageState, step: StepThread[PrefillRequest]) -> None:
        """Encode the next tile of an image. Raises whatever the encoder raises."""
        tile = image.next_tile()
        rows = await step.encode(lambda: self._encode(tile))
        if image.add(rows) and image.rows is not None:
            self._cache.put(image.digest, image.rows)
            self._on_image("encoded")

    def _waiting(self, request: PrefillRequest) -> ImageState | None:
        """Return the image that a prompt with blocks waits for."""
        if request.images is None or request.state is not State.GRANTED or request.stop is not None:
            return None
        while (image := request.images.next_to_encode(request.computed)) is not None:
            if image.done or not self._take_cached(image):
                return image
        return None

    def _take_cached(self, image: ImageState) -> bool:
        found = image.take_cached(self._cache)
        if found:
            self._on_image("cached")
        return found

    def _encode(self, tile: torch.Tensor) -> torch.Tensor:
        torch.set_num_threads(self._threads())
        return self._encoder.encode(tile)
