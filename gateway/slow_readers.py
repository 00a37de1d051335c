"""Limits on clients that read slowly: how long a message may wait to be read, and how many bytes may wait.

Workers do not wait for readers, and a request's place in the admission ends with the workers' terminal
message. What a client has not read yet stays in this process: the output since the last message, in the
request's `OutputStream`s, and the message that is being written. `StreamWriter` ends the stream with
`SlowReader` when

- one message is not taken within `ReaderLimits.write_s`,
- more than `ReaderLimits.stream_bytes` wait for this reader, or
- more than `ReaderLimits.total_bytes` wait for all readers, and most of them for this one.

A deadline, a shutdown or a fault that ends the request does not wait for the reader either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

from diptych.runtime.errors import DiptychError, SlowReader
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.heap_trim import HeapTrim
from diptych.v1 import inference_pb2 as pb
from gateway.attempt.types import TokenLogprob
from gateway.call import Call

# Measured with CPython 3.11: what a token and its alternatives occupy while they wait.
TOKEN_BYTES: Final = 96
LOGPROB_BYTES: Final = 128
ALTERNATIVE_BYTES: Final = 128
# Streams that left so much unread, in sum, leave holes in the heap; less of one is the pace of good readers.
HOLE_BYTES: Final = 1 << 20
LEAST_BYTES: Final = 1 << 16
ERROR_GRACE_S: Final = 0.25  # for a message that is being written when its request fails
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """Limits on unread output; see the module. Bytes as they are in memory, estimated."""

    write_s: float = 60.0
    stream_bytes: int = 64 << 20
    total_bytes: int = 256 << 20


def create_reader_series(metrics: GatewayMetrics) -> None:
    """Create the series of streams that end for their readers, before the first one does."""
    for limit in fields(ReaderLimits):
        metrics.slow_readers.labels(limit.name)


def unread_bytes(token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> int:
    """Estimate the memory of output tokens that wait for their reader."""
    alternatives = sum(len(logprob.top) for logprob in logprobs)
    return TOKEN_BYTES * len(token_ids) + LOGPROB_BYTES * len(logprobs) + ALTERNATIVE_BYTES * alternatives


class UnreadOutput:
    """Output of all streams of a gateway that waits for its readers."""

    def __init__(self, limits: ReaderLimits, metrics: GatewayMetrics, heap: HeapTrim) -> None:
        self.limits = limits
        self.bytes = 0
        self._metrics = metrics
        self._writing: set[StreamWriter] = set()
        self._heap = heap
        self._freed = 0  # of ended streams, since the heap was trimmed

    def begin(self, writer: StreamWriter) -> None:
        """Register a writer whose message waits for its reader."""
        self._writing.add(writer)

    def end(self, writer: StreamWriter) -> None:
        self._writing.discard(writer)

    def add(self, unread: int) -> None:
        """Count ``unread`` bytes more, or fewer; end the streams with most of them beyond the total."""
        self.bytes += unread
        while self.bytes > self.limits.total_bytes and unread > 0 and self._writing:
            largest = max(self._writing, key=lambda writer: writer.unread)
            if not largest.unread:
                return
            self._writing.discard(largest)
            largest.cut(SlowReader("total_bytes"))

    def count(self, request_id: str, error: SlowReader, unread: int) -> None:
        """Count and log a stream that ends for its reader."""
        self._metrics.slow_readers.labels(error.limit).inc()
        _log.warning(
            "request %s: SLOW_READER: %d bytes were not read, limit %s", request_id, unread, error.limit
        )

    def freed(self, largest: int) -> None:
        """Note the end of a stream of which up to ``largest`` bytes waited."""
        if largest < LEAST_BYTES:
            return
        self._freed += largest
        if self._freed >= HOLE_BYTES:
            self._freed = 0
            self._heap.request()


class StreamWriter:
    """Writer of one stream of messages, within the limits on its reader.

    ``unread``: bytes that wait for this reader. `close` must follow.
    """

    def __init__(self, call: Call, output: UnreadOutput) -> None:
        self.unread = 0
        self._call = call
        self._output = output
        self._largest = 0
        self._sending = 0  # of `unread`, in the message that is being written
        self._since = 0.0
        self._task: asyncio.Task[object] | None = None  # that waits for the reader
        self._error: DiptychError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error_timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def write(self, message: pb.GenerateResponse, waiting: int = 0) -> None:
        """Pass ``message`` to the call, while ``waiting`` bytes of output are in no message so far.

        Raises `SlowReader`, the error of `fail`, or CancelledError.
        """
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        self._since, self._task = loop.time(), asyncio.current_task()
        self._taken(message.ByteSize(), waiting)
        self._output.begin(self)
        if self._timer is None:
            self._timer = loop.call_later(self._output.limits.write_s, self._check)
        try:
            await self._call.write(message)
        except asyncio.CancelledError:
            # The client's own cancel may have come at the same time: then it is that.
            if self._error is None or self._task is None or self._task.uncancel():
                raise
            raise self._error from None
        finally:
            self._task = None
            self._output.end(self)
            if not self._closed:
                self._add(-self._sending)
            self._sending = 0

    def produced(self, unread: int) -> None:
        """Count output that was produced and is in no message so far."""
        if self._closed:
            return
        self._add(unread)
        if self._task is not None and self.unread > self._output.limits.stream_bytes:
            self.cut(SlowReader("stream_bytes"))

    def fail(self, error: DiptychError) -> None:
        """End the stream with the request's error, soon and whether or not its reader takes a message."""
        if self._error_timer is None and not self._closed:
            self._error_timer = asyncio.get_running_loop().call_later(ERROR_GRACE_S, self.cut, error)

    def cut(self, error: DiptychError) -> None:
        """End the stream with ``error`` if a message of it waits for its reader."""
        if self._task is None or self._error is not None:
            return
        self._error = error
        if isinstance(error, SlowReader):
            self._output.count(self._call.request_id, error, self.unread)
        self._release()
        self._output.end(self)
        self._task.cancel()

    def close(self) -> None:
        """Forget what is unread: the stream is over."""
        for timer in (self._timer, self._error_timer):
            if timer is not None:
                timer.cancel()
        self._release()

    def _release(self) -> None:
        if not self._closed:
            self._closed = True
            self._output.add(-self.unread)
            self._output.freed(self._largest)
            self.unread = 0

    def _taken(self, size: int, waiting: int) -> None:
        """Count the message in place of the output that is in it now."""
        if not self._closed:
            self._add(size + waiting - self.unread)
            self._sending = size

    def _add(self, unread: int) -> None:
        self.unread += unread
        self._largest = max(self._largest, self.unread)
        self._output.add(unread)

    def _check(self) -> None:
        self._timer = None
        if self._task is None:
            return  # the next message sets it again
        loop = asyncio.get_running_loop()
        at = self._since + self._output.limits.write_s
        if loop.time() >= at:
            self.cut(SlowReader("write_s"))
        else:
            self._timer = loop.call_at(at, self._check)
