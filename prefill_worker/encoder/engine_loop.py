"""The encode loop: pixels in, asks in, one tile at a time on the engine's thread, rows out.

One event loop owns all of this. A tile is encoded alone, so that its rows have the same bits whatever else
is here, and they are those that a prefill worker's own encoder makes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from diptych.engine.vision.embedding_cache import EmbeddingCache
from diptych.runtime.failpoints import failpoint, reach
from diptych.worker.v1 import encode_pb2, work_pb2
from diptych.worker_process.attempt import image_rows
from diptych.worker_process.step_thread import StepThread
from diptych.worker_process.step_watchdog import StepWatchdog
from kvtransfer.drivers.codec import key_of
from kvtransfer.drivers.rows_link import RowsLink
from kvtransfer.protocol.messages import Key
from prefill_worker.encoder.engine import LoadedEncoder
from prefill_worker.encoder.gateway_stream import EncodeGatewayStream
from prefill_worker.encoder.request import Ask, EncodeRequest, EncodeState
from prefill_worker.image_store import BadImages, ImageStore
from prefill_worker.request_images import ImageState

EARLY_ASK_S = 5.0
"""An ask waits for its attempt's Encode, which comes over another link, this long."""
_log = logging.getLogger(__name__)


class _EarlyAsk(NamedTuple):
    key: Key
    ask: Ask
    until: float


class EncodeLoop:
    """Encodes the images of attempts for the prefill workers that ask for them."""

    def __init__(
        self,
        engine: LoadedEncoder,
        store: ImageStore,
        cache: EmbeddingCache,
        *,
        on_ended: Callable[[EncodeRequest, str], None] = lambda request, outcome: None,
        on_image: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """Start nothing yet.

        Args:
            on_ended: gets each attempt at its end, with "delivered", "failed" or "cancelled".
            on_image: gets "encoded" or "cached" for each image that was asked for.
        """
        self._engine = engine
        self._store, self._cache = store, cache
        self._on_ended, self._on_image = on_ended, on_image
        self._requests: dict[Key, EncodeRequest] = {}
        self._early: list[_EarlyAsk] = []
        self._step: StepThread[EncodeRequest] = StepThread()
        self._encoding = False
        self._wake = asyncio.Event()
        self.steps = 0
        self.draining = False

    # ---- its server ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while a tile is being encoded."""
        return self._encoding

    @property
    def watchdog(self) -> StepWatchdog:
        """Durations of its tiles."""
        return self._step.watchdog

    @property
    def num_running(self) -> int:
        """Attempts with an ask that is not answered."""
        return sum(request.state is EncodeState.ASKED for request in self._requests.values())

    @property
    def num_waiting(self) -> int:
        """Attempts that may still be asked for."""
        return len(self._requests) - self.num_running

    @property
    def waiting_rows(self) -> int:
        """Rows of the images that are here and not encoded."""
        spec = self._engine.encoder.spec
        images = (image for request in self._requests.values() for image in request.images.values())
        return sum(spec.rows_of(image.tiles.shape) for image in images if image.tiles is not None)

    @property
    def cached_bytes(self) -> int:
        """Memory of the embeddings that are kept."""
        return self._cache.num_bytes

    def tick(self, now: float) -> None:
        """Deny asks whose attempt does not come. Called a few times a second."""
        late = [one for one in self._early if now >= one.until]
        self._early = [one for one in self._early if now < one.until]
        for one in late:
            one.ask.link.deny(one.ask.generation)

    def hand_back(self) -> None:
        """Return all attempts to their gateways, which place them elsewhere."""
        for request in list(self._requests.values()):
            self._fail(request, work_pb2.Failure(reason=work_pb2.FAILURE_REASON_DRAINING))

    def flush(self) -> int:
        """Forget all embeddings; return of how many images."""
        return self._cache.clear()

    def close(self) -> None:
        """Wait for the tile that is being encoded."""
        self._step.close()

    async def run(self) -> None:
        """Encode until cancelled; sleeps while nothing is asked for."""
        while True:
            self._wake.clear()
            if (found := self._next()) is None:
                await self._wake.wait()
                continue
            request, image = found
            await self._encode_tile(request, image)

    # ---- gateways ------------------------------------------------------------------------------------

    def receive_image(self, part: work_pb2.ImagePart, gateway: EncodeGatewayStream) -> None:
        """Take pixels of an attempt."""
        self._store.receive(part, gateway)

    def encode(self, message: encode_pb2.Encode, gateway: EncodeGatewayStream) -> None:
        """Take an attempt, all of whose pixels have come."""
        key = key_of(message.id)
        if key in self._requests:
            _log.warning("attempt %s came twice; the second is ignored", key)
            return
        if self.draining:
            self._store.drop(key)
            gateway.failed(key, work_pb2.Failure(reason=work_pb2.FAILURE_REASON_DRAINING))
            return
        spans = [image_rows(span) for span in message.images]
        try:
            pixels = self._store.take(key, spans, message.cache_namespace, self._engine.encoder.spec)
        except BadImages as error:
            _log.error("attempt %s: %s", key, error)
            reason = work_pb2.FAILURE_REASON_COMPUTE_FAILED
            gateway.failed(key, work_pb2.Failure(reason=reason, message=str(error)))
            return
        images = {digest: ImageState(digest, tiles) for digest, tiles in pixels.items()}
        trace = (message.traceparent, message.tracestate) if message.traceparent else None
        self._requests[key] = EncodeRequest(key, gateway, images, trace)
        gateway.keys[key] = None
        reach("encode.received")
        mine = [one.ask for one in self._early if one.key == key]
        self._early = [one for one in self._early if one.key != key]
        for ask in mine:
            self.ask(ask.link, key, ask.digest, ask.generation)

    def cancel(self, key: Key) -> None:
        """Forget an attempt without further messages."""
        self._store.drop(key)
        self._early = [one for one in self._early if one.key != key]
        if (request := self._requests.get(key)) is not None:
            self._end(request, "cancelled")

    def gateway_lost(self, gateway: EncodeGatewayStream) -> None:
        """Forget every attempt that came over a stream that ended."""
        for key in list(gateway.keys):
            self.cancel(key)
        self._store.gateway_lost(gateway)
        gateway.close()

    # ---- prefill workers -----------------------------------------------------------------------------

    def ask(self, link: RowsLink, key: Key, digest: bytes, generation: int) -> None:
        """Send an image's rows to a prefill worker, once they are there."""
        ask = Ask(link, digest, generation)
        request = self._requests.get(key)
        if request is None and not self.draining:
            self._early.append(_EarlyAsk(key, ask, time.monotonic() + EARLY_ASK_S))
            return
        if request is None or digest not in request.images:
            link.deny(generation)
            return
        request.asks.append(ask)
        if request.state is not EncodeState.ASKED:
            request.move(EncodeState.ASKED)
        reach("encode.asked")
        image = request.images[digest]
        if image.rows is None and image.take_cached(self._cache):
            self._on_image("cached")
        if image.rows is not None:
            self._answer(request, image)
        self._wake.set()

    def taken(self, key: Key) -> None:
        """Forget an attempt whose prefill worker has what it needs."""
        reach("encode.taken")
        if (request := self._requests.get(key)) is not None:
            request.gateway.delivered(key)
            self._end(request, "delivered")

    def reader_lost(self, link: RowsLink) -> None:
        """Forget the asks of a prefill worker that is gone; the gateway ends its attempts."""
        self._early = [one for one in self._early if one.ask.link is not link]
        for request in self._requests.values():
            if any(ask.link is link for ask in request.asks):
                request.asks = [ask for ask in request.asks if ask.link is not link]
                self._settle(request)

    # ---- one tile ------------------------------------------------------------------------------------

    def _next(self) -> tuple[EncodeRequest, ImageState] | None:
        """Return the first attempt that waits for an image, in order of arrival, and that image."""
        for request in self._requests.values():
            while (image := request.next_image()) is not None:
                if image.done or not image.take_cached(self._cache):
                    return request, image
                self._on_image("cached")
                self._answer(request, image)
        return None

    async def _encode_tile(self, request: EncodeRequest, image: ImageState) -> None:
        tile = image.next_tile()
        request.begun = request.begun or time.monotonic()
        self._encoding = True
        try:
            rows = await self._step.encode(lambda: self._engine.encode(tile))
            if failpoint("encode.fail"):
                raise RuntimeError("failpoint encode.fail")
        except Exception:
            _log.exception("an image of %s could not be encoded", request.key)
            if request.state is not EncodeState.ENDED:
                reason = work_pb2.FAILURE_REASON_COMPUTE_FAILED
                self._fail(request, work_pb2.Failure(reason=reason, message="an image could not be encoded"))
            return
        finally:
            self._encoding = False
            self.steps += 1
        reach("encode.tile")
        if image.add(rows) and image.rows is not None:
            self._cache.put(image.digest, image.rows)
            self._on_image("encoded")
            if request.state is not EncodeState.ENDED:
                self._answer(request, image)

    def _answer(self, request: EncodeRequest, image: ImageState) -> None:
        """Send the rows of an image to all that asked for it."""
        if image.rows is None:
            return
        for ask in request.asks:
            if ask.digest == image.digest:
                ask.link.send_rows(ask.generation, ask.digest, image.rows)
        request.asks = [ask for ask in request.asks if ask.digest != image.digest]
        self._settle(request)

    def _settle(self, request: EncodeRequest) -> None:
        if not request.asks and request.state is EncodeState.ASKED:
            request.move(EncodeState.SENT)

    def _fail(self, request: EncodeRequest, failure: work_pb2.Failure) -> None:
        request.gateway.failed(request.key, failure)
        self._end(request, "failed")

    def _end(self, request: EncodeRequest, outcome: str) -> None:
        request.move(EncodeState.ENDED)
        del self._requests[request.key]
        request.gateway.keys.pop(request.key, None)
        self._on_ended(request, outcome)
