"""A gateway's stream into an encode worker, and the messages to write on it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from diptych.runtime.send_queue import SendQueue
from diptych.worker.v1 import encode_pb2, work_pb2
from kvtransfer.drivers.codec import attempt_id
from kvtransfer.protocol.messages import Key


class EncodeGatewayStream:
    """Collects this worker's messages on the attempts of one gateway."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.keys: dict[Key, None] = {}  # attempts that live and die with this stream, in order
        self._queue: SendQueue[encode_pb2.EncodeServiceLinkResponse] = SendQueue()

    @property
    def has_pending(self) -> bool:
        """Always False: the end of an attempt is one message."""
        return False

    def delivered(self, key: Key) -> None:
        """Report that the prefill worker has what it needs."""
        ended = encode_pb2.EncodeEnded(id=attempt_id(key), delivered=encode_pb2.Delivered())
        self._queue.put(encode_pb2.EncodeServiceLinkResponse(ended=ended))

    def failed(self, key: Key, failure: work_pb2.Failure) -> None:
        """Report an attempt that cannot be completed here."""
        ended = encode_pb2.EncodeEnded(id=attempt_id(key), failure=failure)
        self._queue.put(encode_pb2.EncodeServiceLinkResponse(ended=ended))

    def heartbeat(self, beat: work_pb2.Heartbeat) -> None:
        """Send a heartbeat."""
        self._queue.put(encode_pb2.EncodeServiceLinkResponse(heartbeat=beat))

    def flushed(self, request_id: int, images: int) -> None:
        """Answer a FlushPrefixCache."""
        flushed = work_pb2.PrefixCacheFlushed(id=request_id, blocks=images)
        self._queue.put(encode_pb2.EncodeServiceLinkResponse(flushed=flushed))

    def close(self) -> None:
        """Write what is queued, and nothing more."""
        self._queue.close()

    async def messages(self) -> AsyncIterator[encode_pb2.EncodeServiceLinkResponse]:
        """Yield the messages to write; ends when the stream is closed."""
        while batch := await self._queue.take():
            for message in batch:
                yield message
